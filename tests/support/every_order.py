# SPDX-License-Identifier: Apache-2.0
"""Orders of a kernel's events: all interleavings, and the classes that they form."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emulator.engine.orders import reduction
from pallas_gpu.emulator.engine.orders.choices import are_ordered
from pallas_gpu.emulator.engine.orders.directed import Order, RedundantOrder
from pallas_gpu.emulator.gpu.machine import launch
from pallas_gpu.entry import call


@dataclasses.dataclass
class Launch:
    """The only kernel of a function, with its operands."""

    params: call.CallParams
    arrays: list[Any]

    @classmethod
    def of(cls, f: Callable[..., Any], *args: Any) -> Launch:
        """Traces the function."""
        equations = jax.make_jaxpr(f)(*args).jaxpr.eqns
        (kernel,) = [e for e in equations if e.primitive is call.kernel_p]
        return cls(call.CallParams(**kernel.params), list(args))

    def run(self, order: Order) -> list[np.ndarray]:
        """Runs it once."""
        return launch.run_kernel(self.params, self.arrays, order)

    def explore(self, **limits: Any) -> Any:
        """Explores its orders."""
        return launch.explore_kernel(self.params, self.arrays, **limits)

    def failures(self, schedules: int) -> int:
        """Returns how many of so many seeds find a mistake."""
        failed = 0
        for seed in range(schedules):
            interpret = plgpu.InterpretParams(seed=seed)
            params = dataclasses.replace(self.params, interpret=interpret)
            try:
                launch.run_kernel(params, self.arrays)
            except errors.KernelError:
                failed += 1
        return failed


class Interleavings(reduction.Tree):
    """All orders of events, also equivalent ones.

    Args:
      decisions: the first choices.
      sleeps: whether to stop a run once what remains has been explored, which leaves
        one of each class without looking at races.
    """

    def __init__(self, decisions: reduction.Decisions = (), sleeps: bool = False):
        super().__init__(decisions)
        self._sleeps = sleeps

    def choose(self, depth: int, able: Sequence[str]) -> str | None:
        chosen = super().choose(depth, able)
        self._node(depth).todo |= dict.fromkeys(able)
        return chosen

    def _asleep(self) -> Any:
        return super()._asleep() if self._sleeps else {}

    def _reverse(self, later: int, racing: Sequence[int]) -> None:
        pass


def outcomes(
    run: Callable[[Order], Any],
    make: Callable[..., reduction.Tree],
    first: reduction.Decisions = (),
) -> Iterator[tuple[Any, Any]]:
    """Yields the class of each order, and the results or the error's text."""
    tree = make(first)
    while True:
        try:
            results: Any = [np.asarray(x).tolist() for x in run(Order(tree))]
        except errors.PallasGpuError as error:
            results = error.what
        except RedundantOrder:
            results = None
        if results is not None:
            numbers = [x for x in tree.decisions() if isinstance(x, int)]
            yield (tuple(numbers), _class_of(tree.events())), str(results)
        if not tree.advance():
            break
    for other in tree.siblings:
        yield from outcomes(run, make, other)


def _class_of(events: Sequence[tuple[str, Any]]) -> Any:
    """Returns which events there are, and which of them comes first of two that do
    not commute: Mazurkiewicz's trace."""
    count: collections.Counter[str] = collections.Counter()
    named, pairs = [], set()
    for process, touches in events:
        count[process] += 1
        name = (process, count[process])
        for earlier, others in named:
            if earlier[0] != process and any(
                a.place == b.place and are_ordered(a, b)
                for a in others
                for b in touches
            ):
                pairs.add((earlier, name))
        named.append((name, touches))
    return frozenset(name for name, _ in named), frozenset(pairs)
