# SPDX-License-Identifier: Apache-2.0
"""wgmma: products in flight, their groups, and accumulators.

A product reads its SMEM operands when it completes, at the latest at the wait; the seed
decides. Its reads are recorded as those of its group, so overwriting an operand before
the wait is an error in every run.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from pallas_gpu import errors, findings, types
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Referent, Region
from pallas_gpu.emulator.engine.streams import Stream
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.tensor_cores import tensor_core
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import wgmma

_EMULATE = registry.RuleKind.EMULATE


class Accumulator(Referent):
    """An accumulator in the registers of one warpgroup.

    Attributes:
      data: the elements.
      groups: for each part with products, the latest group and its line.
    """

    __slots__ = ("data", "groups")

    def __init__(self, aval: types.AccumulatorRef):
        super().__init__(f"accumulator {aval.dtype.name}{list(aval.shape)}")
        self.data = np.zeros(aval.shape, aval.dtype)
        self.groups: dict[ordering.Box, tuple[int, str | None]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def read(self, thread: Any, region: Region) -> Run:
        """Waits for its products, and returns the elements."""
        return load(thread, region, 0)

    def write(self, thread: Any, region: Region, value: Any) -> Run:
        """Waits for its products, and replaces the elements."""
        return store(thread, region, np.asarray(value))


class MmaStream(Stream):
    """The products of one warpgroup: each is a group, and they complete in order."""

    def __init__(self, thread: Thread):
        super().__init__(thread, milestones=1)
        self.queue: collections.deque[Product] = collections.deque()

    @property
    def actor(self) -> int:
        """Number in clocks of the operands' reads; its time is a number of groups."""
        return self.milestones[0].actor

    @property
    def waited(self) -> int:
        """Number of groups that the warpgroup has waited for."""
        return self.milestones[0].awaited

    def wait_for_all_but(self, wg: Warpgroup, n: int) -> Run:
        """Waits until at most `n` groups are pending."""
        return self.wait(wg, n, passed=1, what="wgmma")


MMAS: Key[Thread, MmaStream] = Key("wgmma", MmaStream)


@dataclasses.dataclass(slots=True)
class Product:
    """`acc += a @ b` that has been issued."""

    stream: MmaStream
    group: int
    acc: Region
    a: Region | np.ndarray
    b: Region

    def advance(self) -> bool:
        """Computes it, after those issued before."""
        queue = self.stream.queue
        while queue and queue[0].group <= self.group:
            queue.popleft().compute()
        return True

    def compute(self) -> None:
        """Reads the operands and adds their product."""
        a = self.a if isinstance(self.a, np.ndarray) else self.a.peek()
        tensor_core.accumulate(self.acc.peek(), a, self.b.peek())
        self.stream.milestones[0].passed(self.group)


@registry.register(wgmma.wgmma_p, _EMULATE)
def _wgmma(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> None:
    stream = MMAS.of(wg)
    acc, a, b = operands["acc"], operands["a"], operands["b"]
    acc.require_inside("used")
    if isinstance(a, Region):
        _read_operand(wg, stream, a)
    else:
        a = np.array(a)
    _read_operand(wg, stream, b)
    group = stream.issue()
    stream.close_group()
    product = Product(stream, group, acc, a, b)
    stream.queue.append(product)
    acc.memory.groups[acc.box()] = (group, wg.where())
    wg.group.in_flight.submit(product)


def _read_operand(wg: Warpgroup, stream: MmaStream, operand: Region) -> None:
    """Checks and records that the next product reads an operand in SMEM."""
    operand.require_inside("read by wgmma")
    wg.access(
        operand,
        writes=False,
        what="the wgmma",
        by=(stream.actor, stream.open_group),
        hint="call wgmma_wait(n) in the warpgroup that started the wgmma first; in a "
        "pipeline, wgmma_wait(0) in the step, or wgmma_wait(1) with delay_release=1",
    )
    operand.require_written()


@registry.register(wgmma.wgmma_wait_p, _EMULATE)
def _wgmma_wait(wg: Warpgroup, _: Any, n: int, **__: Any) -> Run:
    return MMAS.of(wg).wait_for_all_but(wg, n)


@registry.register(wgmma.accumulator_load_p, _EMULATE)
def _accumulator_load(
    wg: Warpgroup, operands: dict[str, Any], wait_n: int | None, used: Any
) -> Run:
    return load(wg, operands["acc"], wait_n)


def load(wg: Warpgroup, acc: Region, wait_n: int | None) -> Run:
    """Returns the elements of an accumulator.

    Raises:
      RaceError: a product that has not been waited for may still add to them.
    """
    stream = MMAS.of(wg)
    if wait_n is not None:
        yield from stream.wait_for_all_but(wg, wait_n)
    acc.require_inside("read")
    _require_complete(stream, acc)
    return acc.load()


def store(wg: Warpgroup, acc: Region, value: Any) -> Run:
    """Replaces the elements of an accumulator; waits for products that add to it."""
    stream = MMAS.of(wg)
    if any(group > stream.waited for group, _ in acc.memory.groups.values()):
        yield from stream.wait_for_all_but(wg, 0)
    acc.require_inside("written")
    acc.peek()[...] = np.asarray(value)


def _require_complete(stream: MmaStream, acc: Region) -> None:
    box = acc.box()
    groups = acc.memory.groups
    for part, (group, where) in groups.items():
        if group > stream.waited and ordering.overlap(part, box):
            error = errors.RaceError(
                f"{acc.memory.name} is read while a wgmma may still add to it",
                expected="wgmma_wait between the wgmma and the read",
                got=f"elements {ordering.box_text(part)} in group {group} of "
                f"{stream.closed}, issued at {where}; the warpgroup has waited for "
                f"{stream.waited} groups",
                hint="read it with acc[...], which waits, or call "
                f"wgmma_wait({stream.closed - group}) first",
            )
            other = findings.place(where)
            report(
                error.about(
                    rule="missing-wait",
                    buffer=acc.memory.name,
                    elements=part,
                    other=other,
                )
            )
            return
