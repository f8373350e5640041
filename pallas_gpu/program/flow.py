# SPDX-License-Identifier: Apache-2.0
"""What is known of the values of a program, from its inputs to its results.

An analysis says what one operation makes of the facts of its operands; loops, branches
and scopes are followed here. Facts of a carry are joined until they hold in every
iteration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from pallas_gpu.program.nodes import Constant, Kind, Op, Operand, Region, Value

# Facts of a loop's carries become weaker in each round; after these all are dropped,
# which another round cannot weaken.
_MOST_ROUNDS = 6


class Flow[F]:
    """An analysis; subclasses say what its facts are.

    Attributes:
      facts: of the values of the regions that are being followed, at last of all.
      conditions: the facts that decide whether the operations that are being followed
        are executed, or how often: of branches and of loops with a condition.
    """

    def __init__(self) -> None:
        self.facts: dict[Value, F] = {}
        self.conditions: list[F] = []

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

    def made(self, op: Op, value: Value) -> F:
        """Returns the fact of what an operation makes for its region."""
        return self.unknown(value)

    def stacked(self, fact: F, value: Value) -> F:
        """Returns the fact of an array of what all iterations return."""
        return self.unknown(value)

    def visit(self, op: Op, operands: Sequence[F]) -> None:
        """Called at each operation with the facts of its operands, before its regions.

        In loops it is called in every round, with facts that only weaken.
        """

    # --- following --------------------------------------------------------------------

    def of(self, operand: Operand) -> F:
        """Returns the fact of an operand."""
        if isinstance(operand, Constant):
            return self.constant(operand)
        return self.facts[operand]

    def run(self, region: Region, inputs: Sequence[F]) -> list[F]:
        """Follows a region; returns the facts of its results."""
        self.facts.update(zip(region.inputs, inputs, strict=True))
        for op in region.ops:
            operands = [self.of(x) for x in op.inputs]
            self.visit(op, operands)
            found = self._follow(op, operands)
            self.facts.update(zip(op.results, found, strict=True))
        return [self.of(x) for x in region.results]

    def _follow(self, op: Op, operands: Sequence[F]) -> Sequence[F]:
        match op.kind:
            case Kind.PLAIN if op.name == "optimization_barrier":
                return operands
            case Kind.PLAIN:
                return self.results(op, operands)
            case Kind.FOR | Kind.WHILE:
                return self._loop(op)
            case Kind.IF:
                with self._under(operands[0]):
                    each = [
                        self.run(region, self._inputs(op, i))
                        for i, region in enumerate(op.regions)
                    ]
                    return [self._joined(facts) for facts in zip(*each, strict=True)]
            case _:
                return self.run(op.regions[0], self._inputs(op, 0))

    def _inputs(self, op: Op, position: int) -> list[F]:
        pairs = zip(op.regions[position].inputs, op.entries[position], strict=True)
        return [self.made(op, v) if x is None else self.of(x) for v, x in pairs]

    def _joined(self, facts: Sequence[F]) -> F:
        first, *rest = facts
        for fact in rest:
            first = self.join(first, fact)
        return first

    @contextlib.contextmanager
    def _under(self, *conditions: F) -> Iterator[None]:
        self.conditions += conditions
        try:
            yield
        finally:
            del self.conditions[len(self.conditions) - len(conditions) :]

    def _loop(self, op: Op) -> list[F]:
        *condition, body = op.regions
        inputs, results = self._inputs(op, -1), list[F]()
        joined = []
        for i, j in op.carries:
            fact = self.in_every_iteration(op, i, j)
            if fact is None:
                joined.append((i, j))
            else:
                inputs[i] = fact
        for round_ in range(_MOST_ROUNDS + 1):
            ends = [self._end(op, region, inputs) for region in condition]
            before = list(inputs)
            with self._under(*ends):
                results = self.run(body, inputs)
                for i, j in joined:
                    inputs[i] = self.join(inputs[i], results[j])
            if inputs == before:
                break
            if round_ == _MOST_ROUNDS - 1:
                for i, _ in joined:
                    inputs[i] = self.unknown(body.inputs[i])
        for i, j in set(op.carries) - set(joined):
            inputs[i] = self.unknown(
                op.results[j]
            )  # of the last iteration and one more
        n = len(op.carries)
        stacked = zip(results[n:], op.results[n:], strict=True)
        return [*self._carried(op, inputs), *(self.stacked(*x) for x in stacked)]

    def _end(self, op: Op, condition: Region, inputs: Sequence[F]) -> F:
        """Follows a condition; returns the fact of its answer."""
        kept = self._inputs(op, 0)[: len(condition.inputs) - len(op.carries)]
        (answer,) = self.run(condition, [*kept, *self._carried(op, inputs)])
        return answer

    def _carried(self, op: Op, inputs: Sequence[F]) -> list[F]:
        return [inputs[i] for i, _ in op.carries]
