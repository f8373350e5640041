# SPDX-License-Identifier: Apache-2.0
"""Accesses by threads, copies, data that moves between threads, atomic operations."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax

from pallas_gpu import types
from pallas_gpu.explanation.findings import BY_ID, SlowFinding
from pallas_gpu.explanation.model import Model
from pallas_gpu.explanation.products import instead_of_wgmma
from pallas_gpu.layouts.moves import rates
from pallas_gpu.lowering.notes import Access, Conversion, Copy, Note
from pallas_gpu.program import nodes
from pallas_gpu.program.walk import Site
from pallas_gpu.runtime.stages import loop_around

_COPY_SPACES = {types.GMEM, types.SMEM}
# What takes so little is the access to one element.
_FEW_CYCLES = 1.0
# The L2 updates a sector that others update too. It fits 256 int32 that 256 to 2048
# CTAs add to, on an H100.
_SECTOR_SECONDS = 0.65e-9


def accesses(model: Model) -> Iterator[SlowFinding]:
    """Yields findings of what the rules have noted, and of copies."""
    for site in model.sites:
        noted = model.notes.found.get(site.op, {})
        if not model.executed.get(site.op) or model.site_of[site.op] is not site:
            continue
        for note in noted:
            least = _FEW_CYCLES if isinstance(note, Access) else 0.0
            of_product = isinstance(note, Conversion) and instead_of_wgmma(site.op)
            if note.cycles > least and not of_product:
                yield _noted(model, site, note)
        if _is_copy(site) and not any(isinstance(note, Copy) for note in noted):
            yield _copy(model, site)


def atomics(model: Model) -> Iterator[SlowFinding]:
    """Yields atomic operations on elements of GMEM that do not depend on the CTA."""
    for site in model.sites:
        times = model.executed.get(site.op, 0.0)
        for access in site.op.accesses if times else ():
            is_update = access.space is types.GMEM and access.operation.atomic
            if not is_update or _depends_on_cta(access):
                continue
            sizes, bits = access.window.sizes, types.itemsize_bits(access.dtype)
            size = math.prod(sizes) * bits // 8
            sectors = -(-size // rates.SECTOR_BYTES)
            seconds = model.ctas * times * sectors * _SECTOR_SECONDS
            yield SlowFinding(
                BY_ID["contended-atomics"],
                f"{model.ctas:,} CTAs update the same {size:,} bytes of GMEM in turn",
                f"{site.op.name} of {access.dtype}{list(sizes)}",
                "let a CTA take more elements, so that fewer CTAs update the array",
                model.place(site),
                model.loops(site),
                seconds,
                seconds,
                facts={"bytes": size, "ctas": model.ctas},
            )


def _depends_on_cta(access: nodes.Access) -> bool:
    """Whether the elements may differ: by a start, or an array of indices."""
    steps = jax.tree.leaves(access.transforms)
    return bool(access.window.dynamic) or any(getattr(x, "shape", ()) for x in steps)


def _noted(model: Model, site: Site, note: Note) -> SlowFinding:
    found, seconds = note.verdict, model.busy(site.op, note.cycles)
    what, got, hint, lost = found.what, note.got, found.hint, seconds * found.lost
    if isinstance(note, Conversion):
        got = f"{got}, for {site.op.name}"
        # An author converts once what does not change in a loop.
        lost *= loop_around(site) is not None
    if note.is_internal:
        what, hint = f"{what}, of scratch that the package declares", None
    return SlowFinding(
        BY_ID[found.kind], what, got, hint, model.place(site), model.loops(site),
        seconds, lost, facts=note.facts,
    )  # fmt: skip


def _is_copy(site: Site) -> bool:
    spaces = {access.space for access in site.op.accesses}
    return spaces >= _COPY_SPACES and site.op.operation is not None


def _copy(model: Model, site: Site) -> SlowFinding:
    smem, gmem = (site.op.access_to(space) for space in (types.SMEM, types.GMEM))
    size = types.itemsize_bits(smem.dtype) // 8
    for n in smem.window.shape:
        size *= n
    seconds = model.busy(site.op, size / rates.GMEM_BYTES_PER_CYCLE)
    ways = ("SMEM", "GMEM") if gmem.writes else ("GMEM", "SMEM")
    shape = f"{smem.dtype}{list(smem.window.shape)}"
    return SlowFinding(
        BY_ID["copy"],
        f"a copy from {ways[0]} to {ways[1]} by TMA",
        shape,
        at=model.place(site),
        loops=model.loops(site),
        seconds=seconds,
        facts={"path": "TMA", "bytes": size, "operation": site.op.name},
    )
