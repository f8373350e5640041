# SPDX-License-Identifier: Apache-2.0
"""The order of accesses to tensor memory by asynchronous tcgen05 instructions.

`ORDER` is what the PTX ISA says of each pair (tcgen05, "Pipelined instructions" and
"Canonical synchronization patterns"; the accesses that take part are those of PTX ISA
9.4). docs/semantics.md prints it, and tests/emulator/gpu/tensor_cores/test_order.py has
a kernel and a mutant of each pair. tcgen05.shift is not in it: no operation of the
package issues it.

Pairs that are in order stay so across threads if the second instruction follows a
barrier with `orders_tensor_core`, whose fences order tcgen05 instructions; the first
one need not be complete. All others are ordered by the completion of the first one,
which the threads that know of it by the same barriers may rely on.
"""

from __future__ import annotations

import dataclasses
import enum

from pallas_gpu.emulator.engine.ordering import Access, Box, Clock


class Operation(enum.Enum):
    """An access to tensor memory; its value is the instruction and the operand."""

    PRODUCT = "`mma`, accumulator"
    OPERAND = "`mma`, `a`, scales, metadata"
    COPY = "`cp`"
    LOAD = "`ld`"
    STORE = "`st`"


class Order(enum.Enum):
    """What orders two accesses to the same elements, the first one issued before.

    The values are what docs/semantics.md prints.
    """

    READS = "both read"
    IN_ORDER = "in order"
    SAME_TILE = "in order if equal, else commit"
    COMMIT = "commit"
    WAIT_LOAD = "`wait::ld`"
    WAIT_STORE = "`wait::st`"
    IN_WARP_OR_LOAD = "in order in a warp, else `wait::ld`"
    IN_WARP_OR_STORE = "in order in a warp, else `wait::st`"


# The rows are the first operation, the columns the second one.
_ROWS = {
    Operation.PRODUCT: (
        Order.SAME_TILE, Order.COMMIT, Order.COMMIT, Order.COMMIT, Order.COMMIT,
    ),
    Operation.OPERAND: (
        Order.IN_ORDER, Order.READS, Order.IN_ORDER, Order.READS, Order.COMMIT,
    ),
    Operation.COPY: (
        Order.COMMIT, Order.IN_ORDER, Order.COMMIT, Order.COMMIT, Order.COMMIT,
    ),
    Operation.LOAD: (
        Order.WAIT_LOAD, Order.READS, Order.WAIT_LOAD, Order.READS,
        Order.IN_WARP_OR_LOAD,
    ),
    Operation.STORE: (
        Order.WAIT_STORE, Order.WAIT_STORE, Order.WAIT_STORE, Order.IN_WARP_OR_STORE,
        Order.IN_WARP_OR_STORE,
    ),
}  # fmt: skip
ORDER = {
    (first, second): order
    for first, row in _ROWS.items()
    for second, order in zip(Operation, row, strict=True)
}


@dataclasses.dataclass(slots=True, eq=False)
class Issue:
    """An access of an instruction that has been issued.

    All fields but the first two are those of the instruction, which its accesses share.

    Attributes:
      operation: the access; None for one to SMEM, which has no part in the order.
      box: its elements.
      issuer: the actor whose time is the number of instructions that a thread, or a
        warp, has issued. Knowledge of it passes on as that of tensor memory does.
      number: of the instruction.
      actor, time: of its completion, in clocks.
      before: what happens before it.
      followers: the first instruction of each issuer that is in order after it, and so
        is complete only when it is.
    """

    operation: Operation | None
    box: Box
    issuer: int
    number: int
    actor: int
    time: int
    before: Clock = dataclasses.field(default_factory=dict)
    followers: dict[int, Issue] = dataclasses.field(default_factory=dict)

    def access(self, operation: Operation | None, box: Box) -> Issue:
        """Returns another access of the same instruction."""
        return dataclasses.replace(self, operation=operation, box=box)

    def follows(self, old: Access, clock: Clock) -> bool:
        """True for an access that this one is in order after.

        Args:
          old: an access to the same elements.
          clock: of the thread that issues this one.
        """
        first = old.issue
        if not isinstance(first, Issue):
            return False
        if self._follows(first, self.box == old.box, clock):
            return True
        # A copy, a product that reads it, and a copy over it.
        return any(self._follows(x, False, clock) for x in first.followers.values())

    def _follows(self, first: Issue, same: bool, clock: Clock) -> bool:
        if first.operation is None or self.operation is None:
            return False
        match ORDER[first.operation, self.operation]:
            case Order.IN_ORDER:
                return first.is_issued(clock)
            case Order.SAME_TILE:
                return same and first.is_issued(clock)
            case Order.IN_WARP_OR_LOAD | Order.IN_WARP_OR_STORE:
                # Each element is in reach of one warp of a warpgroup.
                return first.issuer == self.issuer
            case _:
                return False

    def is_issued(self, clock: Clock) -> bool:
        """True when a fence orders the instruction before the clock's owner."""
        return clock.get(self.issuer, 0) >= self.number

    def is_complete(self, clock: Clock) -> bool:
        """True when the clock's owner knows that the instruction is complete."""
        pending, seen = [self], {id(self.followers)}
        while pending:
            one = pending.pop()
            if clock.get(one.actor, 0) >= one.time:
                return True
            for follower in one.followers.values():
                if id(follower.followers) not in seen:
                    seen.add(id(follower.followers))
                    pending.append(follower)
        return False

    def precede(self, later: Issue) -> None:
        """Records that a later instruction is in order after what this one writes."""
        if self.followers.setdefault(later.issuer, later) is later:
            later.before.update(
                {k: max(t, later.before.get(k, 0)) for k, t in self.before.items()}
            )
