# SPDX-License-Identifier: Apache-2.0
"""What is known of the values of a program, from its inputs to its results.

An analysis says what one operation makes of the facts of its operands; loops, branches
and scopes are followed here. Facts of a carry are joined until they hold in every
iteration. Besides the facts of values an analysis may have a state, which is what holds
at a point of the program: operations change it in order, and it is merged where paths
meet.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from pallas_gpu.program.nodes import Constant, Kind, Op, Operand, Region, Value

# Facts of a loop's carries become weaker in each round; after these all are dropped,
# which another round cannot weaken.
_MOST_ROUNDS = 6


class Flow[F]:
    """An analysis; subclasses say what its facts are.

    Attributes:
      facts: of the values of the regions that are being followed, at last of all, and
        of constants.
      conditions: the facts that decide whether the operations that are being followed
        are executed, or how often: of branches and of loops with a condition.
      around: the operations whose regions are being followed, outermost first.
      state: what holds before the operation that is visited; None if the analysis has
        no state.
    """

    def __init__(self) -> None:
        self.facts: dict[Operand, F] = {}
        self.conditions: list[F] = []
        self.around: list[Op] = []
        self.state: Any = None
        self._followed: dict[Region, list[Op]] = {}

    # --- what an analysis says --------------------------------------------------------

    def unknown(self, value: Value) -> F:
        """Returns what holds of any value of a type."""
        raise NotImplementedError

    def constant(self, constant: Constant) -> F:
        """Returns the fact of a constant."""
        raise NotImplementedError

    def join(self, a: F, b: F) -> F:
        """Returns what holds of both."""
        raise NotImplementedError

    def results(self, op: Op, operands: Sequence[F]) -> Sequence[F]:
        """Returns the facts of the results of an operation without regions."""
        raise NotImplementedError

    def in_every_iteration(self, op: Op, i: int, j: int) -> F | None:
        """Returns what is known of a carry (input, result) without following the loop.

        None for what the rounds find.
        """
        return None

    def after_loop(self, op: Op, value: Value, fact: F) -> F:
        """Returns the fact of a loop's result from that of the carry in its body."""
        return fact

    def made(self, op: Op, value: Value) -> F:
        """Returns the fact of what an operation makes for its region."""
        return self.unknown(value)

    def stacked(self, fact: F, value: Value) -> F:
        """Returns the fact of an array of what all iterations return."""
        return self.unknown(value)

    def taken(self, op: Op, which: F) -> Sequence[int]:
        """Returns the regions of a branch that may be executed."""
        return range(len(op.regions))

    def visit(self, op: Op, operands: Sequence[F]) -> None:
        """Called at each operation with the facts of its operands, before its regions.

        In loops it is called in every round, with facts that only weaken.
        """

    def leave(self, op: Op) -> None:
        """Called after each operation and its regions."""

    def matters(self, op: Op) -> bool:
        """Whether an operation is followed; nothing is known of others' results."""
        return True

    def merged(self, a: Any, b: Any) -> Any:
        """Returns the state where two paths meet; it must not change for ever."""
        return a

    # --- following --------------------------------------------------------------------

    def of(self, operand: Operand) -> F:
        """Returns the fact of an operand."""
        found = self.facts.get(operand)
        if found is None:
            if isinstance(operand, Constant):
                found = self.constant(operand)
            else:
                found = self.unknown(operand)
            self.facts[operand] = found
        return found

    def followed(self, region: Region) -> list[Op]:
        """Returns the operations of a region that matter."""
        if region not in self._followed:
            self._followed[region] = list(filter(self.matters, region.ops))
        return self._followed[region]

    def found(self, values: Sequence[Value], facts: Sequence[F]) -> None:
        """Takes the facts of values that have been followed."""
        self.facts.update(zip(values, facts, strict=True))

    def run(self, region: Region, inputs: Sequence[F]) -> list[F]:
        """Follows a region; returns the facts of its results."""
        self.found(region.inputs, inputs)
        for op in self.followed(region):
            operands: Sequence[F] = [self.of(x) for x in op.inputs]
            self.visit(op, operands)
            if op.kind is Kind.PLAIN:
                through = op.name == "optimization_barrier"
                results = operands if through else self.results(op, operands)
            else:
                self.around.append(op)
                results = self._follow(op, operands)
                self.around.pop()
            self.found(op.results, results)
            self.leave(op)
        return [self.of(x) for x in region.results]

    def _follow(self, op: Op, operands: Sequence[F]) -> Sequence[F]:
        match op.kind:
            case Kind.FOR if op.params["length"] == 1:
                results = self.run(op.regions[0], self._inputs(op, 0))
                return [*results[: len(op.carries)], *self._stacked(op, results)]
            case Kind.FOR | Kind.WHILE:
                return self._loop(op)
            case Kind.IF:
                with self._under(operands[0]):
                    return self._branches(op, self.taken(op, operands[0]))
            case _:
                return self.run(op.regions[0], self._inputs(op, 0))

    def _inputs(self, op: Op, position: int) -> list[F]:
        pairs = zip(op.regions[position].inputs, op.entries[position], strict=True)
        return [self.made(op, v) if x is None else self.of(x) for v, x in pairs]

    @contextlib.contextmanager
    def _under(self, *conditions: F) -> Iterator[None]:
        self.conditions += conditions
        yield
        del self.conditions[len(self.conditions) - len(conditions) :]

    def _branches(self, op: Op, taken: Sequence[int]) -> list[F]:
        before, results, states = self.state, [], []
        for i in taken:
            self.state = before
            results.append(self.run(op.regions[i], self._inputs(op, i)))
            states.append(self.state)
        self.state = functools.reduce(self.merged, states)
        return [functools.reduce(self.join, x) for x in zip(*results, strict=True)]

    def _loop(self, op: Op) -> list[F]:
        *condition, body = op.regions
        inputs = self._inputs(op, -1)
        joined = []
        for i, j in op.carries:
            fact = self.in_every_iteration(op, i, j)
            if fact is None:
                joined.append((i, j))
            else:
                inputs[i] = fact
        for round_ in itertools.count(1):
            before, state = list(inputs), self.state
            ends = [self._end(op, region, inputs) for region in condition]
            decided = self.state
            with self._under(*ends):
                results = self.run(body, inputs)
                for i, j in joined:
                    inputs[i] = self.join(inputs[i], results[j])
                if round_ == _MOST_ROUNDS:
                    for i, _ in joined:
                        inputs[i] = self.unknown(body.inputs[i])
                self.state = self.merged(state, self.state)
                if inputs == before and self.state == state:
                    self.state = decided
                    return self._left(op, inputs, results)
        raise AssertionError

    def _left(self, op: Op, inputs: Sequence[F], results: Sequence[F]) -> list[F]:
        carried = [
            self.after_loop(op, value, inputs[i])
            for (i, _), value in zip(op.carries, op.results, strict=False)
        ]
        return [*carried, *self._stacked(op, results)]

    def _stacked(self, op: Op, results: Sequence[F]) -> list[F]:
        n = len(op.carries)
        pairs = zip(results[n:], op.results[n:], strict=True)
        return [self.stacked(*pair) for pair in pairs]

    def _end(self, op: Op, condition: Region, inputs: Sequence[F]) -> F:
        """Follows a condition; returns the fact of its answer."""
        kept = self._inputs(op, 0)[: len(condition.inputs) - len(op.carries)]
        carried = [inputs[i] for i, _ in op.carries]
        (answer,) = self.run(condition, [*kept, *carried])
        return answer
