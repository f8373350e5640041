# SPDX-License-Identifier: Apache-2.0
"""Control flow, special registers, and where threads, warps and blocks meet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.assembly import parse
from pallas_gpu.lockstep.clocks import join
from pallas_gpu.lockstep.engine import LANES, LivelockError, SplitWarps, Wait
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Block, Program, Step, runs, without_waits
from pallas_gpu.lockstep.registers import assembles

# Of a loop without a known end; more would take minutes.
_MOST_TRIPS = 100_000

# --- control flow ---------------------------------------------------------------------


@runs("scf.if")
def _if(program: Program, op: ir.Operation) -> Step:
    (condition,), out = program.inputs(op), program.outputs(op)
    sides = [
        Block(program, region.blocks[0]) if len(region.blocks) else None
        for region in op.regions
    ]
    blocks = any(side is not None and side.blocks for side in sides)

    def masks(strand: Any) -> list[tuple[Block, np.ndarray | None, bool]]:
        """The sides that some thread takes, and who does (None: who was active)."""
        chosen = np.asarray(strand.env[condition])
        held = chosen
        if strand.mask is not None and chosen.shape[0] > 1:
            held = chosen[strand.mask]
        yes = held.any()
        if yes == held.all():
            side = sides[0 if yes else 1]
            return [] if side is None else [(side, None, bool(yes))]
        if blocks and len(strand.warps) > 1:
            raise SplitWarps
        active = strand.active()
        return [
            (side, active & chosen if first else active & ~chosen, first)
            for side, first in zip(sides, (True, False), strict=True)
            if side is not None
        ]

    def merge(strand: Any, taken: list[tuple[bool, list[Any]]]) -> None:
        env = strand.env
        if not out:
            return
        if len(taken) == 1:
            for slot, value in zip(out, taken[0][1], strict=True):
                env[slot] = value
            return
        chosen = env[condition]
        for i, slot in enumerate(out):
            yes, no = (values.forced(results[i]) for _, results in taken)
            wide = chosen[:, None] if yes.ndim == 2 else chosen
            env[slot] = np.where(wide, yes, no)

    def run(strand: Any) -> Iterator[Wait]:
        taken, outer = [], strand.mask
        for side, mask, first in masks(strand):
            strand.mask = outer if mask is None else mask
            yield from side.run_blocking(strand)
            taken.append((first, side.values(strand)))
        strand.mask = outer
        merge(strand, taken)

    return run if blocks else without_waits(run)


@runs("scf.for")
def _for(program: Program, op: ir.Operation) -> Step:
    (start, stop, step, *carried), out = program.inputs(op), program.outputs(op)
    body = Block(program, op.regions[0].blocks[0])
    counter, *arguments = body.arguments
    kind = values.dtype(op.operands[0].type)

    def bounds(strand: Any) -> range:
        numbers = (strand.env[i] for i in (start, stop, step))
        return range(*(strand.uniform(values.signed(x)) for x in numbers))

    def run(strand: Any) -> Iterator[Wait]:
        env, carry = strand.env, [strand.env[i] for i in carried]
        for i in bounds(strand):
            env[counter] = np.array([i], kind)
            for slot, value in zip(arguments, carry, strict=True):
                env[slot] = value
            yield from body.run_blocking(strand)
            carry = body.values(strand)
        for slot, value in zip(out, carry, strict=True):
            env[slot] = value

    return run if body.blocks else without_waits(run)


@runs("scf.while")
def _while(program: Program, op: ir.Operation) -> Step:
    inputs, out = program.inputs(op), program.outputs(op)
    before, after = (Block(program, region.blocks[0]) for region in op.regions)

    def enter(strand: Any, block: Block, carry: list[Any]) -> None:
        for slot, value in zip(block.arguments, carry, strict=True):
            strand.env[slot] = value

    def run(strand: Any) -> Iterator[Wait]:
        carry = [strand.env[i] for i in inputs]
        for trip in itertools.count():
            if trip == _MOST_TRIPS:
                raise LivelockError(f"a loop of {strand.name} has run {trip} times")
            enter(strand, before, carry)
            yield from before.run_blocking(strand)
            condition, *passed = before.values(strand)
            if not strand.uniform(condition):
                break
            enter(strand, after, passed)
            yield from after.run_blocking(strand)
            carry = after.values(strand)
        for slot, value in zip(out, passed, strict=True):
            strand.env[slot] = value

    return run if before.blocks or after.blocks else without_waits(run)


# --- special registers ----------------------------------------------------------------


def _sreg(read: Any) -> Any:
    def factory(program: Program, op: ir.Operation) -> Step:
        (out,) = program.outputs(op)

        def step(strand: Any) -> None:
            strand.env[out] = np.atleast_1d(np.asarray(read(strand))).astype(np.uint32)

        return step

    return factory


def _thread_along(strand: Any, axis: int) -> np.ndarray:
    """The position of each thread in the block along an axis: x is the fastest."""
    block = strand.cta.shape.block
    return strand.threads // math.prod(block[:axis]) % block[axis]


for _axis, _letter in enumerate("xyz"):
    runs(f"nvvm.read.ptx.sreg.tid.{_letter}")(
        _sreg(lambda s, axis=_axis: _thread_along(s, axis))
    )
    runs(f"nvvm.read.ptx.sreg.ctaid.{_letter}")(
        _sreg(lambda s, axis=_axis: s.cta.position[axis])
    )
runs("nvvm.read.ptx.sreg.cluster.ctarank")(_sreg(lambda s: s.cta.rank))

# Operations of MLIR's gpu dialect that read one of three registers, as an index.
_PLACES: dict[str, Callable[[Any, int], Any]] = {
    "gpu.thread_id": _thread_along,
    "gpu.block_dim": lambda s, axis: s.cta.shape.block[axis],
    "gpu.block_id": lambda s, axis: s.cta.position[axis],
    "gpu.grid_dim": lambda s, axis: s.cta.shape.grid[axis],
    "gpu.cluster_id": lambda s, axis: s.cta.position[axis] // s.cta.shape.cluster[axis],
    "gpu.cluster_block_id": lambda s, axis: (
        s.cta.position[axis] % s.cta.shape.cluster[axis]
    ),
    "gpu.cluster_dim": lambda s, axis: (
        s.cta.shape.grid[axis] // s.cta.shape.cluster[axis]
    ),
    "gpu.cluster_dim_blocks": lambda s, axis: s.cta.shape.cluster[axis],
}


@runs(*_PLACES)
def _place(program: Program, op: ir.Operation) -> Step:
    (out,), read = program.outputs(op), _PLACES[op.name]
    axis = "xyz".index(str(op.attributes["dimension"])[-2])

    def step(strand: Any) -> None:
        number = np.atleast_1d(np.asarray(read(strand, axis)))
        strand.env[out] = number.astype(np.uint64)

    return step


@runs("nvvm.elect.sync")
def _elect(program: Program, op: ir.Operation) -> Step:
    (out,) = program.outputs(op)

    def elect(strand: Any) -> None:
        strand.whole_warps("elect.sync")
        # Any lane may be elected, and always the same of the same lanes.
        strand.env[out] = strand.threads % LANES == 0

    return elect


@runs("nvvm.setmaxregister")
def _setmaxnreg(program: Program, op: ir.Operation) -> Step:
    count = ir.IntegerAttr(op.attributes["regCount"]).value
    if count % 8 or not 24 <= count <= 256:
        raise PtxError(f"setmaxnreg {count}")
    increases = "increase" in str(op.attributes["action"])

    def change(strand: Any) -> Iterator[Wait]:
        rows, held = strand.whole_warps("setmaxnreg"), strand.cta.registers
        others = [row for row in held if row not in rows]
        limit = _launched(strand.cta) * len(held)
        if not increases and any(held[row] < count for row in rows):
            raise PtxError(f"setmaxnreg.dec to {count}, and fewer are held")
        while sum(held[row] for row in others) + count * len(rows) > limit:
            yield Wait(
                lambda: sum(held[row] for row in others) + count * len(rows) <= limit,
                lambda: f"{count} registers of each thread",
            )
        held.update(dict.fromkeys(map(int, rows), count))

    return change


def _launched(cta: Any) -> int:
    """Registers of a thread when a block starts: its share of those of an SM."""
    return min(65536 // cta.threads // 8 * 8, 256)


def registers(cta: Any) -> dict[int, int]:
    """Registers of a thread of each warp, when a block starts."""
    rows = range(cta.first_row, cta.first_row + cta.threads // LANES)
    return dict.fromkeys(rows, _launched(cta))


# --- meetings -------------------------------------------------------------------------


class Barrier:
    """One of a block's barriers, or the cluster's: arrivals of one generation.

    Attributes:
      generation: how often all have met.
      holds, held: whether a predicate holds in all that have arrived, and in all of
        the last generation.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.arrived = 0
        self.rows: list[np.ndarray] = []
        self.clock: np.ndarray | None = None
        self.result: np.ndarray | None = None
        self.holds = self.held = True

    def arrive(self, rows: np.ndarray, clock: np.ndarray | None, of: int) -> None:
        """Some warps arrive; the last ones end the generation."""
        self.arrived += LANES * len(rows)
        self.clock = join(self.clock, clock)
        if self.arrived > of:
            raise PtxError(f"{self.arrived} threads arrive at a barrier of {of}")
        if self.arrived == of:
            self.generation += 1
            self.arrived, self.result, self.clock = 0, self.clock, None
            self.holds, self.held = True, self.holds


@runs("nvvm.barrier", "gpu.barrier")
def _barrier(program: Program, op: ir.Operation) -> Step:
    groups = program.segments(op) if "operandSegmentSizes" in op.attributes else []
    number = groups[0][0] if groups and groups[0] else None
    count = groups[1][0] if len(groups) > 1 and groups[1] else None
    if op.results:
        raise NotModelled("nvvm.barrier with a reduction")

    def barrier(strand: Any) -> Iterator[Wait]:
        env, cta = strand.env, strand.cta
        name = 0 if number is None else strand.uniform(env[number])
        expected = cta.threads if count is None else strand.uniform(env[count])
        yield from meet(strand, name, expected, "barrier.sync")

    return barrier


@assembles("bar.sync")
def _bar_sync(program: Program, op: ir.Operation, text: str) -> Step:
    """`bar.sync a, b;`: PTX ISA, the same as `barrier.sync.aligned`."""
    (statement,) = parse(text)
    places = {f"${i}": slot for i, slot in enumerate(program.inputs(op))}
    if statement.opcode != "bar.sync" or len(statement.operands) != 2:
        raise NotModelled(f"llvm.inline_asm {text[:60]}")

    def barrier(strand: Any) -> Iterator[Wait]:
        name, expected = (
            strand.uniform(strand.env[places[x]]) if x in places else int(x)
            for x in map(str, statement.operands)
        )
        yield from meet(strand, name, expected, "bar.sync")

    return barrier


@runs("nvvm.barrier.arrive")
def _barrier_arrive(program: Program, op: ir.Operation) -> Step:
    *number, count = program.inputs(op)

    def arrive(strand: Any) -> None:
        env = strand.env
        name = strand.uniform(env[number[0]]) if number else 0
        expected = strand.uniform(env[count])
        _arrive(strand, name, expected, "barrier.arrive", together=False)

    return arrive


def _arrive(
    strand: Any, name: int, expected: int, what: str, *, together: bool
) -> tuple[Barrier, np.ndarray, int]:
    """The warps of a strand arrive; returns the barrier, and who in which generation.

    Args:
      together: whether they wait for the others, too.
    """
    rows, cta = strand.whole_warps(what), strand.cta
    if not 0 <= name < 16 or expected % LANES:
        raise PtxError(f"{what} {name}, {expected}")
    where = cta.barriers.setdefault(name, Barrier())
    now = where.generation
    where.arrive(rows, cta.clocks.meet(rows, together=together), expected)
    return where, rows, now


def meet(strand: Any, name: int, expected: int, what: str) -> Iterator[Wait]:
    """The warps of a strand wait at one of the block's barriers."""
    cta = strand.cta
    where, rows, now = _arrive(strand, name, expected, what, together=True)
    while where.generation == now:
        yield Wait(
            lambda: where.generation > now,
            lambda: f"barrier {name}: {where.arrived} of {expected} threads",
        )
    cta.clocks.acquire(rows, where.result)


@runs("nvvm.bar.warp.sync")
def _warp_sync(program: Program, op: ir.Operation) -> Step:
    (members,) = program.inputs(op)

    def sync(strand: Any) -> None:
        if strand.uniform(strand.env[members]) != (1 << LANES) - 1:
            raise NotModelled("nvvm.bar.warp.sync of some lanes")
        rows = strand.whole_warps("bar.warp.sync")
        strand.cta.clocks.meet(rows, together=False)

    return sync


@runs("nvvm.cluster.arrive", "nvvm.cluster.arrive.relaxed")
def _cluster_arrive(program: Program, op: ir.Operation) -> Step:
    releases = op.name == "nvvm.cluster.arrive"

    def arrive(strand: Any) -> None:
        rows = strand.whole_warps("barrier.cluster.arrive")
        cluster = strand.cta.cluster
        clock = cluster.clocks.meet(rows, together=True) if releases else None
        for row in rows:
            if row in cluster.waiting:
                raise PtxError("a warp arrives twice at the cluster's barrier")
            cluster.waiting[row] = cluster.barrier.generation
        cluster.barrier.arrive(rows, clock, cluster.threads)

    return arrive


@runs("nvvm.cluster.wait")
def _cluster_wait(program: Program, op: ir.Operation) -> Step:
    def wait(strand: Any) -> Iterator[Wait]:
        rows = strand.whole_warps("barrier.cluster.wait")
        cluster = strand.cta.cluster
        if any(row not in cluster.waiting for row in rows):
            raise PtxError("barrier.cluster.wait without an arrival")
        now = cluster.waiting[int(rows[0])]
        barrier = cluster.barrier
        while barrier.generation == now:
            yield Wait(
                lambda: barrier.generation > now,
                lambda: f"the cluster: {barrier.arrived} of {cluster.threads} threads",
            )
        for row in rows:
            del cluster.waiting[row]
        cluster.clocks.acquire(rows, barrier.result)

    return wait


@runs("nvvm.fence.proxy")
def _fence_proxy(program: Program, op: ir.Operation) -> Step:
    kind = str(op.attributes["kind"])
    memories = {"async.shared": (0,), "async.global": (1,), "async": (0, 1)}
    found = [text for text in memories if f"<{text}>" in kind]
    if not found:
        raise NotModelled(f"nvvm.fence.proxy {kind}")

    def fence(strand: Any) -> None:
        # A fence of some lanes only says nothing of the others' writes.
        if strand.mask is None:
            rows = strand.rows
        else:
            rows = strand.rows[strand.mask.reshape(-1, LANES).all(axis=1)]
        for memory in memories[found[0]]:
            strand.cta.clocks.fence(rows, memory)

    return fence


@assembles("nanosleep")
def _nanosleep(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    if statement.opcode != "nanosleep.u32" or statement.operands != ("$0",):
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    (duration,) = program.inputs(op)

    def sleep(strand: Any) -> Iterator[Wait]:
        values.forced(strand.env[duration])
        # The others run meanwhile.
        yield Wait(lambda: True, lambda: "nothing")

    return sleep


@runs("llvm.intr.trap")
def _trap(program: Program, op: ir.Operation) -> Step:
    def trap(strand: Any) -> None:
        if strand.active().any():
            raise PtxError("a thread traps")

    return trap
