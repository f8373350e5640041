# SPDX-License-Identifier: Apache-2.0
"""Every order of a kernel's synchronization, up to equivalence: `explore`."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emulator.engine.orders.choices import Directed
from pallas_gpu.emulator.engine.orders.directed import Order, OutOfTime, RedundantOrder
from pallas_gpu.emulator.engine.orders.reduction import Decisions, Tree


@dataclasses.dataclass
class Explored[T]:
    """What has been explored.

    Attributes:
      orders: how many orders have been run to their end; no two are equivalent.
      redundant: how many runs were stopped, as what remained was equivalent.
      complete: whether each possible order is equivalent to one of them.
      result: of the first order that has one, or of the first that fails.
      error: what the first order that fails has raised.
      failures: how many orders have failed.
      decisions: what repeats the first of them.
      contested: memory with stores that only their values excuse.
    """

    orders: int = 0
    redundant: int = 0
    complete: bool = False
    result: T | None = None
    error: errors.PallasGpuError | None = None
    failures: int = 0
    decisions: Decisions = ()
    contested: frozenset[Hashable] = frozenset()


def explore[T](
    execute: Callable[[Directed], T],
    *,
    orders: int | None = None,
    seconds: float | None = None,
    keep_going: bool = False,
    fails: Callable[[T], bool] = lambda result: False,
) -> Explored[T]:
    """Runs each order of a kernel's synchronization, up to equivalence.

    Args:
      execute: runs the kernel once, with the given choices and otherwise always alike;
        it lets `RedundantOrder` and `OutOfTime` through.
      orders: the most orders to run; None for all.
      seconds: when to stop, about.
      keep_going: whether to go on after an order that fails. After an error, events
        that it has prevented are not known: then nothing is complete.
      fails: whether a result counts as a failure, as errors do.
    """
    found, is_whole = Explored[T](), True
    # Trees take turns, so that each size of the launch is tried within a budget.
    trees = collections.deque([Tree()])
    end = None if seconds is None else time.monotonic() + seconds
    while trees:
        tree = trees[0]
        try:
            result = execute(Order(tree, end))
            failed = fails(result)
            if found.result is None or (failed and not found.failures):
                found.result = result
            _count(found, tree, failed)
        except RedundantOrder:
            found.redundant += 1
        except OutOfTime:
            return found
        except errors.PallasGpuError as error:
            if not found.failures:
                found.error = error
            _count(found, tree, failed=True)
        if tree.found > tree.contested and not found.failures:
            trees, found = collections.deque([Tree(contested=tree.found)]), Explored()
            continue
        if found.failures and not keep_going:
            return found
        trees.extend(Tree(first, tree.contested) for first in tree.siblings)
        tree.siblings = []
        trees.rotate(-1)
        if not tree.advance():
            trees.remove(tree)
            is_whole &= tree.is_whole and tree.found == tree.contested
        elif found.orders == orders or (end is not None and time.monotonic() > end):
            return found
    found.complete = is_whole
    return found


def _count(found: Explored[Any], tree: Tree, failed: bool) -> None:
    found.orders += 1
    found.contested = tree.contested
    if failed and not found.failures:
        found.decisions = tree.decisions()
    found.failures += failed


def repeated(found: Explored[Any]) -> Order:
    """Returns the choices of the order that has failed."""
    return Order(Tree(found.decisions, found.contested))
