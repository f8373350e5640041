# SPDX-License-Identifier: Apache-2.0
"""Accesses by threads, copies, and data that moves between threads."""

from __future__ import annotations

from collections.abc import Iterator

from pallas_gpu import types
from pallas_gpu.explanation.findings import BY_ID, SlowFinding
from pallas_gpu.explanation.model import Model
from pallas_gpu.explanation.products import instead_of_wgmma
from pallas_gpu.layouts.moves import rates
from pallas_gpu.lowering.notes import Access, Conversion, Copy, Note
from pallas_gpu.program.walk import Site
from pallas_gpu.runtime.stages import loop_around

_COPY_SPACES = {types.GMEM, types.SMEM}
# What takes so little is the access to one element.
_FEW_CYCLES = 1.0


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
