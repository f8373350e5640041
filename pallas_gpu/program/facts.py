# SPDX-License-Identifier: Apache-2.0
"""The facts of a program's values: constant, linear, a multiple, uniform, in a range.

    facts = facts_of(region, mesh.axes)
    facts.start(window.starts[0]).divisor, facts.of(index).depends_on("warpgroup")

Analyses that look for more, or report on the way, derive from `Facts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.layouts.window import Sum
from pallas_gpu.primitives.indices import rules
from pallas_gpu.primitives.indices.facts import (
    ANYTHING,
    Axis,
    Fact,
    axes_of,
    fits,
    fitted,
    is_integer,
    literal,
    unknown,
)
from pallas_gpu.program import indices
from pallas_gpu.program.bodies import kept
from pallas_gpu.program.flow import Flow
from pallas_gpu.program.nodes import (
    Access,
    Constant,
    Kind,
    Op,
    Operand,
    Region,
    Value,
)

# What stands for the index of the warp in facts: `Axis.of`.
WARP = "warp"
_WARPS = 4


@kept
def facts_of(region: Region, axes: tuple[tuple[Any, int], ...] = ()) -> Recorded:
    """Returns the facts of `indices.placing` values, made once for each program.

    They hold whenever a value is computed.

    Args:
      region: the program.
      axes: names and sizes of the axes of the grid, as far as they are known.
    """
    return Recorded.of_all(region, axes, indices.placing(region))


def all_facts_of(region: Region, axes: tuple[tuple[Any, int], ...] = ()) -> Recorded:
    """Returns the facts of all values of a program, the inner ones included."""
    return Recorded.of_all(region, axes, None)


class Facts(Flow[Fact]):
    """The analysis.

    Args:
      axes: the sizes of axes of the grid.
      positions: the positions on some of them, if they are known.
      needed: values and all those on which they depend, if others are not asked for.
    """

    # Whether what is read from memory is a function of the reference and the indices.
    memory_is_constant = False

    def __init__(
        self,
        axes: Mapping[Any, int] = {},
        positions: Mapping[Any, int] = {},
        needed: Set[Value] | None = None,
    ) -> None:
        super().__init__()
        self._axes = axes
        self._positions = positions
        self._needed = needed
        self._warp_axis: Any = None

    def matters(self, op: Op) -> bool:
        needed = self._needed
        return needed is None or not (
            needed.isdisjoint(op.results) and not any(map(self.followed, op.regions))
        )

    def inputs_of(self, region: Region) -> list[Fact]:
        """Returns facts of a program's inputs: they are axes themselves."""
        return [self.by_itself(value) for value in region.inputs]

    def by_itself(self, value: Value) -> Fact:
        """Returns the fact of a value that is not followed to where it comes from."""
        if value.shape and not isinstance(value.aval, _jax.AbstractRef):
            axes = [Axis(value), *axes_of(value.aval)]
            return fitted(Fact(others=frozenset(axes)), value.aval)
        return fitted(Fact.along(Axis(value)), value.aval)

    def origin(self, ref: Operand) -> Value | None:
        """Returns the input or the allocated memory that a reference is, if known."""
        fact = self.of(ref)
        axis = fact.terms[0][0] if fact.is_linear and fact.terms else None
        return axis.of if axis is not None and isinstance(axis.of, Value) else None

    def start(self, start: Any) -> Fact:
        """Returns the fact of the start of a window along an axis."""
        if isinstance(start, int):
            return Fact.number(start)
        if not isinstance(start, Sum):
            return self.of(start)
        terms = map(self.of, start.terms)
        return functools.reduce(Fact.plus, terms, Fact.number(start.constant))

    def unknown(self, value: Value) -> Fact:
        return unknown(value.aval)

    def constant(self, constant: Constant) -> Fact:
        return literal(constant.value)

    def join(self, a: Fact, b: Fact) -> Fact:
        op = self.around[-1]
        choice = set() if op.kind is Kind.IF else {Axis(op, _length(op))}
        if op.kind is not Kind.FOR:
            choice |= self.conditions[-1].axes
        either = a.or_else(b, choice)
        if op.kind is not Kind.IF and a.low != a.high:
            # A range that has grown twice may grow in every iteration.
            low = either.low if either.low == a.low else None
            high = either.high if either.high == a.high else None
            return either._replace(low=low, high=high)
        return either

    def made(self, op: Op, value: Value) -> Fact:
        if op.kind is Kind.WARPS:
            return self.warp(op.params["axis_name"])
        if op.kind is Kind.SCOPE:
            return self.by_itself(value)
        # A part of an operand of the loop for each iteration.
        counter = Fact.along(Axis(op, _length(op)))
        return _dependent(value, [counter, *map(self.of, op.inputs)])

    def stacked(self, fact: Fact, value: Value) -> Fact:
        return _dependent(value, [fact])

    def warp(self, name: Any) -> Fact:
        """Returns the fact of the index of the warp, which an axis may be named for."""
        self._warp_axis = name
        return Fact.along(Axis(WARP, _WARPS))

    def taken(self, op: Op, which: Fact) -> Sequence[int]:
        if which.constant is None:
            return range(len(op.regions))
        return [min(max(which.constant, 0), len(op.regions) - 1)]

    def in_every_iteration(self, op: Op, i: int, j: int) -> Fact | None:
        carry = op.regions[-1].inputs[i]
        if self._needed is not None and carry not in self._needed:
            return self.unknown(carry)
        step = growth(op.regions[-1], i, j)
        entry = op.entries[-1][i]
        if step is None or entry is None:
            return None
        counter = Fact.along(Axis(op, _length(op)))
        return fitted(self.of(entry).plus(counter.scaled(step)), op.results[j].aval)

    def after_loop(self, op: Op, value: Value, fact: Fact) -> Fact:
        """What held in iteration n holds after n iterations."""
        length = _length(op)
        if length is not None:
            return fitted(fact.at(op, length), value.aval)
        last = fact.depending_on({Axis(op), *self.conditions[-1].axes})
        return fitted(last.at(op, 0), value.aval)

    def results(self, op: Op, operands: Sequence[Fact]) -> Sequence[Fact]:
        if op.name == "axis_index":
            return [self._position(op.params["axis_name"])]
        ins = [x.aval if isinstance(x, Value) else x for x in op.inputs]
        found, reads = [], self._reads(op)
        for value in op.results:
            operation = rules.Operation(op.name, op.params, ins, value.aval)
            if reads:
                fact = rules.dependent(operation, operands).depending_on({ANYTHING})
            elif len(op.results) > 1:
                fact = rules.dependent(operation, operands)
            else:
                fact = rules.result(operation, operands)
            found.append(self.fitted(op, value, fact))
        return found

    def fitted(self, op: Op, value: Value, fact: Fact) -> Fact:
        """Returns what holds of a result that wraps if it does not fit its type."""
        return fitted(fact, value.aval)

    def _position(self, name: Any) -> Fact:
        if name in self._positions:
            return Fact.number(self._positions[name])
        if name is not None and name == self._warp_axis:
            return self.warp(name)
        size = self._axes.get(name)
        return Fact.number(0) if size == 1 else Fact.along(Axis(name, size))

    def _reads(self, op: Op) -> bool:
        """Whether an operation may return something else for the same operands."""
        if self.memory_is_constant:
            return False
        accesses = op.operation is not None and bool(op.operation.accesses)
        return accesses or bool(op.equation.effects)


class Starts:
    """What is known of where windows of a program's accesses start.

    Args:
      region: the program.
      axes: names and sizes of the axes of the grid.
    """

    def __init__(
        self,
        region: Region,
        axes: tuple[tuple[Any, int], ...],
        find: Callable[..., Facts] = all_facts_of,
    ):
        self._facts = functools.cache(lambda: find(region, axes))

    def of(self, access: Access) -> list[Fact]:
        """Returns the facts of the starts along all axes."""
        return list(map(self._facts().start, access.window.starts))


class Recorded(Facts):
    """Facts of values that hold whenever they are computed.

    A region may be run in several places, and a loop's is followed several times.

    Attributes:
      wrapping: the values that wrap at some position, with the operation that makes
        them and what they are before they wrap.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wrapping: dict[Value, tuple[Op, Fact]] = {}
        self._known: dict[Operand, Fact] = {}
        self._is_executed = True

    @classmethod
    def of_all(
        cls,
        region: Region,
        axes: tuple[tuple[Any, int], ...],
        needed: Set[Value] | None,
    ) -> Recorded:
        """Returns the facts of values that a program has."""
        found = cls(dict(axes), needed=needed)
        found.run(region, found.inputs_of(region))
        # Facts may be kept as long as the program, to which they do not refer.
        found.facts, found._followed = found._known, {}
        return found

    def _branches(self, op: Op, taken: Sequence[int]) -> list[Fact]:
        """Follows all regions: what is never executed is asked for as well."""
        outer, self._is_executed = self._is_executed, False
        for i in set(range(len(op.regions))).difference(taken):
            self.run(op.regions[i], self._inputs(op, i))
        self._is_executed = outer
        return super()._branches(op, taken)

    def found(self, values: Sequence[Value], facts: Sequence[Fact]) -> None:
        super().found(values, facts)
        for value, fact in zip(values, facts, strict=True):
            before = self._known.get(value)
            if before is None or before is fact:
                self._known[value] = fact
            elif before != fact:
                self._known[value] = before.or_else(fact)

    def fitted(self, op: Op, value: Value, fact: Fact) -> Fact:
        watched = op.name in indices.WRAPPING and is_integer(value) and fact.is_linear
        known = watched and self._is_executed and None not in fact.bounds
        if known and not fits(fact, value.aval):
            self.wrapping.setdefault(value, (op, fact))
        return super().fitted(op, value, fact)


def _dependent(value: Value, facts: Sequence[Fact]) -> Fact:
    op = rules.Operation("function", {}, (), value.aval)
    return fitted(rules.dependent(op, facts), value.aval)


def _length(op: Op) -> int | None:
    return op.params.get("length")


def growth(body: Region, carry: int, result: int) -> int | None:
    """Returns by how much a carry grows in every iteration, if that is a constant."""
    before, end = body.inputs[carry], body.results[result]
    if end is before:
        return 0
    made = next((op for op in reversed(body.ops) if end in op.results), None)
    if made is None or made.name not in ("add", "sub") or not is_integer(before):
        return None
    first, second = made.inputs
    if made.name == "add" and second is before:
        first, second = second, first
    step = second.value if isinstance(second, Constant) else None
    if first is not before or step is None or step.shape:
        return None
    return int(step) if made.name == "add" else -int(step)
