# SPDX-License-Identifier: Apache-2.0
"""Registers that are spilled, and how many CTAs an SM holds at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pallas_gpu import types
from pallas_gpu.explanation.findings import BY_ID, SlowFinding
from pallas_gpu.explanation.model import Model, loaded_bytes
from pallas_gpu.layouts.moves import rates
from pallas_gpu.program.walk import Site
from pallas_gpu.runtime import machine_code, stages
from pallas_gpu.testing import cost
from pallas_gpu.types.mesh import WARPGROUP_THREADS

# From a load until its value can be used while the memory is busy. Estimate.
_LOADED_CYCLES = 1000.0
# The share of a kernel's time in which memory is busy from which it bounds the kernel.
_BOUND_BY_MEMORY = 0.5
# The share of the registers that a loop's arrays have to take to be the reason.
_MOST_REGISTERS = 0.6


def spills(model: Model) -> Iterator[SlowFinding]:
    """Yields what ptxas spills, loop by loop."""
    compiled = model.compiled
    if compiled is None:
        return
    used = compiled.resources
    if not (used.spill_store_bytes or used.spill_load_bytes):
        return
    if compiled.sass_with_control is None:
        yield SlowFinding(
            BY_ID["spill"],
            f"each thread stores {used.spill_store_bytes} bytes of registers to local "
            f"memory and loads {used.spill_load_bytes}; nvdisasm is missing, which "
            "shows where",
            at=model.place(None),
            facts={"stored_bytes": used.spill_store_bytes,
                   "loaded_bytes": used.spill_load_bytes},
        )  # fmt: skip
        return
    for spilled in machine_code.spilled(compiled.sass_with_control):
        site = stages.spills_at(spilled, model.notes, model.sites)
        yield _spill(model, spilled, site)


def _spill(
    model: Model, spilled: machine_code.Spilled, site: Site | None
) -> SlowFinding:
    stored = spilled.stored_bytes * WARPGROUP_THREADS / rates.GMEM_BYTES_PER_CYCLE
    # The L1 cache, which is the SMEM's memory, serves loads.
    loaded = spilled.loaded_bytes * WARPGROUP_THREADS / 128
    seconds = 0.0 if site is None else model.busy(site.op, stored + loaded)
    loop = None if site is None else stages.loop_around(site)
    arrays = [] if loop is None else _carried(loop)
    limit = model.target.max_registers_per_thread
    taken = sum(count for count, _ in arrays)
    hint = None
    if taken >= _MOST_REGISTERS * limit:
        count, name = max(arrays)
        hint = (
            f"the loop carries arrays in {taken:g} registers of each thread, {name} in "
            f"{count:g} of them: carry a smaller part of it, divide it among more "
            "warpgroups, or keep it in SMEM"
        )
    return SlowFinding(
        BY_ID["spill"],
        spilled.said(loop),
        None if site is None else f"most of it for {site.op.name}",
        hint,
        model.place(site),
        () if site is None else model.loops(site),
        seconds,
        seconds,
        facts={
            "in_loop": spilled.in_loop,
            "stored_bytes": spilled.stored_bytes,
            "loaded_bytes": spilled.loaded_bytes,
            "registers_of_carries": taken,
        },
    )


def _carried(loop: Site) -> list[tuple[float, str]]:
    """Registers of each thread for the arrays that a loop carries, and their types."""
    found = []
    for _, j in loop.op.carries:
        value = loop.op.regions[-1].results[j]
        if value.shape:
            registers = math.prod(value.shape) / WARPGROUP_THREADS
            registers *= types.itemsize_bits(value.dtype) / 32
            found.append((registers, f"{value.dtype}{list(value.shape)}"))
    return found


def occupancy(model: Model) -> Iterator[SlowFinding]:
    """Yields that few CTAs fit an SM: for loads, or for warpgroups that take turns."""
    limits = dict(model.occupancy)
    resident, grid = min(limits.values()), limits.pop("grid")
    by = [name for name, count in limits.items() if count == min(limits.values())]
    if grid <= resident or by[0] in ("blocks", "threads"):
        return
    names = " and ".join(by)
    what = f"{resident} CTA{'s' * (resident > 1)} on an SM, limited by {names}"
    others = min(count for name, count in limits.items() if name not in by)
    next_ = min(others, grid)
    facts: dict[str, Any] = {"limited_by": by, "ctas_per_sm": resident}
    bandwidth = model.target.memory_bytes_per_second * cost.OF_MEMORY_BANDWIDTH
    moved = model.work.loaded_bytes + model.work.stored_bytes
    seconds = moved * grid * model.target.sm_count / bandwidth
    in_turn = 0.0
    if model.estimate.bound == "latency" and model.estimate.flops:
        better = cost.estimate(model.build, more_ctas=1)
        in_turn = max(model.estimate.seconds - better.seconds, 0.0)
    if in_turn:
        seconds = lost = in_turn
        what += ": while its warpgroups compute or wait, nothing multiplies"
    elif model.work.loaded_bytes and seconds >= _BOUND_BY_MEMORY * model.seconds:
        needed = bandwidth / model.target.sm_count * _LOADED_CYCLES / model.hertz
        loading = _in_flight_bytes(model) * resident
        lost = seconds * max(needed / max(loading, 1) - 1, 0.0)
        what += (
            f", with {loading:,.0f} bytes of loads under way where the memory needs "
            f"{needed:,.0f}"
        )
        facts |= {"bytes_under_way": loading, "needed_bytes": needed}
    else:
        return
    yield SlowFinding(
        BY_ID["occupancy"],
        what,
        _used(model, by[0]),
        f"use less {names}, by smaller blocks or fewer warpgroups: up to {next_} CTAs "
        "would fit; or do more at a time"
        if next_ > resident
        else None,
        model.place(None),
        seconds=seconds,
        lost_seconds=lost,
        is_counted=bool(in_turn),
        facts=facts,
    )


def _used(model: Model, name: str) -> str:
    match name:
        case "registers" if model.compiled is not None:
            used = model.compiled.resources
            return (
                f"{used.registers_per_thread} registers of each of "
                f"{used.threads_per_block} threads"
            )
        case "TMEM":
            return f"{model.build.plan.tmem_columns} columns"
    return f"{model.build.plan.smem_bytes:,} bytes of SMEM"


def _in_flight_bytes(model: Model) -> float:
    """The bytes of loads that a CTA has under way at once.

    Those of a ring of buffers, and what threads load in an iteration of a loop, or
    outside of loops.
    """
    found: dict[Any, float] = {}
    for site in model.sites:
        is_atomic = any(access.reads and access.writes for access in site.op.accesses)
        times = model.turns.get(site.op, 0.0)
        if is_atomic or not times:
            continue
        loop = stages.loop_around(site)
        key = None if loop is None else loop.op
        # Before a loop the copies of its first iterations fill a slot each.
        depth = 1.0 if loop is None else model.depths.get(site.op, 1.0)
        size = loaded_bytes(site.op) * depth * model.executed[site.op] / times
        found[key] = found.get(key, 0.0) + size
    return max(found.values(), default=0.0)
