# SPDX-License-Identifier: Apache-2.0
"""Loops: what each iteration waits for, and loads that nothing overlaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pallas_gpu import types
from pallas_gpu.explanation.findings import BY_ID, SlowFinding
from pallas_gpu.explanation.model import Model
from pallas_gpu.lowering.notes import Access
from pallas_gpu.lowering.waits import FEW_ITERATIONS, HINT, is_carried
from pallas_gpu.program.walk import Site
from pallas_gpu.runtime.stages import loop_around

_WAITS = {
    "barrier_wait": "mbarrier",
    "wgmma_wait": "wgmma",
    "wait_gmem_to_smem": "cp.async",
    "wait_smem_to_gmem": "stores by TMA",
    "wait_load_tmem": "tcgen05.ld",
    "semaphore_wait": "semaphore",
    "cluster_sync": "cluster",
    "commit_smem": "all threads",
    "commit_gmem": "all threads",
}
# Fewer bytes are those of scalars and short vectors.
_FEW_BYTES = 256


def loops(model: Model) -> Iterator[SlowFinding]:
    """Yields what is known of each loop that is executed."""
    inside: dict[Site, list[Site]] = {}
    for site in model.sites:
        loop = loop_around(site)
        if loop is not None and model.executed.get(site.op):
            inside.setdefault(loop, []).append(site)
    for loop, sites in inside.items():
        yield _loop(model, loop, sites)
        yield from _unpipelined(model, loop, sites)


def _loop(model: Model, loop: Site, sites: Sequence[Site]) -> SlowFinding:
    iterations = model.iterations(loop)
    entered = model.executed.get(loop.op, 0.0)
    total = entered * iterations if iterations else 0.0
    waits: dict[str, float] = {}
    for site in sites:
        name = _WAITS.get(site.op.name)
        if name is not None:
            share = model.executed[site.op] / total if total else 1.0
            waits[name] = waits.get(name, 0.0) + share
    times = "an unknown number of" if iterations is None else f"{iterations:g}"
    listed = ", ".join(f"{n:.3g} for {name}" for name, n in waits.items())
    return SlowFinding(
        BY_ID["loop"],
        f"a loop has {times} iterations" + (f"; waits of each: {listed}" * bool(waits)),
        at=model.place(loop),
        loops=model.loops(loop),
        facts={"iterations": iterations, "waits_per_iteration": waits},
    )


def _unpipelined(
    model: Model, loop: Site, sites: Sequence[Site]
) -> Iterator[SlowFinding]:
    iterations = model.iterations(loop)
    if iterations is None or iterations < FEW_ITERATIONS:
        return
    loads = [site for site in sites if _waits_for_load(model, loop, site)]
    size = sum(_bytes(site) for site in loads)
    if size < _FEW_BYTES:
        return
    # Loads of one iteration are under way at the same time.
    times = max(model.turns[site.op] for site in loads)
    lost = model.waiting(times)
    first = max(loads, key=_bytes)
    by_tma = first.op in model.depths
    yield SlowFinding(
        BY_ID["unpipelined-loads"],
        f"each of {iterations:g} iterations waits for {size:,.0f} bytes from GMEM"
        + (": there is one buffer" if by_tma else ", which threads load"),
        f"{len(loads)} load{'s' * (len(loads) > 1)} by {_path(first)}",
        HINT,
        model.place(first),
        model.loops(first),
        lost,
        lost,
        facts={
            "iterations": iterations,
            "bytes_per_iteration": size,
            "path": _path(first),
            "ctas_per_sm": model.resident,
        },
    )


def _path(site: Site) -> str:
    return "ld.global" if len(site.op.accesses) == 1 else site.op.name


def _waits_for_load(model: Model, loop: Site, site: Site) -> bool:
    """Whether an operation loads from GMEM what the same iteration uses."""
    op = site.op
    if op in model.depths:
        return model.depths[op] < 2
    noted = model.notes.found.get(op, {})
    if not any(
        isinstance(note, Access) and note.memory == "GMEM" and note.kind == "load"
        for note in noted
    ):
        return False
    return not is_carried(op, loop.op.regions[-1])


def _bytes(site: Site) -> float:
    for access in site.op.accesses:
        if access.space is types.GMEM and access.reads:
            size = types.itemsize_bits(access.dtype) / 8
            shape = site.op.results[0].shape if site.op.results else access.window.shape
            for n in shape:
                size *= n
            return size if shape else 0.0
    return 0.0
