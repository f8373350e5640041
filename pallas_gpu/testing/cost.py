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
from collections.abc import Sequence
from typing import Any

from pallas_gpu import arch
from pallas_gpu.arch.residency import Residency
from pallas_gpu.lowering.machine import Build
from pallas_gpu.testing.work import SMEM_BYTES_PER_CYCLE, Counter, Work
from pallas_gpu.types.mesh import WARPGROUP_THREADS

# Of an H200: a copy from device to device reads and writes 4.27 TB/s of its 4.8, and
# large bf16 products reach 810 TFLOP/s, the limit of its power (measured).
_OF_MEMORY_BANDWIDTH = 0.89
_POWER_FLOPS_PER_SECOND_16_BITS = 810e12
# Cycles of a load from the L2 or the memory until its data is in SMEM. Estimate.
_LATENCY_CYCLES = 1200.0
# From the L2 to an SM. Estimate.
_FILL_BYTES_PER_CYCLE = 64.0
_L2_BYTES_PER_CYCLE_AND_SM = 48.0
# Of a warpgroup between two products or accesses that a barrier separates. Estimate.
_WAIT_CYCLES = 40.0
# Start and end of a CTA, and of a launch. Estimates.
_CTA_CYCLES = 1500.0
_LAUNCH_SECONDS = 1.5e-6
_SAMPLES = 3


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


def estimate(build: Build, config: Any = None) -> Estimate:
    """Estimates the time of a kernel whose memory is planned.

    Args:
      build: the kernel after the stage `plan`.
      config: for the result.
    """
    params, target = build.params, build.target
    assert isinstance(target, arch.GpuTarget)
    mesh = params.mesh
    ctas = mesh.blocks * math.prod(axis.size for axis in params.batch)
    residency = Residency.of(
        target,
        build.plan.smem_bytes,
        WARPGROUP_THREADS * mesh.warpgroups,
        math.prod(mesh.cluster),
    )
    each = [_cta(params, position, target) for position in _positions(mesh)]
    mean = Work()
    for work, _, _ in each:
        mean.add(work, 1 / len(each))
    resident = max(residency.ctas, 1)
    # One CTA after the other on each SM; those that are resident at once overlap.
    on_one_sm = math.ceil(ctas / target.sm_count)
    rounds = math.ceil(ctas / resident)
    busy = {
        name: on_one_sm * sum(units[name] for _, units, _ in each) / len(each)
        for name in each[0][1]
    }
    chain = max(cycles for _, _, cycles in each) + _CTA_CYCLES
    busy["latency"] = rounds * chain
    hertz = target.clock_ghz * 1e9
    times = {name: cycles / hertz for name, cycles in busy.items()}
    times |= _card_seconds(params, mean, ctas, target)
    bound = max(times, key=lambda name: times[name])
    return Estimate(
        config,
        times[bound] + _LAUNCH_SECONDS,
        bound,
        ctas / resident,
        residency.ctas_per_sm,
        ctas * sum(mean.tensor_flops.values()),
        ctas * mean.loaded_bytes,
        ctas * mean.stored_bytes,
    )


def _positions(mesh: Any) -> list[dict[Any, int]]:
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
    params: Any, position: dict[Any, int], target: arch.GpuTarget
) -> tuple[Work, dict[str, float], float]:
    """Returns a CTA's work, the cycles of the SM's units, and of the longest chain."""
    mesh, sizes = params.mesh, dict(params.mesh.axes)
    total, parts, buffered = Work(), [], 0.0
    for number in range(mesh.warpgroups):
        thread = {} if mesh.thread_name is None else {mesh.thread_name: number}
        counter = Counter({**position, **thread}, sizes)
        work, _ = counter.count(params.jaxpr, [None] * len(params.jaxpr.invars))
        total.add(work)
        parts.append(work)
        buffered += sum(counter.buffers.values())
    vector = total.elements / WARPGROUP_THREADS
    smem = total.smem_bytes / SMEM_BYTES_PER_CYCLE
    units = {
        "tensor core": total.tensor_cycles,
        "copies": total.filled_bytes / _FILL_BYTES_PER_CYCLE,
        "shared memory": smem,
        "arithmetic": vector,
    }
    # What is in flight at once fits the buffers, and takes the latency to arrive.
    in_flight = total.filled_bytes / buffered * _LATENCY_CYCLES if buffered else 0.0
    # A warpgroup multiplies, waits and computes in turn. Those that multiply do so at
    # the same time, and share the tensor core.
    chains = [
        (total.tensor_cycles if work.tensor_cycles else 0.0)
        + (vector + smem if work.tensor_cycles else 0.0)
        + _WAIT_CYCLES * work.waits
        for work in parts
    ]
    return total, units, max(in_flight, *chains)


def _card_seconds(
    params: Any, mean: Work, ctas: int, target: arch.GpuTarget
) -> dict[str, float]:
    """Returns the seconds of what all SMs of a card share."""
    moved = ctas * (mean.loaded_bytes + mean.stored_bytes)
    arrays = [x.aval for x in params.jaxpr.invars]
    operands = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    hertz = target.clock_ghz * 1e9
    l2 = _L2_BYTES_PER_CYCLE_AND_SM * target.sm_count * hertz
    memory = target.memory_bytes_per_second * _OF_MEMORY_BANDWIDTH
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
