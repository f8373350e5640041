# SPDX-License-Identifier: Apache-2.0
"""How the tests of a tier are chosen: greedy weighted cover.

The default tier kills every mutant that some test kills, by two tests where the second
one is cheap; runs every line of the package that some test runs; has a test of every
feature of the tables of coverage; and one case of each test function that is short.
What is left of its time goes to second tests of lines. `make check` has the part of it
that finds most in its time.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

# What pytest and pytest-xdist take for a test, and the least that is measured.
OVERHEAD_SECONDS = 0.004
# A second killer, or a case of a function that kills nothing, is cheap up to here.
CHEAP_SECONDS = 0.4


@dataclasses.dataclass(frozen=True)
class Measured:
    """What is known of each test.

    Attributes:
      names: node ids.
      seconds: of CPU time.
      lines: the lines of the package that each runs: a row of packed bits.
      killers: the tests that kill each mutant, by the mutant's name.
    """

    names: Sequence[str]
    seconds: np.ndarray
    lines: np.ndarray
    killers: Mapping[str, Sequence[str]]

    @property
    def cost(self) -> np.ndarray:
        return self.seconds + OVERHEAD_SECONDS


class Choice:
    """Tests that are chosen one after the other."""

    def __init__(self, measured: Measured):
        self._all = measured
        self._number = {name: i for i, name in enumerate(measured.names)}
        self._cost = measured.cost
        self.chosen: set[int] = set()
        self.log: list[tuple[str, int, float]] = []

    @property
    def seconds(self) -> float:
        """What the chosen tests take."""
        return float(sum(self._cost[i] for i in self.chosen))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._all.names[i] for i in self.chosen)

    def require(self, names: Iterable[str], why: str) -> None:
        """Takes tests that nothing else stands for."""
        self.chosen |= {self._number[x] for x in names if x in self._number}
        self._note(why)

    def one_of_each(self, groups: Iterable[Iterable[str]], why: str) -> None:
        """Takes the cheapest test of each group that has none."""
        for group in groups:
            numbers = [self._number[x] for x in group if x in self._number]
            if numbers and not self.chosen.intersection(numbers):
                self.chosen.add(min(numbers, key=lambda i: self._cost[i]))
        self._note(why)

    def kill(self, times: int, cheap: float = float("inf")) -> None:
        """Takes tests until each mutant has so many killers, or all that it has.

        Args:
          times: the number of killers.
          cheap: tests that take longer are not taken.
        """
        kills: dict[int, set[str]] = {}
        missing: dict[str, int] = {}
        for mutant, names in self._all.killers.items():
            numbers = {self._number[x] for x in names if x in self._number}
            have = len(numbers & self.chosen)
            usable = {i for i in numbers - self.chosen if self._cost[i] <= cheap}
            missing[mutant] = min(times - have, len(usable))
            for i in usable:
                kills.setdefault(i, set()).add(mutant)

        def gain(i: int) -> float:
            return sum(missing[m] > 0 for m in kills[i])

        for i in self._greedy(list(kills), gain):
            for mutant in kills[i]:
                missing[mutant] -= 1
        self._note(f"{times} killers of each mutant")

    def cover(self, times: int, budget: float = float("inf")) -> None:
        """Takes tests until each line that tests run is run by so many of them.

        Args:
          times: one or two.
          budget: seconds of all chosen tests at which to stop.
        """
        rows = self._all.lines
        done = [np.zeros(rows.shape[1], np.uint8) for _ in range(times)]

        def count(i: int) -> None:
            new = rows[i]
            for level in done:
                level[...], new = level | new, level & new

        for i in self.chosen:
            count(i)
        need = ~done[-1]

        def gain(i: int) -> float:
            return float(np.bitwise_count(rows[i] & need).sum())

        left = [i for i in range(len(rows)) if i not in self.chosen]
        for i in self._greedy(left, gain, budget):
            count(i)
            need &= ~done[-1]
        self._note(f"each line by {times}")

    def cheapest_cases(
        self, functions: Mapping[str, Sequence[str]], budget: float
    ) -> None:
        """Takes the cheapest case of each function without one, short ones first."""
        waiting = []
        for cases in functions.values():
            numbers = [self._number[x] for x in cases if x in self._number]
            if numbers and not self.chosen.intersection(numbers):
                i = min(numbers, key=lambda i: self._cost[i])
                waiting.append((self._cost[i], i))
        spent = self.seconds
        for cost, i in sorted(waiting):
            if cost > CHEAP_SECONDS or spent + cost > budget:
                break
            spent += cost
            self.chosen.add(i)
        self._note("a case of each short function")

    def _greedy(
        self,
        candidates: Iterable[int],
        gain: Callable[[int], float],
        budget: float = float("inf"),
    ) -> Iterator[int]:
        """Yields the test of most gain for its time, until none gains.

        Gains only shrink, so a test whose gain is up to date and the best is the best.
        """
        heap = [(-gain(i) / self._cost[i], i) for i in candidates]
        heapq.heapify(heap)
        spent = self.seconds
        while heap:
            _, i = heapq.heappop(heap)
            now = -gain(i) / self._cost[i]
            if not now:
                continue
            if heap and now > heap[0][0]:
                heapq.heappush(heap, (now, i))
                continue
            if spent + self._cost[i] > budget:
                continue
            spent += self._cost[i]
            self.chosen.add(i)
            yield i

    def _note(self, why: str) -> None:
        self.log.append((why, len(self.chosen), round(self.seconds, 1)))
