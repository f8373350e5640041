# SPDX-License-Identifier: Apache-2.0
"""What is known of the result of an operation, from what is known of its operands."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_gpu.layouts.edges import Edges
from pallas_gpu.primitives.indices.facts import (
    Axis,
    Fact,
    axes_of,
    canonical,
    changes_of,
    is_integer,
    kind,
    reduced,
)


class Operation(NamedTuple):
    """An operation: its primitive's name, parameters, types of operands and result."""

    name: str
    params: Mapping[str, Any]
    ins: Sequence[Any]
    out: Any


Rule = Callable[..., Fact | None]


def result(op: Operation, facts: Sequence[Fact]) -> Fact:
    """Returns the fact of an operation's result, before it may wrap: see `fitted`."""
    rule = _RULES.get(op.name)
    if rule is None and is_integer(op.out) and all(map(is_integer, op.ins)):
        rule = _OF_INTEGERS.get(op.name)
    if rule is None and kind(op.out) == "b":
        rule = _OF_BOOLS.get(op.name)
    found = None if rule is None else rule(op, *facts)
    return dependent(op, facts) if found is None else found


def dependent(op: Operation, facts: Sequence[Fact]) -> Fact:
    """Returns the fact of a function of operands, of which no more is known."""
    axes = frozenset[Axis]().union(*(fact.axes for fact in facts))
    if op.name not in _ELEMENTWISE:
        axes = frozenset(axis for axis in axes if not axis.is_of_array)
        axes = axes.union(axes_of(op.out))
    return Fact(others=canonical(axes))


def _function(*facts: Fact, **known: Any) -> Fact:
    """The fact of a function of elements."""
    axes = frozenset[Axis]().union(*(fact.axes for fact in facts))
    return Fact(others=canonical(axes), **known)


def _remainder(op: Operation, a: Fact, b: Fact) -> Fact:
    n, (low, high) = b.constant, a.bounds
    if not n:
        return _function(a, b, rest=0, modulus=math.gcd(a.divisor, b.divisor))
    n = abs(n)
    if low is not None and high is not None and -n < low and high < n:
        return a
    flat = a.flat()
    rest, modulus = reduced(flat.rest, math.gcd(flat.modulus, n))
    signed = 0 if low is not None and low >= 0 else 1 - n
    if modulus == n and signed == 0 and _is_certain(n):
        return Fact.number(rest)
    return _function(a, rest=rest, modulus=modulus, low=signed, high=n - 1)


def _quotient(op: Operation, a: Fact, b: Fact) -> Fact | None:
    """A quotient that is truncated."""
    n, (low, high) = b.constant, a.bounds
    if n is None or n <= 0 or low is None or high is None:
        return None
    if a.divisor % n or not (a.modulus == 0 or _is_certain(n)):
        return _function(a, b, low=_truncated(low, n), high=_truncated(high, n))
    assert a.low is not None and a.high is not None
    return a._replace(
        terms=tuple((axis, factor // n) for axis, factor in a.terms),
        rest=a.rest // n,
        modulus=a.modulus // n,
        low=-(-a.low // n),
        high=a.high // n,
    )


def _is_certain(divisor: int) -> bool:
    """Whether it divides also what has wrapped."""
    return divisor & (divisor - 1) == 0


def _truncated(a: int, b: int) -> int:
    return a // b if a >= 0 else -(-a // b)


def _largest(op: Operation, a: Fact, b: Fact) -> Fact:
    (low, high), (other_low, other_high) = a.bounds, b.bounds
    if low is not None and other_high is not None and low >= other_high:
        return a
    if other_low is not None and high is not None and other_low >= high:
        return b
    either = a.flat().or_else(b.flat(), a.axes | b.axes)
    lows = [end for end in (low, other_low) if end is not None]
    return either._replace(low=max(lows, default=None))


def _least(op: Operation, a: Fact, b: Fact) -> Fact:
    return _largest(op, a.scaled(-1), b.scaled(-1)).scaled(-1)


def _clamped(op: Operation, low: Fact, a: Fact, high: Fact) -> Fact:
    return _least(op, _largest(op, low, a), high)


def _shifted_left(op: Operation, a: Fact, b: Fact) -> Fact | None:
    places = b.constant
    if places is None or not 0 <= places < 31:
        return None
    return a.scaled(1 << places)


def _masked(op: Operation, a: Fact, b: Fact) -> Fact | None:
    mask, a = (b.constant, a) if a.constant is None else (a.constant, b)
    if mask is None:
        return None
    flat, ends = a.flat(), {"low": 0, "high": mask} if mask >= 0 else {}
    if mask >= 0 and mask & (mask + 1) == 0:  # the remainder of a division
        rest, modulus = reduced(flat.rest, math.gcd(flat.modulus, mask + 1))
        if modulus == mask + 1:
            return Fact.number(rest)
        return _function(a, rest=rest, modulus=modulus, **ends)
    power = max(mask & -mask, flat.divisor & -flat.divisor)
    return _function(a, rest=0, modulus=power, **ends)


def _selected(op: Operation, which: Fact, *cases: Fact) -> Fact:
    chosen = which.constant
    if chosen is not None:
        return cases[chosen]
    found = functools.reduce(lambda a, b: a.or_else(b, which.axes), cases)
    edges = changes_of(_unsigned(which), *cases) if kind(op.out) == "b" else ()
    return found._replace(edges=edges)


def _unsigned(fact: Fact) -> Fact:
    edges = tuple((i, e.unsigned()) for i, e in fact.edges)
    return fact._replace(edges=edges)


def _promised(op: Operation, a: Fact) -> Fact:
    divisor = op.params["divisor"]
    if a.divisor % divisor == 0:
        return a
    flat = a.flat()
    modulus = math.lcm(divisor, flat.divisor)
    return flat._replace(rest=0, modulus=modulus)


def _iota(op: Operation) -> Fact | None:
    axis = Axis(op.params["dimension"], op.out.shape[op.params["dimension"]])
    if not is_integer(op.out):
        return None
    return Fact.number(0) if axis.size == 1 else Fact.along(axis)


def _converted(op: Operation, a: Fact) -> Fact | None:
    source, target = kind(op.ins[0]), kind(op.out)
    if source == "b" and target in ("i", "u"):
        return a._replace(edges=())
    if target == "b" and source in ("i", "u"):
        return _compared(op, a, Fact.number(0), "ne")
    return a if source in ("b", "i", "u") and target in ("b", "i", "u") else None


# --- bools ----------------------------------------------------------------------------


def _comparison(op: Operation, a: Fact, b: Fact) -> Fact | None:
    return _compared(op, a, b, op.name) if all(map(is_integer, op.ins)) else None


def _compared(op: Operation, a: Fact, b: Fact, name: str) -> Fact:
    """Where the result of a comparison of integers changes."""
    known = _answer(name, *a.plus(b, -1).bounds)
    if known is not None:
        return Fact.number(known)
    found = [(axis.of, _change(name, axis, a, b)) for axis in axes_of(op.out)]
    edges = tuple((i, e) for i, e in found if e is not None)
    return _function(a, b, edges=edges)


def _answer(name: str, low: int | None, high: int | None) -> bool | None:
    """The answer to a comparison with 0, if the range determines it."""
    if low is None or high is None:
        return None
    found = {_COMPARISONS[name](x, 0) for x in (low, min(max(low, 0), high), high)}
    return found.pop() if len(found) == 1 else None


def _change(name: str, axis: Axis, a: Fact, b: Fact) -> Edges | None:
    """Where a comparison changes along an axis of the array; None: anywhere."""
    s, t = (fact.factor(axis.of) for fact in (a, b))
    if axis in a.others or axis in b.others or name in ("eq", "ne"):
        return None
    difference, operand = _along(a.plus(b, -1), axis), _along(a if s else b, axis)
    step, own = difference.factor(axis.of), operand.factor(axis.of)
    if 0 not in (s, t) or own not in (1, -1):
        return None
    assert step is not None
    strict = (name in ("lt", "ge")) == (step == 1)
    change = -step * (difference.rest - (0 if strict else step))
    falls = (name in ("lt", "le")) == (step == 1)
    edges = Edges.at(change, difference.modulus, falls)
    if None in operand.bounds:
        # From where it wraps the operand is at the other end of its range.
        wrap = -own * operand.rest + (own == -1)
        edges = edges.union(Edges.at(wrap, operand.modulus, not falls))
    return edges


def _along(fact: Fact, axis: Axis) -> Fact:
    return fact.without(fact.axes - {axis})


def _logical(op: Operation, a: Fact, b: Fact) -> Fact:
    if a.constant is None:
        a, b = b, a
    if op.name == "xor":
        if a.constant is not None:
            return _inverted(op, b) if a.constant else b
        return _function(a, b, edges=changes_of(_unsigned(a), _unsigned(b)))
    if a.constant is not None:
        return a if a.constant == (op.name == "or") else b
    return _function(a, b, edges=changes_of(a, b))


def _inverted(op: Operation, a: Fact) -> Fact:
    if a.constant is not None:
        return Fact.number(1 - a.constant)
    edges = tuple((i, e.inverted()) for i, e in a.edges)
    return a._replace(rest=0, modulus=1, edges=edges)


# --- moves ----------------------------------------------------------------------------


def _moved(fact: Fact, places: Mapping[int, int]) -> Fact:
    """The fact of an array whose axes are these ones of the operand."""

    def new(axis: Axis) -> Axis:
        return Axis(places[axis.of], axis.size) if axis.is_of_array else axis

    return fact._replace(
        terms=tuple((new(axis), factor) for axis, factor in fact.terms),
        others=frozenset(map(new, fact.others)),
        edges=tuple((places[i], e) for i, e in fact.edges),
    )


def _broadcast(op: Operation, fact: Fact, *sizes: Fact) -> Fact:
    return _moved(fact, dict(enumerate(op.params["broadcast_dimensions"])))


def _reshaped(op: Operation, fact: Fact, *sizes: Fact) -> Fact | None:
    """Axes of one element may come and go."""
    before, after = op.ins[0].shape, op.out.shape
    old = [i for i, n in enumerate(before) if n != 1]
    new = [i for i, n in enumerate(after) if n != 1]
    if [before[i] for i in old] != [after[i] for i in new]:
        return None
    return _moved(fact, dict(zip(old, new, strict=True)))


def _transposed(op: Operation, fact: Fact) -> Fact:
    return _moved(fact, {old: new for new, old in enumerate(op.params["permutation"])})


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
_RULES: dict[str, Rule] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "expand_dims": _reshaped,
    "transpose": _transposed,
    "copy": lambda op, fact: fact,
    "multiple_of": _promised,
    "select_n": _selected,
    "convert_element_type": _converted,
    **dict.fromkeys(_COMPARISONS, _comparison),
}
_OF_INTEGERS: dict[str, Rule] = {
    "add": lambda op, a, b: a.plus(b),
    "sub": lambda op, a, b: a.plus(b, -1),
    "mul": lambda op, a, b: a.times(b),
    "neg": lambda op, a: a.scaled(-1),
    "square": lambda op, a: a.times(a),
    "rem": _remainder,
    "div": _quotient,
    "max": _largest,
    "min": _least,
    "clamp": _clamped,
    "shift_left": _shifted_left,
    "and": _masked,
    "not": lambda op, a: Fact.number(-1).plus(a, -1),
}
_OF_BOOLS: dict[str, Rule] = {
    **dict.fromkeys(("and", "or", "xor"), _logical),
    "not": _inverted,
}
# Functions of elements, which do not differ along axes on which no operand does.
_ELEMENTWISE = frozenset(
    {
        *_COMPARISONS, *_OF_INTEGERS, "or", "xor", "sign", "abs", "floor", "ceil",
        "round", "exp", "log", "sqrt", "rsqrt", "is_finite", "pow", "integer_pow",
        "shift_right_arithmetic", "shift_right_logical",
        "select_n", "convert_element_type", "copy",
    }
)  # fmt: skip
