# SPDX-License-Identifier: Apache-2.0
"""The cost model: an estimate of a kernel's time, without a GPU.

A roofline over what a kernel does (`work.py`) and how many of its CTAs a card holds at
once: the tensor core, copies to SMEM, SMEM and arithmetic of an SM, and the L2, the
memory and the power of the card. It ranks configurations of one kernel; the times of a
card are only near it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pallas_gpu import arch, resources, types
from pallas_gpu.lowering.machine import Build
from pallas_gpu.testing.work import SMEM_BYTES_PER_CYCLE, Buffer, Counter, Work
from pallas_gpu.types.mesh import WARPGROUP_THREADS

# Of an H200: a copy from device to device reads and writes 4.27 TB/s of its 4.8, and
# large bf16 products reach 810 TFLOP/s, the limit of its power (measured).
OF_MEMORY_BANDWIDTH = 0.89
_POWER_FLOPS_PER_SECOND_16_BITS = 810e12
# A step of a ring of buffers: from the release of a buffer until its next data can be
# used. Fits `ops.matmul`'s bf16 4096^3 on an H200, with 3 and 4 stages of 32 to 48 KiB.
_LATENCY_CYCLES = 300.0
_LATENCY_BYTES_PER_CYCLE = 21.0
# More for copies that several CTAs share: all must have released. It fits the same.
_SHARED_LATENCY_CYCLES = 150.0
# From the L2 to an SM, multicast or not: fits the same kernel with tiles of 128 x 64.
_FILL_BYTES_PER_CYCLE = 50.0
# Of the boost clock, under load. Estimate.
OF_CLOCK = 0.89
# Limits that are nearly reached at once slow each other down. Estimate.
_SHARPNESS = 8
_L2_BYTES_PER_CYCLE_AND_SM = 56.0
# Of a warpgroup between two products or accesses that a barrier separates. Estimate.
_WAIT_CYCLES = 40.0
# Start and end of a CTA, and of a launch. Estimates.
_CTA_CYCLES = 1500.0
LAUNCH_SECONDS = 1.5e-6
_SAMPLES = 5
# Registers of a thread beside accumulators, where a kernel does not set them. Estimate.
_OTHER_REGISTERS = 40


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the cost model says of one configuration.

    Attributes:
      config: the configuration.
      seconds: estimated time on the target's card; infinity if it does not compile.
      bound: what takes the most time: "tensor core", "copies", "shared memory",
        "arithmetic", "latency", "L2", "memory" or "power"; "" if nothing is known.
      waves: how many times the card is filled with CTAs.
      ctas_per_sm: CTAs that are resident on an SM.
      flops: of the tensor cores, of all CTAs.
      loaded_bytes: copied or loaded from GMEM by all CTAs.
      stored_bytes: copied or stored to GMEM by all CTAs.
      reason: why it does not compile, in one line.
    """

    config: Any
    seconds: float
    bound: str = ""
    waves: float = 0.0
    ctas_per_sm: int = 0
    flops: float = 0.0
    loaded_bytes: float = 0.0
    stored_bytes: float = 0.0
    reason: str = ""


def estimate(
    build: Build, config: Any = None, more_slots: int = 0, more_ctas: int = 0
) -> Estimate:
    """Estimates the time of a kernel whose memory is planned.

    Args:
      build: the kernel after the stage `plan`.
      config: for the result.
      more_slots: as if each ring of buffers had that many more.
      more_ctas: as if that many more were resident on an SM.
    """
    params, target = build.params, build.target
    assert isinstance(target, arch.GpuTarget)
    mesh = params.mesh
    ctas = mesh.blocks * math.prod(axis.size for axis in params.batch)
    residency = resources.residency(build.plan, target, mesh)
    each = [_cta(build, position, more_slots) for position in positions(mesh)]
    mean = Work()
    for work, _, _, _ in each:
        mean.add(work, 1 / len(each))
    registers = max(count for _, _, _, count in each)
    ctas_per_sm = min(residency.ctas_per_sm, target.registers_per_sm // registers)
    ctas_per_sm += more_ctas
    resident = max(target.sm_count * ctas_per_sm, 1)
    # One CTA after the other on each SM; those that are resident at once overlap.
    on_one_sm = math.ceil(ctas / target.sm_count)
    rounds = math.ceil(ctas / resident)
    busy = {
        name: _of_launch([units[name] for _, units, _, _ in each], on_one_sm)
        for name in each[0][1]
    }
    chains = [cycles + _CTA_CYCLES for _, _, cycles, _ in each]
    busy["latency"] = _of_launch(chains, rounds)
    hertz = OF_CLOCK * target.clock_ghz * 1e9
    times = {name: cycles / hertz for name, cycles in busy.items()}
    times |= _card_seconds(params, mean, ctas, target)
    bound = max(times, key=lambda name: times[name])
    seconds = sum(t**_SHARPNESS for t in times.values()) ** (1 / _SHARPNESS)
    return Estimate(
        config,
        seconds + LAUNCH_SECONDS,
        bound,
        ctas / resident,
        ctas_per_sm,
        ctas * sum(mean.tensor_flops.values()),
        ctas * mean.loaded_bytes,
        ctas * mean.stored_bytes,
    )


def _of_launch(cycles: Sequence[float], rounds: int) -> float:
    """Returns the cycles of CTAs one after another; none ends before the longest."""
    return max(*cycles, rounds * sum(cycles) / len(cycles), 0.0)


def positions(mesh: Any) -> list[dict[Any, int]]:
    """Returns positions of some CTAs, the first and the last of the grid included."""
    number = math.prod(mesh.grid)
    if not number:
        return [{}]
    chosen = {round(i * (number - 1) / (_SAMPLES - 1)) for i in range(_SAMPLES)}
    found = []
    for linear in sorted(chosen):
        position = dict.fromkeys(mesh.cluster_names, 0)
        for name, size in zip(
            reversed(mesh.grid_names), reversed(mesh.grid), strict=True
        ):
            linear, position[name] = divmod(linear, size)
        found.append(position)
    return found


def _cta(
    build: Build, position: dict[Any, int], more_slots: int
) -> tuple[Work, dict[str, float], float, int]:
    """Returns a CTA's work, cycles of the SM's units and of a chain, and registers."""
    params = build.params
    mesh, sizes = params.mesh, dict(params.mesh.axes)
    total, parts, serial, piped, registers = Work(), [], 0.0, 0.0, 0
    accumulators = build.plan.stacks[types.REGS].top
    for number in range(mesh.warpgroups):
        thread = {} if mesh.thread_name is None else {mesh.thread_name: number}
        counter = Counter({**position, **thread}, sizes)
        work = counter.count(params.jaxpr)
        total.add(work)
        parts.append(work)
        own = counter.registers or accumulators + _OTHER_REGISTERS
        registers += WARPGROUP_THREADS * own
        alone, overlapped = _copying(work, counter.buffers, more_slots)
        serial, piped = serial + alone, max(piped, overlapped)
    vector = total.elements / WARPGROUP_THREADS
    smem = total.smem_bytes / SMEM_BYTES_PER_CYCLE
    units = {
        "tensor core": total.tensor_cycles,
        "copies": total.filled_bytes / _FILL_BYTES_PER_CYCLE,
        "shared memory": smem,
        "arithmetic": vector,
    }
    # A warpgroup multiplies, waits and computes in turn. Those that multiply do so at
    # the same time, and share the tensor core.
    chains = [
        (total.tensor_cycles if work.tensor_cycles else 0.0)
        + (vector + smem if work.tensor_cycles else 0.0)
        + _WAIT_CYCLES * work.waits
        for work in parts
    ]
    return total, units, serial + max(piped, *chains), registers


def _copying(
    work: Work, buffers: Mapping[int, Buffer], more_slots: int
) -> tuple[float, float]:
    """Returns the cycles of copies that nothing overlaps, and of those in rings.

    The buffers of one barrier are filled together. Of a ring of n, n - 1 can be filled
    while one is read; with a single one, copies and what reads them take turns.
    """
    alone = overlapped = 0.0
    for barrier in {buffer.barrier for buffer in buffers.values()}:
        ring = {n: b for n, b in buffers.items() if b.barrier == barrier}
        step_bytes = sum(buffer.copy_bytes for buffer in ring.values())
        depth = sum(buffer.num_bytes for buffer in ring.values()) / step_bytes
        depth += more_slots
        steps = sum(work.fills.get(number, 0.0) for number in ring) / step_bytes
        latency = _LATENCY_CYCLES + step_bytes / _LATENCY_BYTES_PER_CYCLE
        if any(buffer.is_shared for buffer in ring.values()):
            latency += _SHARED_LATENCY_CYCLES
        cycles = steps * latency
        if depth < 2:
            alone += cycles
        else:
            overlapped = max(overlapped, cycles / (depth - 1))
    return alone, overlapped


def _card_seconds(
    params: Any, mean: Work, ctas: int, target: arch.GpuTarget
) -> dict[str, float]:
    """Returns the seconds of what all SMs of a card share."""
    moved = ctas * (mean.loaded_bytes + mean.stored_bytes)
    arrays = [x.aval for x in params.jaxpr.invars]
    operands = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    hertz = OF_CLOCK * target.clock_ghz * 1e9
    l2 = _L2_BYTES_PER_CYCLE_AND_SM * target.sm_count * hertz
    memory = target.memory_bytes_per_second * OF_MEMORY_BANDWIDTH
    scale = target.sm_count / arch.SM_90A.sm_count
    power = sum(
        ctas * flops * max(bits, 8) / 16 / (_POWER_FLOPS_PER_SECOND_16_BITS * scale)
        for bits, flops in mean.tensor_flops.items()
    )
    return {"L2": moved / l2, "memory": min(moved, operands) / memory, "power": power}


def of_kernels(builds: Sequence[Build], config: Any) -> Estimate:
    """Estimates the time of kernels that run one after another.

    Other operations of the program are not counted: without a kernel the time is 0. The
    bound is that of the longest kernel.
    """
    if not builds:
        return Estimate(config, 0.0)
    each = [estimate(build, config) for build in builds]
    longest = max(each, key=lambda e: e.seconds)
    return dataclasses.replace(
        longest,
        seconds=sum(e.seconds for e in each),
        flops=sum(e.flops for e in each),
        loaded_bytes=sum(e.loaded_bytes for e in each),
        stored_bytes=sum(e.stored_bytes for e in each),
    )
