# SPDX-License-Identifier: Apache-2.0
"""mbarriers (PTX ISA, Parallel Synchronization: mbarrier)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.accesses import cluster_address
from pallas_gpu.lockstep.assembly import Statement, parse
from pallas_gpu.lockstep.clocks import join
from pallas_gpu.lockstep.engine import LANES, BarrierError, Poll, Wait
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.predication import guarded
from pallas_gpu.lockstep.program import Program, Step, runs
from pallas_gpu.lockstep.registers import assembles

_LIMIT = 1 << 20  # of pending arrivals, and of tx-count either way


class Mbarrier:
    """An mbarrier object in the SMEM of a block.

    Attributes:
      phase: number of completed phases.
      completed: what a wait for the last completed phase makes known.
    """

    def __init__(self, cta: Any, address: int, count: int, row: int) -> None:
        if not 1 <= count < _LIMIT:
            raise PtxError(f"mbarrier.init with a count of {count}")
        self.cta = cta
        self.address = address
        self.count = self.pending = count
        self.tx = self.phase = 0
        self.clock: np.ndarray | None = None
        self.completed: np.ndarray | None = None
        self._init = row, int(cta.clocks.epoch[row])
        self._meetings = cta.cluster.barrier.generation
        # True once fence.mbarrier_init has followed.
        self.fenced = False

    def check_known(self, row: int, what: str) -> None:
        """The initialisation has to be known to who uses the mbarrier."""
        by, epoch = self._init
        clocks = self.cta.clocks
        known = row == by or clocks.known[row, by] >= epoch
        generation = self.cta.cluster.barrier.generation
        known |= self.fenced and generation > self._meetings
        if not known:
            raise BarrierError(f"{what} of {self} before its mbarrier.init is known")

    def arrive(self, count: int, clock: np.ndarray | None) -> None:
        """Arrivals of threads, which release what their clock knows."""
        self.pending -= count
        if self.pending < 0:
            raise BarrierError(
                f"more arrivals at {self} than the {self.count} of a phase"
            )
        self.clock = join(self.clock, clock)
        self._test()

    def expect(self, num_bytes: int) -> None:
        """`expect_tx`."""
        self.tx += num_bytes
        self._check_tx()

    def complete_tx(self, num_bytes: int, agent: int, epoch: int) -> None:
        """Bytes of a copy have arrived, as its agent's epoch says."""
        self.tx -= num_bytes
        self._check_tx()
        self.cta.clocks.agent(self.agent_key)
        clock = np.zeros(self.cta.clocks.known.shape[1], np.int32)
        clock[agent] = epoch
        self.clock = join(self.clock, clock)
        self._test()

    def receive(self, places: np.ndarray, data: np.ndarray, **how: bool) -> None:
        """Bytes arrive in the SMEM of the block, and count."""
        agent, epoch = self.cta.clocks.agent(self.agent_key), self.phase + 1
        self.cta.smem.end_write(places, data, agent, epoch, **how)
        self.complete_tx(places.size, agent, epoch)

    @property
    def agent_key(self) -> tuple[str, int, int]:
        """Who writes what copies onto this mbarrier bring."""
        return "mbarrier", self.cta.name, self.address

    def passed(self, parity: int) -> bool:
        """`try_wait.parity`: the phase of the parity has completed."""
        return self.phase % 2 != parity

    def _check_tx(self) -> None:
        if not -_LIMIT < self.tx < _LIMIT:
            raise BarrierError(f"the tx-count of {self} is {self.tx}")

    def _test(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.completed, self.clock = join(self.completed, self.clock), None

    def __str__(self) -> str:
        return (
            f"mbarrier {self.address:#x} of {self.cta.name} "
            f"(phase {self.phase}, {self.pending} of {self.count} arrivals and "
            f"{self.tx} bytes missing)"
        )


def find(cta: Any, address: int) -> Mbarrier:
    """The mbarrier at an address of a block's window."""
    found = cta.mbarriers.get(address)
    if found is None:
        raise PtxError(f"no mbarrier is initialised at {address:#x}")
    return found


@runs("nvvm.mbarrier.init")
def _init(program: Program, op: ir.Operation) -> Step:
    pointer, count, *predicate = program.inputs(op)

    def init(strand: Any) -> None:
        env = strand.env
        active = strand.active()
        if predicate:
            active = active & env[predicate[0]]
        for lane in np.flatnonzero(active):
            address = int(strand.per_lane(env[pointer])[lane])
            if address in strand.cta.mbarriers:
                raise PtxError(f"mbarrier.init over {find(strand.cta, address)}")
            if address % 8:
                raise PtxError(f"an mbarrier at {address:#x} is not aligned to 8 bytes")
            number = int(strand.per_lane(env[count])[lane])
            row = int(strand.row_of_lane[lane])
            made = Mbarrier(strand.cta, address, number, row)
            strand.cta.mbarriers[address] = made

    return init


@runs("nvvm.fence.mbarrier.init")
def _fence_init(program: Program, op: ir.Operation) -> Step:
    def fence(strand: Any) -> None:
        for barrier in strand.cta.mbarriers.values():
            barrier.fenced = True

    return fence


def _lanes(strand: Any, address: Any) -> list[tuple[int, int]]:
    """Each active lane, with its address."""
    each = strand.per_lane(address)
    return [(int(i), int(each[i])) for i in np.flatnonzero(strand.active())]


@runs("nvvm.mbarrier.try_wait.parity")
def _try_wait(program: Program, op: ir.Operation) -> Step:
    # The operation stands for a loop around the instruction.
    pointer, parity, _ = program.inputs(op)

    def wait(strand: Any) -> Iterator[Wait]:
        yield from _until(strand, strand.env[pointer], strand.env[parity])

    return wait


def _until(strand: Any, pointer: Any, parity: Any) -> Iterator[Wait]:
    barrier = _waited(strand, pointer)
    bit = strand.uniform(parity)
    while not barrier.passed(bit):
        yield Wait(
            lambda: barrier.passed(bit), lambda: f"parity {bit} of {barrier} to pass"
        )
    strand.cta.clocks.acquire(strand.active_rows(), barrier.completed)


def _waited(strand: Any, pointer: Any) -> Mbarrier:
    barrier = find(strand.cta, strand.uniform(pointer))
    for row in strand.active_rows():
        barrier.check_known(int(row), "a wait")
    return barrier


@runs("nvvm.mbarrier.test.wait")
def _test_wait(program: Program, op: ir.Operation) -> Step:
    (pointer, parity), (out,) = program.inputs(op), program.outputs(op)

    return _test(pointer, parity, out, lambda done: np.array([done]))


def _test(pointer: int, parity: int, out: int, result: Any) -> Step:
    def test(strand: Any) -> Iterator[Wait]:
        barrier = _waited(strand, strand.env[pointer])
        bit = strand.uniform(values.forced(strand.env[parity]))
        done = barrier.passed(bit)
        if done:
            strand.cta.clocks.acquire(strand.active_rows(), barrier.completed)
        strand.env[out] = result(done)
        yield Poll(lambda: True, lambda: f"parity {bit} of {barrier} to pass, by tests")

    return test


# --- inline PTX -----------------------------------------------------------------------

_ARRIVE = (
    "mbarrier.arrive.release.cta.shared::cta.b64",
    "mbarrier.arrive.release.cta.shared::cluster.b64",
    "mbarrier.arrive.release.cluster.shared::cluster.b64",
)
_EXPECT = (
    "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64",
    "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64",
    "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64",
)
_TRY_WAIT = (
    "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64",
    "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64",
)
_TEST_WAIT = (
    "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64",
    "mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64",
)
_EXPECT_TX = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64"


@assembles("mbarrier.")
def _text(program: Program, op: ir.Operation, text: str) -> Step:
    statements = parse(text)
    inputs = program.inputs(op)
    opcodes = [s.opcode for s in statements]
    is_arrival = opcodes[0] in (*_ARRIVE, *_EXPECT)
    if len(statements) == 1 and is_arrival:
        return guarded(inputs, statements[0], _arrive(inputs, statements[0]))
    if opcodes[0] in _TRY_WAIT:
        return _wait_loop(inputs, statements)
    if opcodes == [_EXPECT_TX]:
        return guarded(inputs, statements[0], _expect_tx(inputs, statements[0]))
    if opcodes[0] in _TEST_WAIT and opcodes[1:] == ["selp.u32"]:
        test, select = statements
        done, place, parity = test.operands
        if select.operands != ("$0", "1", "0", done):
            raise NotModelled(f"llvm.inline_asm {text[:80]}")
        (out,) = program.outputs(op)
        # The operands are numbered from the result on.
        slots = [out, *inputs]
        address, bit = _slot(slots, place), _slot(slots, parity)
        return _test(address, bit, out, lambda done: np.array([done], np.uint32))
    raise NotModelled(f"llvm.inline_asm {text[:80]}")


def _arrive(inputs: list[int], statement: Statement) -> Step:
    sink, place, *more = statement.operands
    if sink != "_":
        raise NotModelled("mbarrier.arrive with a state")
    expects = statement.opcode in _EXPECT
    count = int(more[0]) if more and not expects else 1
    address = _slot(inputs, place)
    expected = _slot(inputs, more[0]) if expects else None
    remote = "shared::cluster" in statement.opcode

    def arrive(strand: Any) -> None:
        for lane, number in _lanes(strand, strand.env[address]):
            row = int(strand.row_of_lane[lane])
            cta, offset = strand.cta, number
            if remote:
                cta, offset = cluster_address(strand, number)
            barrier = find(cta, offset)
            barrier.check_known(row, "an arrival")
            if expected is not None:
                num_bytes = strand.per_lane(values.forced(strand.env[expected]))[lane]
                barrier.expect(int(num_bytes))
            barrier.arrive(count, strand.cta.clocks.released(row, lane % LANES))

    return arrive


def _expect_tx(inputs: list[int], statement: Statement) -> Step:
    place, count = (_slot(inputs, operand) for operand in statement.operands)

    def expect(strand: Any) -> None:
        for lane, address in _lanes(strand, strand.env[place]):
            barrier = find(strand.cta, address)
            barrier.check_known(int(strand.row_of_lane[lane]), "expect_tx")
            barrier.expect(int(strand.per_lane(strand.env[count])[lane]))

    return expect


def _wait_loop(inputs: list[int], statements: list[Statement]) -> Step:
    """try_wait, and a branch back to it while it has not succeeded.

    The instruction may return early: without the branch it says nothing.
    """
    first, *rest = statements
    done, place, parity, *_ = first.operands
    loops = (
        len(rest) == 1
        and rest[0].opcode == "bra"
        and rest[0].guard == f"!{done}"
        and rest[0].operands == (first.label,)
        and bool(first.label)
    )
    if not loops:
        raise PtxError("mbarrier.try_wait without a loop around it may return early")
    address, bit = _slot(inputs, place), _slot(inputs, parity)

    def wait(strand: Any) -> Iterator[Wait]:
        pointer = strand.env[address]
        yield from _until(strand, pointer, values.forced(strand.env[bit]))

    return wait


def _slot(inputs: list[int], operand: str | tuple[str, ...]) -> int:
    """The slot of `$n` or `[$n]`."""
    assert isinstance(operand, str)
    return inputs[int(operand.strip("[]").removeprefix("$"))]
