# SPDX-License-Identifier: Apache-2.0
"""A kernel that is explained: its program, what it became, and what it costs.

The times are those of the cost model (`testing/cost.py`), with what it does not count:
conversions, bank conflicts, spills, and waits for memory that nothing overlaps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from pallas_gpu import arch, compiler, errors, findings, types
from pallas_gpu.lowering.machine import Build
from pallas_gpu.lowering.notes import Notes
from pallas_gpu.program.nodes import Access, Kind, Op
from pallas_gpu.program.walk import Site, walk
from pallas_gpu.runtime import resources_report, stages
from pallas_gpu.runtime.offline_compiler import CompiledModule
from pallas_gpu.testing import cost
from pallas_gpu.testing.work import Counter, Work

# From a load of GMEM until its value can be used, little loaded. Estimate for sm_90.
LATENCY_CYCLES = 600.0


class Executions(Counter):
    """Counts how often each operation is executed.

    Attributes:
      copied: the allocations of the SMEM arrays to which operations copy.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.copied: dict[Op, Any] = {}

    def visit(self, op: Op, operands: Sequence[Any]) -> None:
        executed = self._work.executed
        executed[op] = executed.get(op, 0.0) + 1.0

    def _copy_in(self, op: Op, dst: Access, barrier: Access | None) -> None:
        super()._copy_in(op, dst, barrier)
        self.copied[op] = self.of(dst.buffer)


@dataclasses.dataclass(frozen=True)
class Model:
    """A kernel, compiled or only lowered.

    Attributes:
      build: after the last stage that has run.
      notes: what has been emitted.
      compiled: the machine code; None if it could not be compiled here.
      estimate: that of the cost model.
      executed: how often operations are executed in a CTA, by its warpgroups together.
      turns: how often a warpgroup executes them, at most.
      depths: how many copies of an operation the array that it fills can hold.
      work: of a CTA.
    """

    build: Build
    notes: Notes
    compiled: CompiledModule | None
    estimate: cost.Estimate
    executed: dict[Op, float]
    turns: dict[Op, float]
    depths: dict[Op, float]
    work: Work

    @classmethod
    def of(cls, build: Build) -> Model:
        """Lowers a kernel, and compiles it where that is possible.

        Args:
          build: before the first stage.
        """
        build = compiler.run(build, until="layouts")
        numbered, notes = stages.lowered_with_notes(build)
        try:
            compiled = stages.compiled_module(numbered)
        except errors.OfflineUnavailableError:
            compiled = None
        mesh, total = build.params.mesh, Work()
        depths: dict[Op, float] = {}
        turns: dict[Op, float] = {}
        each = cost.positions(mesh)
        for position in each:
            for number in range(mesh.warpgroups):
                named = mesh.thread_name is not None
                thread = {mesh.thread_name: number} if named else {}
                counter = Executions({**position, **thread}, dict(mesh.axes))
                work = counter.count(build.params.jaxpr)
                total.add(work, 1 / len(each))
                for op, times in work.executed.items():
                    turns[op] = max(turns.get(op, 0.0), times)
                depths |= _depths(counter)
        return cls(
            numbered,
            notes,
            compiled,
            cost.estimate(numbered),
            total.executed,
            turns,
            depths,
            total,
        )

    @property
    def target(self) -> arch.GpuTarget:
        """The target of the compilation."""
        target = self.build.target
        assert isinstance(target, arch.GpuTarget)
        return target

    @property
    def seconds(self) -> float:
        """The estimated time of a launch without its start."""
        return max(self.estimate.seconds - cost.LAUNCH_SECONDS, 1e-9)

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """The operations of the program."""
        return walk(self.build.params.jaxpr)

    @functools.cached_property
    def site_of(self) -> dict[Op, Site]:
        """The first site of each operation."""
        return {site.op: site for site in reversed(self.sites)}

    @functools.cached_property
    def occupancy(self) -> dict[str, int]:
        """The CTAs on an SM that each of its resources admits, the grid included."""
        plan, mesh = self.build.plan, self.build.params.mesh
        threads, registers = 128 * mesh.warpgroups, 1
        if self.compiled is not None:
            registers = self.compiled.resources.registers_per_thread
        limits = resources_report.occupancy_limits(
            self.target,
            threads_per_block=threads,
            registers_per_thread=registers,
            smem_bytes=plan.smem_bytes,
            tmem_columns=plan.tmem_columns,
        )
        if self.compiled is None:
            del limits["registers"]
        return {**limits, "grid": -(-self.ctas // self.target.sm_count)}

    @property
    def resident(self) -> int:
        """The CTAs that are resident on an SM."""
        return max(min(self.occupancy.values()), 1)

    @property
    def rounds(self) -> int:
        """How many CTAs an SM executes one after another."""
        return -(-self.ctas // (self.target.sm_count * self.resident))

    @property
    def ctas(self) -> int:
        """The CTAs of a launch."""
        params = self.build.params
        return params.mesh.blocks * math.prod(axis.size for axis in params.batch)

    @property
    def hertz(self) -> float:
        """The clock under load."""
        return cost.OF_CLOCK * self.target.clock_ghz * 1e9

    def busy(self, op: Op, cycles: float) -> float:
        """Returns the seconds for which an operation occupies a unit of the SMs.

        Args:
          cycles: of one execution by a warpgroup.
        """
        on_one_sm = -(-self.ctas // self.target.sm_count)
        return cycles * self.executed.get(op, 0.0) * on_one_sm / self.hertz

    def waiting(self, times: float, cycles: float = LATENCY_CYCLES) -> float:
        """Returns the seconds that a launch takes longer by waits of its warpgroups.

        Other warpgroups of the SM compute while one waits.

        Args:
          times: how often each warpgroup waits.
          cycles: of a wait.
        """
        waited = self.rounds * times * cycles / self.hertz
        at_once = self.resident * self.build.params.mesh.warpgroups
        return max(waited - self.seconds * (at_once - 1) / at_once, 0.0)

    def loops(self, site: Site) -> tuple[tuple[str | None, float | None], ...]:
        """Returns the lines and iterations of the loops around, innermost first."""
        around = [s for s in site.enclosing if s.op.kind in (Kind.FOR, Kind.WHILE)]
        return tuple((s.where, self.iterations(s)) for s in reversed(around))

    def iterations(self, loop: Site) -> float | None:
        """Returns the iterations of a loop each time; None if they are not known."""
        entered = self.executed.get(loop.op, 0.0)
        if loop.op.kind is Kind.FOR:
            return float(loop.op.params["length"])
        body = loop.op.regions[-1].ops
        if not entered or not body:
            return None
        return self.executed.get(body[0], 0.0) / entered

    def place(self, site: Site | None) -> findings.Place:
        """Returns the line of an operation, or that of the kernel."""
        where = site and site.where
        return findings.place(where or self.build.params.defined_at)


def loaded_bytes(op: Op) -> float:
    """Returns the bytes that an operation loads from GMEM, those of a scalar as 0."""
    loads = [a for a in op.accesses if a.space is types.GMEM and a.reads]
    if not loads:
        return 0.0
    # Of what indices select, only the result, or the target of a copy, has the shape.
    targets = [a.window.shape for a in op.accesses if a.space is types.SMEM]
    shape = [*(x.shape for x in op.results[:1]), *targets, loads[0].window.shape][0]
    size = math.prod(shape) * types.itemsize_bits(loads[0].dtype) / 8
    return size if shape else 0.0


def _depths(counter: Executions) -> dict[Op, float]:
    found = {}
    for op, memory in counter.copied.items():
        number = getattr(memory, "number", None)
        buffer = counter.buffers.get(number) if number is not None else None
        if buffer is not None and buffer.copy_bytes:
            found[op] = buffer.num_bytes / buffer.copy_bytes
    return found
