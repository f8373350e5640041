# SPDX-License-Identifier: Apache-2.0
"""Accesses by threads, copies, data that moves between threads, atomic operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

from pallas_gpu import types
from pallas_gpu.explanation.findings import BY_ID, SlowFinding
from pallas_gpu.explanation.model import Model
from pallas_gpu.explanation.products import instead_of_wgmma
from pallas_gpu.layouts.moves import rates
from pallas_gpu.lowering.notes import Access, Conversion, Copy
from pallas_gpu.program import nodes
from pallas_gpu.program.walk import Site
from pallas_gpu.runtime.stages import loop_around

# Transactions for one that the elements take. Two lanes of a bank are hard to avoid;
# the L1 cache has what other accesses of the same load need of a sector.
_MANY_TRANSACTIONS = {"SMEM": 2.0, "GMEM": 4.0}
_WIDEST_BYTES = 16
# The L2 updates a sector that others update too. It fits 256 int32 that 256 to 2048
# CTAs add to, on an H100.
_SECTOR_SECONDS = 0.65e-9
_COPY_SPACES = {types.GMEM, types.SMEM}


def accesses(model: Model) -> Iterator[SlowFinding]:
    """Yields findings of what the rules have noted, and of copies."""
    for site in model.sites:
        noted = model.notes.found.get(site.op, {})
        if not model.executed.get(site.op) or model.site_of[site.op] is not site:
            continue
        common = {"at": model.place(site), "loops": model.loops(site)}
        for note in noted:
            match note:
                case Access() if note.cycles > 1.0:
                    yield _access(model, site, note, common)
                case Copy():
                    yield _copy_by_threads(model, site, note, common)
                case Conversion() if note.cycles and not instead_of_wgmma(site.op):
                    yield _conversion(model, site, note, common)
        if _is_copy(site) and not any(isinstance(note, Copy) for note in noted):
            yield _copy(model, site, common)


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


def _access(
    model: Model, site: Site, note: Access, common: dict[str, Any]
) -> SlowFinding:
    seconds = model.busy(site.op, note.cycles)
    name = f"a {note.kind} of {note.memory}"
    facts: dict[str, Any] = {
        "memory": note.memory,
        "kind": note.kind,
        "instruction": note.instruction,
        "width_bytes": note.width_bytes,
        "internal": note.is_internal,
    }
    ratio = 1.0 if note.transactions is None else note.transactions / note.ideal
    in_smem = note.memory == "SMEM"
    if not in_smem:
        ratio = min(ratio, note.wasted)
    unit = "wavefronts" if in_smem else "sectors"
    if note.transactions is not None:
        facts[f"{unit}_per_request"] = note.transactions
        facts[f"ideal_{unit}"] = note.ideal
    kind, hint, lost = "access", None, 0.0
    what = f"{name} by {note.instruction}, {note.width_bytes} bytes of each thread"
    if note.by_element:
        kind = "element-access"
        # What indices select has no other way.
        if not site.op.name.endswith("_indexed"):
            lost = seconds * (1 - note.width_bytes / _WIDEST_BYTES)
        what = f"{name} computes an address for each element"
        hint = "access slices: whole tiles, and starts that are multiples of them"
    elif note.width_bytes < note.wide_bytes:
        kind, lost = "narrow-access", seconds * (1 - note.width_bytes / note.wide_bytes)
        what = (
            f"{name} takes {note.width_bytes} bytes of each thread at a time, and "
            f"{note.wide_bytes} where its start is known to be a multiple"
        )
        hint = "write a dynamic start as a product, or as plgpu.multiple_of"
    elif ratio >= _MANY_TRANSACTIONS[note.memory]:
        lost = seconds * (1 - 1 / ratio)
        if in_smem:
            kind, what = "bank-conflicts", f"{name} has {ratio:g}-way bank conflicts"
            hint = (
                "declare the array with a tiling and a swizzle, or with another minor "
                "dimension"
            )
        else:
            kind = "uncoalesced"
            what = (
                f"{name} is not coalesced: {note.transactions:g} sectors a request "
                f"where {note.ideal:g} would do"
            )
            hint = (
                "let the threads of a warp access adjacent elements: more of the minor "
                "dimension in a block, or whole rows by way of SMEM"
            )
    if note.is_internal:
        what, hint = f"{what}, of scratch that the package declares", None
    return SlowFinding(
        BY_ID[kind], what, note.what, hint, seconds=seconds, lost_seconds=lost,
        facts=facts, **common,
    )  # fmt: skip


def _copy_by_threads(
    model: Model, site: Site, note: Copy, common: dict[str, Any]
) -> SlowFinding:
    size = note.chunks * note.chunk_bytes
    # An instruction of a warp moves a chunk for each lane.
    requests = note.chunks / 32
    cycles = max(size / rates.GMEM_BYTES_PER_CYCLE, requests * rates.GMEM_INSTRUCTION)
    if not note.is_asynchronous:
        cycles += 2 * requests
    seconds = model.busy(site.op, cycles)
    path = "cp.async" if note.is_asynchronous else "ld and st"
    narrow = note.chunk_bytes < _WIDEST_BYTES
    ideal = size / min(rates.GMEM_BYTES_PER_CYCLE, 32 * _WIDEST_BYTES)
    lost = max(seconds - model.busy(site.op, ideal), 0.0) if narrow else 0.0
    return SlowFinding(
        BY_ID["narrow-access" if narrow else "copy"],
        f"threads copy {size} bytes by {path}, {note.chunk_bytes} at a time",
        note.what,
        "start and end rows at multiples of 16 bytes: pad the minor dimension",
        seconds=seconds,
        lost_seconds=lost,
        facts={"path": path, "bytes": size, "width_bytes": note.chunk_bytes},
        **common,
    )


def _is_copy(site: Site) -> bool:
    spaces = {access.space for access in site.op.accesses}
    return spaces >= _COPY_SPACES and site.op.operation is not None


def _copy(model: Model, site: Site, common: dict[str, Any]) -> SlowFinding:
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
        seconds=seconds,
        facts={"path": "TMA", "bytes": size, "operation": site.op.name},
        **common,
    )


def _conversion(
    model: Model, site: Site, note: Conversion, common: dict[str, Any]
) -> SlowFinding:
    seconds = model.busy(site.op, note.cycles)
    way = "through SMEM" if note.shared_bytes else "by shuffles"
    if note.target:
        what = f"{note.what} is converted to another layout {way}"
        got = f"{note.source} -> {note.target}, for {site.op.name}"
    else:
        what, got = f"{site.op.name} moves data between threads {way}", note.what
    # What a reduction or a slice moves has to move, as what an author converts once.
    is_avoidable = note.target and loop_around(site) is not None
    return SlowFinding(
        BY_ID["conversion"],
        what,
        got,
        "convert before the loop what does not change in it; store to SMEM what "
        "operations need in several layouts, and load it in each",
        seconds=seconds,
        lost_seconds=seconds if is_avoidable else 0.0,
        facts={
            "source": note.source,
            "target": note.target,
            "shared_bytes": note.shared_bytes,
            "cycles": note.cycles,
        },
        **common,
    )
