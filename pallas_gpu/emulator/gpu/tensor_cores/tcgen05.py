# SPDX-License-Identifier: Apache-2.0
"""tcgen05: products in flight, their commits, and who may access their operands.

The products and copies of a CTA are performed in the order in which they were issued,
at the latest when a commit that follows them arrives; a product reads its operands and
writes its accumulator then. Reads and writes belong to the stream's next commit, so
reading the accumulator, or overwriting an operand, before a wait for its barrier is an
error in every run. Pairs that need no wait are in `order`.

Copies from SMEM to TMEM (`copies`) are work of the same stream.

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
from pallas_gpu.emulator.engine.in_flight import InOrder
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.steps import Location
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.machine.cta import Cta, Warp, Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import Barrier
from pallas_gpu.emulator.gpu.tensor_cores import scaled, sparse, tensor_core
from pallas_gpu.emulator.gpu.tensor_cores.order import Issue, Operation
from pallas_gpu.emulator.gpu.tensor_cores.tmem import is_in_tmem
from pallas_gpu.layouts.tmem import scaled_instruction, sparsity
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
      smem, tensor: its numbers in clocks, for accesses to SMEM and to TMEM; the time of
        each is a number of commits. Knowledge of the latter passes on only through
        barriers that order the tensor core.
      issued: likewise; its time is a number of instructions.
      commits: number of commits.
      count: number of instructions.
      queue: the work of the CTA that has not been performed.
      before: what has happened before the work: the accesses to its operands that it
        follows, such as the copies that loaded them. Of the issuer's other accesses a
        commit says nothing.
    """

    def __init__(self, wg: Warpgroup):
        self.smem = wg.execution.actors.other()
        self.tensor = wg.execution.actors.tensor_core()
        self.issued = wg.execution.actors.tensor_core()
        self.commits = 0
        self.count = 0
        self.queue = _QUEUES.of(wg.cta)
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

    def issue(self, wg: Warpgroup) -> Issue:
        """Counts an instruction that is issued now."""
        self.count += 1
        wg.clock[self.issued] = self.count
        self.before = dict(self.before)
        return Issue(
            None, (), self.issued, self.count, self.tensor, self.group, self.before
        )

    def access(
        self,
        wg: Warpgroup,
        issue: Issue,
        region: Region,
        operation: Operation,
        *,
        what: str,
        hint: str,
    ) -> None:
        """Checks and records an access of an instruction, and what is before it.

        Args:
          wg: the issuer.
          issue: the instruction.
          region: the elements.
          operation: the access, if they are in TMEM.
          what: the instruction, for messages.
          hint: how to order other accesses after this one.
        """
        in_tmem = is_in_tmem(region)
        writes = in_tmem and operation is not Operation.OPERAND
        own = issue.access(operation if in_tmem else None, region.box())
        for old in region.memory.history.present(own.box):
            if old.known_to(wg.clock):
                self._follow(old, wg, region.memory.fence)
            elif old.writes and isinstance(old.issue, Issue):
                # A later product on the accumulator takes the place of the first one,
                # and is complete no earlier if it is of the same thread.
                replaced = writes and old.issue.issuer == issue.issuer
                if not replaced and own.follows(old, wg.clock):
                    old.issue.precede(own)
        by = (self.tensor if in_tmem else self.smem, self.group)
        wg.access(region, writes=writes, what=what, by=by, hint=hint, issue=own)

    def _follow(
        self, old: ordering.Access, wg: Warpgroup, kind: ordering.Fence
    ) -> None:
        for writes in (False, True):
            if old.is_fenced_for(wg.clock, kind, writes):
                ordering.join(self.before, old.required(kind, writes))

    def perform(self, upto: int) -> None:
        """Performs the work of the first groups, and what was issued before it."""
        for work in reversed(self.queue):
            if work.stream is self and work.group <= upto:
                work.advance()
                return


# Products and copies, in the order in which the threads of a CTA have issued them.
_QUEUES: Key[Cta, collections.deque[Any]] = Key(
    "tcgen05 work", lambda cta: collections.deque()
)
_STREAMS: Key[Warpgroup, TensorStream] = Key("tcgen05", TensorStream)


class Work(InOrder):
    """A product or a copy that has been issued.

    Attributes:
      stream, group: of the commit that completes it.
    """

    def __init__(self, stream: TensorStream):
        super().__init__(stream.queue)
        self.stream, self.group = stream, stream.group

    def submit(self, wg: Warpgroup) -> None:
        """Puts it in flight."""
        self.queue.append(self)
        wg.group.in_flight.submit(self)


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

    def accumulate(self, acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        """Adds the product of its rows to its accumulator."""
        if not self.scales:
            tensor_core.accumulate(acc, a, b, truncates=False)
            return
        a_scale, b_scale = (scale.peek() for scale in self.scales)
        if acc.shape[0] == scaled_instruction.HALF_ROWS:
            b_scale = scaled.joined(b_scale, acc.shape[1])
        scaled.accumulate(acc, a, b, a_scale, b_scale)


class Product(Work):
    """`acc += a @ b`, or `acc = a @ b`, that has been issued.

    Args:
      stream: of its issuer.
      shares: of each CTA: rows of `a` and the accumulator, and columns of `b`.
      accumulate: whether it adds.
    """

    def __init__(self, stream: TensorStream, shares: Sequence[Share], accumulate: bool):
        super().__init__(stream)
        self._shares, self._accumulate = shares, accumulate

    def perform(self) -> None:
        """Reads the operands, and writes the accumulator."""
        b = np.concatenate([share.b.peek() for share in self._shares], axis=1)
        for share in self._shares:
            acc, a = share.acc.peek(), share.a.peek()
            if not self._accumulate:
                acc[...] = 0
            if share.metadata is None:
                share.accumulate(acc, a, b)
                continue
            metadata, halves = share.metadata.peek(), sparsity.ROWS // len(a)
            both = (np.split(x, halves, axis=1) for x in (acc, b))
            for half, (columns, right) in enumerate(zip(*both, strict=True)):
                left = sparse.expand(a, metadata, half)
                share.accumulate(columns, left, right)


@dataclasses.dataclass(slots=True)
class Commit:
    """An arrival when earlier work is complete, on the same barrier of some CTAs.

    Attributes:
      known: the clock of the issuer: the arrival comes after what it contains.
      released: what the arrival releases besides the tensor core's work: what that
        follows, and that the issuer has come so far; not the issuer's stores.
      location: the line.
    """

    stream: TensorStream
    group: int
    barriers: Sequence[Barrier]
    known: list[ordering.Clock]
    released: ordering.Clock
    location: Location | None

    def missing(self) -> list[str]:
        """No CTA's part is missing."""
        return []

    def advance(self) -> bool:
        """Performs the work, and arrives."""
        stream = self.stream
        stream.perform(self.group)
        own = (stream.smem, stream.tensor)
        for barrier in self.barriers:
            barrier.multicasts.append(self)
            known = {**self.released, **dict.fromkeys(own, self.group)}
            barrier.arrive(known, self.location)
        return True


@registry.register(tcgen05.tcgen05_mma_p, _EMULATE)
def _mma(
    wg: Warpgroup, operands: dict[str, Any], collective_axis: str | None, **_: Any
) -> None:
    ctas = ctas_of(wg, collective_axis)
    if wg.cta is not ctas[0]:
        return
    stream = TensorStream.of(wg)
    issue = stream.issue(wg)
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
        for operand in (a, b, *others):
            operand.require_inside("read by tcgen05_mma")
            _access(wg, issue, operand, Operation.OPERAND)
            operand.require_written()
        acc.require_inside("used")
        _access(wg, issue, acc, Operation.PRODUCT)
        if accumulate:
            acc.require_written()
        acc.memory.mark_written(acc.key())
        shares.append(Share(acc, a, b, held, indices))
    Product(stream, shares, accumulate).submit(wg)
    if operands["barrier"] is not None:
        _commit(wg, operands["barrier"], ctas)


def ctas_of(wg: Warpgroup, collective_axis: str | None) -> list[Cta]:
    """The CTAs that multiply together; the first one is the leader."""
    return [wg.cta] if collective_axis is None else wg.cta.along((collective_axis,))


def _access(wg: Warpgroup, issue: Issue, region: Region, operation: Operation) -> None:
    stream = TensorStream.of(wg)
    stream.access(wg, issue, region, operation, what="the tcgen05_mma", hint=_WAIT)


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
    work = Commit(stream, stream.commits, barriers, known, released, wg.location)
    wg.group.in_flight.submit(work)
