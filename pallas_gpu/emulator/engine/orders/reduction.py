# SPDX-License-Identifier: Apache-2.0
"""Dynamic partial-order reduction: which orders of a run's events are left to explore.

Two orders are equivalent if they differ in the order of events that commute alone. Of
each class one is run: Flanagan and Godefroid, "Dynamic Partial-Order Reduction for
Model Checking Software" (POPL 2005), with the source sets and sleep sets of Abdulla,
Aronsson, Jonsson and Sagonas, "Optimal Dynamic Partial Order Reduction" (POPL 2014). An
event and an earlier one of another process are a race if they do not commute and
nothing else orders them: then the later one, or what it needs, is also tried first.

A run cannot be copied. To try another choice, the kernel is run again from its start,
by the same choices as far as there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence

from pallas_gpu.emulator.engine.orders.choices import (
    Kind,
    Touch,
    are_ordered,
    are_racing,
    is_overtaken,
)

Touches = tuple[Touch, ...]
# What repeats an order: the processes in it, and the numbers that were chosen.
Decisions = tuple[str | int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    """A choice between processes.

    Attributes:
      chosen: the process that takes the step.
      asleep: processes whose next event has been explored from an earlier choice, and
        what it touches.
      explored: likewise, from this choice.
      todo: processes to explore; in the order in which they were found.
      refused: processes without an event here.
      touches: of the event; None before it has happened.
      touched: likewise, with the numbers that were chosen before.
      known: the set of the events before it, with itself: a bit for each depth.
      followers: the set of the events that it is before, with itself.
    """

    asleep: dict[str, Touches]
    chosen: str | None = None
    explored: dict[str, Touches] = dataclasses.field(default_factory=dict)
    todo: dict[str, None] = dataclasses.field(default_factory=dict)
    refused: set[str] = dataclasses.field(default_factory=set)
    touches: Touches | None = None
    touched: Touches = ()
    known: int = 0
    followers: int = 0

    def next(self) -> str | None:
        """Returns a process that is left to explore."""
        done = self.explored.keys() | self.asleep.keys() | self.refused
        return next((name for name in self.todo if name not in done), None)


@dataclasses.dataclass(slots=True, eq=False)
class _Number:
    """A choice of a number.

    Attributes:
      count: it is below.
      owner: the depth of the event that asks for it; None before the first one.
    """

    count: int
    owner: int | None
    value: int = 0


class Tree:
    """The orders that have been explored, and those that are left.

    Args:
      decisions: the first choices of all orders.
      contested: memory whose accesses are events, because they have no other order.

    Attributes:
      is_whole: False if some choices are not explored.
      found: memory that turns out to be so.
      siblings: the first choices of trees that differ in the size of the launch.
    """

    def __init__(
        self, decisions: Decisions = (), contested: frozenset[Hashable] = frozenset()
    ):
        self.is_whole = True
        self.contested = contested
        self.found = contested
        self.siblings: list[Decisions] = []
        self._decisions = decisions
        self._path: list[_Node | _Number] = []
        # For each thing the events that touch it.
        self._touching: dict[Hashable, list[tuple[int, Touch]]] = {}
        self._events = 0

    def decisions(self) -> Decisions:
        """Returns what repeats the latest order."""
        return tuple(
            step.value if isinstance(step, _Number) else step.chosen or ""
            for step in self._path
        )

    def events(self) -> list[tuple[str, Touches]]:
        """Returns the processes of the events of the latest order, and the touches."""
        nodes = (step for step in self._path if isinstance(step, _Node))
        return [
            (n.chosen, n.touches) for n in nodes if n.chosen and n.touches is not None
        ]

    # --- questions of an order --------------------------------------------------------

    def value(self, depth: int, count: int) -> int:
        """Returns a number below `count`."""
        if depth == len(self._path):
            self._path.append(self._new_number(depth, count))
        number = self._path[depth]
        assert isinstance(number, _Number)
        return number.value

    def _new_number(self, depth: int, count: int) -> _Number:
        owner = self._last_event()
        if depth < len(self._decisions):
            given = int(self._decisions[depth])
            return _Number(given + 1, owner, given)
        if owner is not None:
            return _Number(count, owner)
        self.siblings += [(*self.decisions(), other) for other in range(1, count)]
        return _Number(1, None)

    def choose(self, depth: int, able: Sequence[str]) -> str | None:
        """Returns the process that takes the next step; None if all are explored.

        Args:
          depth: the number of the choice.
          able: the processes that can take a step, the preferred one first.
        """
        if depth == len(self._path):
            self._path.append(_Node(self._asleep()))
        node = self._node(depth)
        if node.chosen is None:
            if depth < len(self._decisions):
                node.todo[str(self._decisions[depth])] = None
            elif not node.explored:
                passed = node.asleep.keys() | node.refused
                awake = (name for name in able if name not in passed)
                node.todo |= dict.fromkeys(itertools.islice(awake, 1))
            node.chosen = node.next()
        return node.chosen

    def refuse(self, depth: int, able: Sequence[str]) -> None:
        """Records that the chosen process has no event here, since it waits."""
        node = self._node(depth)
        assert node.chosen is not None
        node.refused.add(node.chosen)
        node.chosen = None
        if node.explored:
            # Whoever it waits for may be any of the others.
            node.todo |= dict.fromkeys(able)

    def record(self, depth: int, touches: Sequence[Touch], known: int) -> int:
        """Records an event; returns the set of the events before it, with itself.

        Args:
          depth: the number of the choice.
          touches: of the event.
          known: the set of events before it in its process, and before that was made.
        """
        node = self._node(depth)
        if node.touches is not None:
            return node.known
        node.touches = tuple(touches)
        node.known = known | 1 << depth
        racing = set()
        for touch in touches:
            for earlier, other in self._touching.get(touch.place, ()):
                if earlier != depth and are_ordered(other, touch):
                    node.known |= self._node(earlier).known
                    if not known >> earlier & 1 and are_racing(other, touch):
                        racing.add(earlier)
        self._reverse(depth, sorted(racing, reverse=True))
        for touch in touches:
            self._touching.setdefault(touch.place, []).append((depth, touch))
        self._mark(depth)
        return node.known

    def skip(self) -> None:
        """Records that some choices are not explored."""
        self.is_whole = False

    def contest(self, memory: Hashable) -> None:
        """Records that accesses to memory should be events."""
        self.found |= {memory}

    # --- what is left to explore ------------------------------------------------------

    def advance(self) -> bool:
        """Turns to the next order; False if there is none."""
        while self._path:
            step = self._path[-1]
            if isinstance(step, _Number):
                step.value += 1
                if step.value < step.count:
                    self._forget(step.owner)
                    return True
            else:
                self._forget(len(self._path) - 1)
                if step.chosen is not None:
                    step.explored[step.chosen] = step.touched
                step.touched, step.chosen = (), step.next()
                if step.chosen is not None:
                    return True
            self._path.pop()
        return False

    def _forget(self, depth: int | None) -> None:
        """Forgets the touches of an event that is the last one."""
        if depth is None:
            return
        node = self._node(depth)
        if node.touches is None:
            return
        for touch in node.touches:
            self._touching[touch.place].pop()
        node.touched += node.touches
        node.touches = None
        self._mark(depth)

    def _mark(self, depth: int) -> None:
        """Adds an event to the sets of followers, or removes it."""
        event = 1 << depth
        self._events ^= event
        for earlier in _members(self._node(depth).known):
            self._node(earlier).followers ^= event

    def _node(self, depth: int) -> _Node:
        node = self._path[depth]
        assert isinstance(node, _Node)
        return node

    def _last_event(self) -> int | None:
        depths = range(len(self._path) - 1, -1, -1)
        return next((d for d in depths if isinstance(self._path[d], _Node)), None)

    def _asleep(self) -> dict[str, Touches]:
        """Returns who is asleep after the last event."""
        last = self._last_event()
        if last is None:
            return {}
        node = self._node(last)
        assert node.touches is not None
        return {
            name: touches
            for name, touches in (node.asleep | node.explored).items()
            if name != node.chosen
            and not any(is_overtaken(t, done) for t in touches for done in node.touches)
        }

    def _reverse(self, later: int, racing: Sequence[int]) -> None:
        """Makes sure that an event is also tried before those that race with it."""
        name, known = self._node(later).chosen or "", self._node(later).known
        reversed_ = 0
        for earlier in racing:
            # A race with an event between the two comes first.
            if reversed_ >> earlier & 1:
                continue
            node = self._node(earlier)
            between = self._events & (1 << later) - (2 << earlier) & ~node.followers
            if not self._is_possible(later, earlier, between):
                continue
            reversed_ |= node.known
            # Who can be first of these, and of the later event.
            first = [name] if not known & between else []
            if name in node.todo and first:
                continue
            first += [
                self._node(depth).chosen or ""
                for depth in _members(between)
                if not self._node(depth).known & between & ~(1 << depth)
            ]
            if not any(n in node.todo for n in first):
                node.todo[first[0]] = None

    def _is_possible(self, later: int, earlier: int, between: int) -> bool:
        """True unless a counter is too low without what comes after `earlier`."""
        for touch in self._node(later).touches or ():
            if touch.kind is not Kind.TAKE:
                continue
            missing = sum(
                other.delta
                for depth, other in self._touching.get(touch.place, ())
                if depth >= earlier and not between >> depth & 1
            )
            if touch.value - missing < touch.needs:
                return False
        return True


def _members(events: int) -> Iterator[int]:
    """Yields the members of a set, the first one first."""
    while events:
        lowest = events & -events
        yield lowest.bit_length() - 1
        events ^= lowest
