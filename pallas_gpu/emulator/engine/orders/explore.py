# SPDX-License-Identifier: Apache-2.0
"""Every order of a kernel's synchronization, up to equivalence: `explore`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emulator.engine.orders.choices import Directed
from pallas_gpu.emulator.engine.orders.directed import Order, RedundantOrder
from pallas_gpu.emulator.engine.orders.reduction import Decisions, Tree


@dataclasses.dataclass
class Explored[T]:
    """What has been explored.

    Attributes:
      orders: how many orders have been run to their end; no two are equivalent.
      redundant: how many runs were stopped, as what remained was equivalent.
      complete: whether each possible order is equivalent to one of them.
      result: of the first order that has one.
      error: of the first order that fails.
      decisions: what repeats that order, or the first one.
      failures: how many orders have failed.
      contested: memory with stores that only their values excuse.
    """

    orders: int = 0
    redundant: int = 0
    complete: bool = False
    result: T | None = None
    error: errors.PallasGpuError | None = None
    decisions: Decisions = ()
    failures: int = 0
    contested: frozenset[Hashable] = frozenset()


def explore[T](
    execute: Callable[[Directed], T],
    *,
    orders: int | None = None,
    seconds: float | None = None,
    keep_going: bool = False,
) -> Explored[T]:
    """Runs each order of a kernel's synchronization, up to equivalence.

    Args:
      execute: runs the kernel once, with the given choices and otherwise always alike;
        it lets `RedundantOrder` through.
      orders: the most orders to run; None for all.
      seconds: when to stop, about.
      keep_going: whether to go on after an order that fails.
    """
    tree, found = Tree(), Explored[T]()
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        try:
            result = execute(Order(tree))
            if found.result is None:
                found.result = result
        except RedundantOrder:
            found.redundant += 1
            found.orders -= 1
        except errors.PallasGpuError as error:
            found.failures += 1
            if found.error is None:
                found.error, found.decisions = error, tree.decisions()
        found.orders += 1
        found.contested = tree.contested
        if tree.found > tree.contested and found.error is None:
            tree, found = Tree(contested=tree.found), Explored()
            continue
        if found.error is not None and not keep_going:
            return found
        if not tree.advance():
            found.complete = tree.is_whole
            return found
        if found.orders == orders or (end is not None and time.monotonic() > end):
            return found


def repeated(found: Explored[Any]) -> Order:
    """Returns the choices of the order that has failed."""
    return Order(Tree(found.decisions, found.contested))
