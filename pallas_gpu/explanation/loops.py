# SPDX-License-Identifier: Apache-2.0
"""Loops: what each iteration waits for, and loads that nothing overlaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pallas_gpu import findings
from pallas_gpu.explanation.findings import BY_ID, SlowFinding
from pallas_gpu.explanation.model import Model, loaded_bytes
from pallas_gpu.lowering.notes import Access
from pallas_gpu.lowering.waits import FEW_ITERATIONS, is_carried, said, what_helps
from pallas_gpu.program.walk import Site
from pallas_gpu.runtime.stages import loop_around
from pallas_gpu.testing import cost

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
        if model.iterations(loop) != 1:
            yield _loop(model, loop, sites)
        yield from _unpipelined(model, loop, sites)
    yield from _ring(model, inside)
    for where, why in model.build.params.not_ahead:
        what = f"a load is not copied ahead: {why}"
        yield SlowFinding(BY_ID["not-ahead"], what, at=findings.place(where))


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
    size = sum(loaded_bytes(site.op) for site in loads)
    if size < _FEW_BYTES:
        return
    # Loads of one iteration are under way at the same time.
    times = max(model.turns[site.op] for site in loads)
    lost = model.waiting(times)
    first = max(loads, key=lambda x: loaded_bytes(x.op))
    yield SlowFinding(
        BY_ID["unpipelined-loads"],
        said(iterations, size),
        f"{len(loads)} load{'s' * (len(loads) > 1)} by ld.global",
        what_helps(model.build.params, first.op),
        model.place(first),
        model.loops(first),
        lost,
        lost,
        facts={
            "iterations": iterations,
            "bytes_per_iteration": size,
            "path": "ld.global",
            "ctas_per_sm": model.resident,
        },
    )


def _ring(model: Model, inside: Mapping[Site, Sequence[Site]]) -> Iterator[SlowFinding]:
    """Yields that buffers in SMEM are too few, of the loop that copies most."""
    rings = {loop: [x for x in sites if x.op in model.depths]
             for loop, sites in inside.items()}  # fmt: skip
    moved = {loop: sum(model.turns[x.op] * loaded_bytes(x.op) for x in copies)
             for loop, copies in rings.items()}  # fmt: skip
    loop = max(moved, key=lambda x: moved[x], default=None)
    if loop is None or not moved[loop]:
        return
    copies, iterations = rings[loop], model.iterations(loop) or 0
    first = max(copies, key=lambda x: loaded_bytes(x.op))
    slots, size = model.depths[first.op], sum(loaded_bytes(x.op) for x in copies)
    # Of n slots n - 1 are filled while one is read; with one slot they take turns.
    wanted = max(int(slots) + 1, 3)
    better = cost.estimate(model.build, more_slots=wanted - int(slots))
    lost = max(model.estimate.seconds - better.seconds, 0.0)
    if iterations < FEW_ITERATIONS or not lost:
        return
    used, most = model.build.plan.smem_bytes, model.target.smem_bytes_per_block
    hint = f"{wanted} slots, by num_stages or max_concurrent_steps"
    if used + (wanted - slots) * size > most:
        hint += ", of smaller blocks: SMEM has no room for more of these"
    yield SlowFinding(
        BY_ID["unpipelined-loads" if slots < 2 else "short-ring"],
        f"a ring of {slots:g} slot{'s' * (slots > 1)}, of {size:,.0f} bytes each, does "
        "not hide the latency of memory",
        f"{used:,} of {most:,} bytes of SMEM",
        hint,
        model.place(first),
        model.loops(first),
        lost,
        lost,
        is_counted=True,
        facts={
            "iterations": iterations,
            "slots": slots,
            "bytes_per_iteration": size,
            "path": first.op.name,
        },
    )


def _waits_for_load(model: Model, loop: Site, site: Site) -> bool:
    """Whether an operation loads from GMEM what the same iteration uses."""
    op = site.op
    noted = model.notes.found.get(op, {})
    if not any(
        isinstance(note, Access) and note.memory == "GMEM" and note.kind == "load"
        for note in noted
    ):
        return False
    return not is_carried(op, loop.op.regions[-1])
