# SPDX-License-Identifier: Apache-2.0
"""tcgen05: products in flight, their commits, and who may access their operands.

A thread's products complete in order; each reads its operands and writes its
accumulator then, at the latest when a commit that follows it arrives. Reads and writes
belong to the stream's next commit, so reading the accumulator, or overwriting an
operand, before a wait for its barrier is an error in every run.

Ordered without a wait are products of one thread on one accumulator; two that share
only some of its columns are not (PTX ISA, tcgen05 "Pipelined instructions").

Copies from SMEM to TMEM (`copies`) are work of the same stream, ordered before its
later products.

A product of a pair of CTAs is work of the leader: it reads and writes the memory of
both, so the leader must know of what the other has done, and the commit arrives in
both. In the other CTA the call does nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.machine.cta import Cta, Warp, Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import Barrier
from pallas_gpu.emulator.gpu.tensor_cores import scaled, sparse, tensor_core
from pallas_gpu.emulator.gpu.tensor_cores.tmem import is_in_tmem
from pallas_gpu.layouts.tmem import scaled_instruction
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import tcgen05

_EMULATE = registry.RuleKind.EMULATE
_WAIT = (
    "wait first for a barrier on which the tcgen05_mma, or a tcgen05_commit_arrive "
    "after it, arrives"
)


class TensorStream:
    """The tcgen05 work of one thread, in groups that commits close.

    Attributes:
      smem, tensor, operands: its numbers in clocks, for accesses to SMEM, to
        accumulators, and to operands in TMEM, which copies write; the time of each is a
        number of commits. Knowledge of the latter two passes on only through barriers
        that order the tensor core. Copies and reads of operands are in order; products
        and later copies to their accumulators are not.
      commits: number of commits.
      queue: work that has not been performed.
      before: what has happened before the work: the accesses to its operands that it
        follows, such as the copies that loaded them. Of the issuer's other accesses a
        commit says nothing.
    """

    def __init__(self, thread: Thread):
        self.smem = thread.execution.actors.other()
        self.tensor = thread.execution.actors.tensor_core()
        self.operands = thread.execution.actors.tensor_core()
        self.commits = 0
        self.queue: collections.deque[Work] = collections.deque()
        self.before: ordering.Clock = {}

    @classmethod
    def of(cls, wg: Warpgroup) -> TensorStream:
        """Returns the stream in which a warpgroup, or a warp, issues.

        A warpgroup issues through the elected lane of its warp 0.
        """
        if isinstance(wg, Warp) and wg.number == 0:
            wg = wg.warpgroup
        return _STREAMS.of(wg)

    @property
    def group(self) -> int:
        """The group of work that is issued now."""
        return self.commits + 1

    def follow(self, wg: Warpgroup, operand: Region) -> None:
        """Records which accesses to an operand happen before the work on it."""
        memory = operand.memory
        for old in memory.history.present(operand.box()):
            if not old.known_to(wg.clock):
                continue
            for writes in (False, True):
                if old.is_fenced_for(wg.clock, memory.fence, writes):
                    ordering.join(self.before, old.required(memory.fence, writes))

    def perform(self, upto: int) -> None:
        """Performs the work of the first groups."""
        while self.queue and self.queue[0].group <= upto:
            self.queue.popleft().perform()


_STREAMS: Key[Thread, TensorStream] = Key("tcgen05", TensorStream)


@dataclasses.dataclass(slots=True)
class Work:
    """A product or a copy that has been issued."""

    stream: TensorStream
    group: int
    done: bool = dataclasses.field(default=False, init=False)

    def submit(self, wg: Warpgroup) -> None:
        """Puts it in flight."""
        self.stream.queue.append(self)
        wg.group.in_flight.submit(self)

    def advance(self) -> bool:
        """Performs it, after those issued before."""
        while not self.done:
            self.stream.queue.popleft().perform()
        return True

    def perform(self) -> None:
        """Reads what it reads, and writes what it writes."""
        self.done = True


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """The operands of a product in one CTA.

    Attributes:
      scales: of the blocks of its rows of `a` and of all of `b`, or none.
      metadata: of its rows of a sparse `a`.
    """

    acc: Region
    a: Region
    b: Region
    scales: tuple[Region, ...]
    metadata: Region | None


@dataclasses.dataclass(slots=True)
class Product(Work):
    """`acc += a @ b`, or `acc = a @ b`, that has been issued.

    Attributes:
      shares: of each CTA: rows of `a` and the accumulator, and columns of `b`.
    """

    shares: Sequence[Share]
    accumulate: bool

    def perform(self) -> None:
        """Reads the operands, and writes the accumulator."""
        b = np.concatenate([share.b.peek() for share in self.shares], axis=1)
        for share in self.shares:
            acc, a = share.acc.peek(), share.a.peek()
            if not self.accumulate:
                acc[...] = 0
            if share.metadata is not None:
                a = sparse.expand(a, share.metadata.peek())
            if share.scales:
                a_scale, b_scale = (scale.peek() for scale in share.scales)
                if acc.shape[0] == scaled_instruction.HALF_ROWS:
                    b_scale = scaled.joined(b_scale, acc.shape[1])
                scaled.accumulate(acc, a, b, a_scale, b_scale)
            else:
                tensor_core.accumulate(acc, a, b, truncates=False)
        self.done = True


@dataclasses.dataclass(slots=True)
class Commit:
    """An arrival when earlier work is complete, on the same barrier of some CTAs.

    Attributes:
      known: the clock of the issuer: the arrival comes after what it contains.
      released: what the arrival releases besides the tensor core's work: what that
        follows, and that the issuer has come so far; not the issuer's stores.
    """

    stream: TensorStream
    group: int
    barriers: Sequence[Barrier]
    known: list[ordering.Clock]
    released: ordering.Clock

    def missing(self) -> list[str]:
        """No CTA's part is missing."""
        return []

    def advance(self) -> bool:
        """Performs the work, and arrives."""
        stream = self.stream
        stream.perform(self.group)
        own = (stream.smem, stream.tensor, stream.operands)
        for barrier in self.barriers:
            barrier.multicasts.append(self)
            barrier.arrive({**self.released, **dict.fromkeys(own, self.group)})
        return True


@registry.register(tcgen05.tcgen05_mma_p, _EMULATE)
def _mma(
    wg: Warpgroup, operands: dict[str, Any], collective_axis: str | None, **_: Any
) -> None:
    ctas = ctas_of(wg, collective_axis)
    if wg.cta is not ctas[0]:
        return
    stream = TensorStream.of(wg)
    accumulate = bool(operands["accumulate"])
    scales = [operands[name] for name in ("a_scale", "b_scale")]
    scales = [scale for scale in scales if scale is not None]
    metadata = operands["a_sparse_metadata"]
    shares = []
    for cta in ctas:
        acc, a, b = (
            cluster.counterpart_of(wg, operands[x], cta) for x in ("acc", "a", "b")
        )
        held = tuple(cluster.counterpart_of(wg, scale, cta) for scale in scales)
        indices = metadata
        if metadata is not None:
            indices = cluster.counterpart_of(wg, metadata, cta)
        others = held if indices is None else (*held, indices)
        for operand in (acc, a, b, *others):
            stream.follow(wg, operand)
        for operand in (a, b, *others):
            _read_operand(wg, stream, operand)
        _write_accumulator(wg, stream, acc, accumulate)
        shares.append(Share(acc, a, b, held, indices))
    product = Product(stream, stream.group, shares, accumulate)
    product.submit(wg)
    if operands["barrier"] is not None:
        _commit(wg, operands["barrier"], ctas)


def ctas_of(wg: Warpgroup, collective_axis: str | None) -> list[Cta]:
    """The CTAs that multiply together; the first one is the leader."""
    return [wg.cta] if collective_axis is None else wg.cta.along((collective_axis,))


def _read_operand(wg: Warpgroup, stream: TensorStream, operand: Region) -> None:
    """Reads an operand; copies of the stream that write it in TMEM come before."""
    operand.require_inside("read by tcgen05_mma")
    actor, clock = stream.smem, None
    if is_in_tmem(operand):
        actor = stream.operands
        clock = {**wg.clock, actor: stream.group}
    by = (actor, stream.group)
    what = "the tcgen05_mma"
    wg.access(operand, writes=False, what=what, by=by, hint=_WAIT, clock=clock)
    operand.require_written()


def _write_accumulator(
    wg: Warpgroup, stream: TensorStream, acc: Region, accumulate: bool
) -> None:
    acc.require_inside("used")
    clock = None
    box = acc.box()
    own = (stream.tensor, stream.operands)
    earlier = [old for old in acc.memory.history.present(box) if old.actor in own]
    if all(old.box == box for old in earlier):
        clock = {**wg.clock, **dict.fromkeys(own, stream.group)}
    by = (stream.tensor, stream.group)
    wg.access(acc, writes=True, what="the tcgen05_mma", by=by, hint=_WAIT, clock=clock)
    if accumulate:
        acc.require_written()
    acc.memory.mark_written(acc.key())


@registry.register(tcgen05.tcgen05_commit_arrive_p, _EMULATE)
def _commit_arrive(
    wg: Warpgroup, operands: dict[str, Any], collective_axis: str | None, **_: Any
) -> None:
    ctas = ctas_of(wg, collective_axis)
    if wg.cta is ctas[0]:
        _commit(wg, operands["barrier"], ctas)


def _commit(wg: Warpgroup, barrier: Region, ctas: Sequence[Cta]) -> None:
    stream = TensorStream.of(wg)
    stream.commits += 1
    known = [wg.release()]
    released = {**stream.before, **ordering.executed(known[0])}
    barriers = [barrier.memory.same_in(cta).one(barrier) for cta in ctas]
    work = Commit(stream, stream.commits, barriers, known, released)
    wg.group.in_flight.submit(work)
