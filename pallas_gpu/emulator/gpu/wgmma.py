# SPDX-License-Identifier: Apache-2.0
"""wgmma: products in flight, their groups, and accumulators.

A product reads its SMEM operands when it completes, at the latest when somebody waits
for it; the seed decides. Its reads are recorded as those of its group, so whatever
overwrites an operand before the wait is an error in every run.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.emulator.engine import ordering, scheduler
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.gpu import tensor_core
from pallas_gpu.emulator.gpu.machine import Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import wgmma

_EMULATE = registry.RuleKind.EMULATE


class Accumulator:
    """An accumulator in the registers of one warpgroup.

    Attributes:
      name: for messages.
      space: registers.
      data: the elements.
      groups: for each part that products were added to, the latest group and its line.
    """

    __slots__ = ("data", "groups", "name", "space")

    def __init__(self, aval: types.AccumulatorRef):
        self.name = f"accumulator {aval.dtype.name}{list(aval.shape)}"
        self.space = types.REGS
        self.data = np.zeros(aval.shape, aval.dtype)
        self.groups: dict[ordering.Box, tuple[int, str | None]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


class MmaStream:
    """The products of one warpgroup; they complete in order.

    Attributes:
      actor: number in clocks of the operands' reads; its time is a number of groups.
      issued: groups so far; one product is one group.
      waited: groups that the warpgroup has waited for.
    """

    def __init__(self, wg: Warpgroup):
        self.actor = wg.machine.new_actor()
        self.issued = 0
        self.waited = 0
        self.queue: collections.deque[Product] = collections.deque()

    @classmethod
    def of(cls, wg: Warpgroup) -> MmaStream:
        """Returns the warpgroup's stream."""
        if wg.mmas is None:
            wg.mmas = cls(wg)
        return wg.mmas

    def wait(self, wg: Warpgroup, n: int) -> scheduler.Run:
        """Waits until at most `n` groups are under way."""
        upto = self.issued - n
        if self.queue and self.queue[0].group <= upto:
            yield scheduler.Wait(
                lambda: not self.queue or self.queue[0].group > upto,
                f"wgmma, all but {n} groups",
                lambda: f"{len(self.queue)} groups are under way",
            )
        if upto > self.waited:
            self.waited = upto
            ordering.join(wg.clock, {self.actor: upto})


@dataclasses.dataclass(slots=True)
class Product:
    """`acc += a @ b` that has been issued."""

    stream: MmaStream
    group: int
    acc: Region
    a: Region | np.ndarray
    b: Region

    def advance(self) -> bool:
        """Computes it, after those that were issued before."""
        queue = self.stream.queue
        while queue and queue[0].group <= self.group:
            queue.popleft().compute()
        return True

    def compute(self) -> None:
        """Reads the operands and adds their product."""
        a = self.a if isinstance(self.a, np.ndarray) else self.a.peek()
        tensor_core.accumulate(self.acc.peek(), a, self.b.peek())


@registry.register(wgmma.wgmma_p, _EMULATE)
def _wgmma(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> None:
    stream = MmaStream.of(wg)
    acc, a, b = operands["acc"], operands["a"], operands["b"]
    acc.require_inside("used")
    group = stream.issued + 1
    if isinstance(a, Region):
        _read_operand(wg, stream, a)
    else:
        a = np.array(a)
    _read_operand(wg, stream, b)
    stream.issued = group
    product = Product(stream, group, acc, a, b)
    stream.queue.append(product)
    acc.memory.groups[acc.box()] = (group, wg.where())
    wg.machine.in_flight.submit(product)


def _read_operand(wg: Warpgroup, stream: MmaStream, operand: Region) -> None:
    """Checks and records that the next product reads an operand in SMEM."""
    operand.require_inside("read by wgmma")
    wg.access(
        operand,
        writes=False,
        what="the wgmma",
        by=(stream.actor, stream.issued + 1),
        hint="call wgmma_wait(n) in the warpgroup that started the wgmma first",
    )
    operand.require_fenced("a wgmma")
    operand.require_written()


@registry.register(wgmma.wgmma_wait_p, _EMULATE)
def _wgmma_wait(wg: Warpgroup, _: Any, n: int, used: Any) -> scheduler.Run:
    return MmaStream.of(wg).wait(wg, n)


@registry.register(wgmma.accumulator_load_p, _EMULATE)
def _accumulator_load(
    wg: Warpgroup, operands: dict[str, Any], wait_n: int | None, used: Any
) -> scheduler.Run:
    return load(wg, operands["acc"], wait_n)


def load(wg: Warpgroup, acc: Region, wait_n: int | None) -> scheduler.Run:
    """Returns the elements of an accumulator.

    Raises:
      RaceError: a product that nobody waited for may still add to them.
    """
    stream = MmaStream.of(wg)
    if wait_n is not None:
        yield from stream.wait(wg, wait_n)
    acc.require_inside("read")
    _require_settled(stream, acc)
    return acc.load()


def store(wg: Warpgroup, acc: Region, value: Any) -> scheduler.Run:
    """Waits for all products and replaces the elements of an accumulator."""
    stream = MmaStream.of(wg)
    yield from stream.wait(wg, 0)
    acc.require_inside("written")
    acc.peek()[...] = value


def _require_settled(stream: MmaStream, acc: Region) -> None:
    box = acc.box()
    groups = acc.memory.groups
    for part, (group, where) in groups.items():
        if group > stream.waited and ordering.overlap(part, box):
            raise errors.RaceError(
                f"{acc.memory.name} is read while a wgmma may still add to it",
                expected="wgmma_wait between the wgmma and the read",
                got=f"elements {ordering.box_text(part)} in group {group} of "
                f"{stream.issued}, issued at {where}; the warpgroup has waited for "
                f"{stream.waited} groups",
                hint="read it with acc[...], which waits, or call "
                f"wgmma_wait({stream.issued - group}) first",
            )
