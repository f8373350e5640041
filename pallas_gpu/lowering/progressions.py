# SPDX-License-Identifier: Apache-2.0
"""What is known of arrays: arithmetic progressions, and where bools change.

Integers of 32 and 64 bits wrap, so statements about divisors hold for their powers of
two alone; who uses a divisor takes no other part of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax
from pallas_gpu.layouts.edges import Edges


@dataclasses.dataclass(frozen=True)
class Progression:
    """An array whose elements are `f + sum(stride * index)`.

    `f` is the same along the axes that have a stride; along the others, and between
    executions, it is any number that is `rest` modulo `modulus`.

    Attributes:
      strides: the stride along each axis, 0 for equal elements; None if unknown.
      rest, modulus: of f; a modulus of 0 means that f is `rest`.
    """

    strides: tuple[int | None, ...]
    rest: int = 0
    modulus: int = 1

    @property
    def divisor(self) -> int:
        """A divisor of f, 0 if it is 0."""
        return math.gcd(self.rest, self.modulus)

    @property
    def known(self) -> int | None:
        """The value of all elements, if it is known."""
        same = self.modulus == 0 and not any(s != 0 for s in self.strides)
        return self.rest if same else None

    def without(self, axes: Sequence[int]) -> Progression:
        """Forgets the strides along axes: f varies along these."""
        strides, modulus = list(self.strides), self.modulus
        for axis in axes:
            modulus = math.gcd(modulus, strides[axis] or 0)
            strides[axis] = None
        return Progression(tuple(strides), self.rest, modulus)

    def flat(self) -> Progression:
        """Forgets all strides but those of equal elements."""
        return self.without([i for i, s in enumerate(self.strides) if s != 0])

    def plus(self, other: Progression, sign: int = 1) -> Progression:
        """The sum, or the difference."""
        unknown = [
            i
            for i, pair in enumerate(zip(self.strides, other.strides, strict=True))
            if None in pair
        ]
        a, b = self.without(unknown), other.without(unknown)
        strides = tuple(
            None if s is None or t is None else s + sign * t
            for s, t in zip(a.strides, b.strides, strict=True)
        )
        return Progression(
            strides, a.rest + sign * b.rest, math.gcd(a.modulus, b.modulus)
        )

    def scaled(self, factor: int) -> Progression:
        """A multiple."""
        strides = tuple(None if s is None else s * factor for s in self.strides)
        return Progression(strides, self.rest * factor, self.modulus * factor)

    def times(self, other: Progression) -> Progression:
        """The product."""
        for one, factor in ((self, other.known), (other, self.known)):
            if factor is not None:
                return one.scaled(factor)
        a, b = self.flat(), other.flat()
        strides = _common(a.strides, b.strides)
        cross = math.gcd(a.rest * b.modulus, b.rest * a.modulus, a.modulus * b.modulus)
        return Progression(strides, a.rest * b.rest, cross)

    def or_else(self, other: Progression) -> Progression:
        """What holds for one or the other, chosen for the whole array."""
        pairs = zip(self.strides, other.strides, strict=True)
        differ = [i for i, (s, t) in enumerate(pairs) if s != t]
        a, b = self.without(differ), other.without(differ)
        modulus = math.gcd(a.modulus, b.modulus, a.rest - b.rest)
        return Progression(a.strides, a.rest, modulus)


# For each axis: where bools change along it; None: anywhere.
Changes = tuple[Edges | None, ...]
Fact = Progression | Changes
_NEVER = Edges()


def _common(*strides: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Strides of a function of arrays: known where none of them varies."""
    return tuple(
        0 if all(s == 0 for s in axis) else None for axis in zip(*strides, strict=True)
    )


def unknown(aval: Any) -> Fact:
    """What is known of any value of a type: all, of axes of one element."""
    if aval.dtype == jnp.bool_:
        return tuple(_NEVER if n == 1 else None for n in aval.shape)
    return Progression(tuple(0 if n == 1 else None for n in aval.shape))


def join(a: Fact | None, b: Fact | None) -> Fact | None:
    """What holds for one or the other."""
    match a, b:
        case Progression(), Progression():
            return a.or_else(b)
        case tuple(), tuple():
            return _union(a, b)
    return None


def _union(*facts: Changes) -> Changes:
    """Where a monotonic function of bools may change, or one that is chosen."""
    return tuple(functools.reduce(union, axis) for axis in zip(*facts, strict=True))


def union(a: Edges | None, b: Edges | None) -> Edges | None:
    """The changes of both; None: anywhere."""
    return None if a is None or b is None else a.union(b)


def literal(value: Any) -> Fact | None:
    """What is known of a constant."""
    array = np.asarray(value)
    if array.shape or array.dtype.kind not in "iu":
        return unknown(array)
    return Progression((), int(array), 0)


# --- operations -----------------------------------------------------------------------

Rule = Callable[..., Fact | None]


def _is_integer(aval: Any) -> bool:
    return aval.dtype.kind in "iu" and aval.dtype.itemsize >= 4


def result(eqn: _jax.JaxprEqn, facts: Sequence[Fact | None]) -> Fact | None:
    """What is known of the result of an equation that runs no jaxpr, if it has one."""
    if len(eqn.outvars) != 1:
        return None
    aval, name = eqn.outvars[0].aval, eqn.primitive.name
    if name == "iota":
        strides = [0] * len(aval.shape)
        strides[eqn.params["dimension"]] = 1
        fact = _of_shape(Progression(tuple(strides), 0, 0), aval.shape)
        return fact if _is_integer(aval) else unknown(aval)
    if any(fact is None for fact in facts):
        return unknown(aval)
    if name in _MOVES:
        moved = _MOVES[name](eqn, *facts)
        return unknown(aval) if moved is None else _of_shape(moved, aval.shape)
    spread = [_spread(fact, len(aval.shape)) for fact in facts]
    if not spread or any(fact is None for fact in spread):
        return unknown(aval)
    found: Fact | None = None
    if name in _COMPARISONS and all(_is_integer(v.aval) for v in eqn.invars):
        found = _compared(name, aval.shape, *spread)
    elif name in _ARITHMETIC and _is_integer(aval) and _are_progressions(spread):
        found = _ARITHMETIC[name](eqn, *spread)
    elif name in _LOGIC and aval.dtype == jnp.bool_:
        found = _LOGIC[name](*spread)
    elif name == "select_n":
        found = _selected(*spread)
    if found is None and name in (*_ELEMENTWISE, *_COMPARISONS, *_ARITHMETIC):
        found = _any_function(aval, spread)
    return unknown(aval) if found is None else _of_shape(found, aval.shape)


def _are_progressions(facts: Sequence[Any]) -> bool:
    return all(isinstance(fact, Progression) for fact in facts)


def _spread(fact: Any, rank: int) -> Fact | None:
    """A scalar as an operand beside arrays; None for another rank."""
    given = len(fact.strides) if isinstance(fact, Progression) else len(fact)
    if given == rank:
        return fact
    if given:
        return None
    if isinstance(fact, Progression):
        return dataclasses.replace(fact, strides=(0,) * rank)
    return (_NEVER,) * rank


def _of_shape(fact: Any, shape: Sequence[int]) -> Fact:
    """Along an axis of one element everything is known."""
    if isinstance(fact, Progression):
        # The only element of such an axis is f itself.
        one = [0 if n == 1 else s for n, s in zip(shape, fact.strides, strict=True)]
        return dataclasses.replace(fact, strides=tuple(one))
    return tuple(_NEVER if n == 1 else e for n, e in zip(shape, fact, strict=True))


def _entries(fact: Any) -> tuple[Any, ...]:
    return fact.strides if isinstance(fact, Progression) else fact


def _any_function(aval: Any, facts: Sequence[Any]) -> Fact:
    """A function of elements is the same where its operands are."""
    equal = [
        all(entry in (0, _NEVER) for entry in axis)
        for axis in zip(*map(_entries, facts), strict=True)
    ]
    if aval.dtype == jnp.bool_:
        return tuple(_NEVER if e else None for e in equal)
    return Progression(tuple(0 if e else None for e in equal))


def _selected(which: Any, *cases: Any) -> Fact | None:
    if not isinstance(which, tuple):
        return None
    if isinstance(cases[0], tuple):
        return _union(_unsigned(which), *cases)
    varies = [i for i, edges in enumerate(which) if edges != _NEVER]
    first, *rest = (case.without(varies) for case in cases)
    return functools.reduce(Progression.or_else, rest, first)


def _unsigned(fact: Changes) -> Changes:
    return tuple(edges and edges.unsigned() for edges in fact)


_LOGIC: dict[str, Callable[..., Changes]] = {
    "and": _union,
    "or": _union,
    "xor": lambda a, b: _unsigned(_union(a, b)),
    "not": lambda a: tuple(edges and edges.inverted() for edges in a),
}


def _compared(name: str, shape: Sequence[int], a: Any, b: Any) -> Changes | None:
    """Where the result of a comparison of integers changes."""
    if not isinstance(a, Progression) or not isinstance(b, Progression):
        return None
    changes: list[Edges | None] = []
    for axis, (s, t) in enumerate(zip(a.strides, b.strides, strict=True)):
        if s == t == 0:
            changes.append(_NEVER)
            continue
        difference, operand = _along(a.plus(b, -1), axis), _along(a if s else b, axis)
        step, own = difference.strides[axis], operand.strides[axis]
        if 0 not in (s, t) or own not in (1, -1) or name in ("eq", "ne"):
            changes.append(None)
            continue
        assert step is not None
        strict = (name in ("lt", "ge")) == (step == 1)
        change = -step * (difference.rest - (0 if strict else step))
        falls = (name in ("lt", "le")) == (step == 1)
        edges = Edges.at(change, difference.modulus, falls)
        if _may_wrap(operand, own, shape[axis]):
            # From there on the operand is at the other end of its range.
            wrap = -own * operand.rest + (own == -1)
            edges = edges.union(Edges.at(wrap, operand.modulus, not falls))
        changes.append(edges)
    return tuple(changes)


def _may_wrap(operand: Progression, step: int, count: int) -> bool:
    """Whether a progression along an axis may leave the range of its integers."""
    ends = operand.rest, operand.rest + step * (count - 1)
    return operand.modulus != 0 or min(ends) < 0 or max(ends) >= 1 << 31


def _along(fact: Progression, axis: int) -> Progression:
    return fact.without([i for i in range(len(fact.strides)) if i != axis])


def _remainder(eqn: _jax.JaxprEqn, a: Progression, b: Progression) -> Progression:
    a, divisor = a.flat(), b.known
    strides = _common(a.strides, b.strides)
    if not divisor:
        return Progression(strides)
    return Progression(strides, a.rest, math.gcd(a.modulus, divisor))


def _extremum(eqn: _jax.JaxprEqn, a: Progression, b: Progression) -> Progression:
    return a.flat().or_else(b.flat())


def _shifted(eqn: _jax.JaxprEqn, a: Progression, b: Progression) -> Fact | None:
    places = b.known
    if places is None or not 0 <= places < 31:
        return None
    return a.scaled(1 << places)


def _negated(eqn: _jax.JaxprEqn, a: Progression) -> Progression:
    return a.scaled(-1)


def _converted(eqn: _jax.JaxprEqn, a: Progression) -> Fact | None:
    return a if _is_integer(eqn.invars[0].aval) else None


# Rules of integers; other operations of these names are functions of their elements.
_ARITHMETIC: dict[str, Rule] = {
    "add": lambda eqn, a, b: a.plus(b),
    "sub": lambda eqn, a, b: a.plus(b, -1),
    "mul": lambda eqn, a, b: a.times(b),
    "neg": _negated,
    "rem": _remainder,
    "max": _extremum,
    "min": _extremum,
    "shift_left": _shifted,
    "convert_element_type": _converted,
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_ELEMENTWISE = (
    *("div", "and", "or", "xor", "not", "sign", "abs", "clamp", "square"),
    *("floor", "ceil", "round", "exp", "log", "sqrt", "rsqrt", "is_finite"),
    *("pow", "integer_pow", "shift_right_logical", "shift_right_arithmetic"),
)


def _rearranged(fact: Any, axes: Sequence[int | None]) -> Fact:
    """The fact of an array with these axes of the operand; None: equal elements."""
    entries = _entries(fact)
    equal: Any = 0 if isinstance(fact, Progression) else _NEVER
    chosen: Any = tuple(equal if axis is None else entries[axis] for axis in axes)
    if isinstance(fact, Progression):
        return dataclasses.replace(fact, strides=chosen)
    return chosen


def _broadcast(eqn: _jax.JaxprEqn, fact: Any, *sizes: Any) -> Fact:
    places = eqn.params["broadcast_dimensions"]
    rank = len(eqn.outvars[0].aval.shape)
    found = [places.index(i) if i in places else None for i in range(rank)]
    return _rearranged(fact, found)


def _reshaped(eqn: _jax.JaxprEqn, fact: Any, *sizes: Any) -> Fact | None:
    """Axes of one element may come and go."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    kept = [i for i, n in enumerate(before) if n != 1]
    if [before[i] for i in kept] != [n for n in after if n != 1]:
        return None
    axes = iter(kept)
    return _rearranged(fact, [None if n == 1 else next(axes) for n in after])


def _transposed(eqn: _jax.JaxprEqn, fact: Any) -> Fact:
    return _rearranged(fact, eqn.params["permutation"])


def _promised(eqn: _jax.JaxprEqn, fact: Any) -> Fact:
    divisor = eqn.params["divisor"]
    return fact if fact.divisor % divisor == 0 else Progression((), 0, divisor)


_MOVES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "expand_dims": _reshaped,
    "transpose": _transposed,
    "copy": lambda eqn, fact: fact,
    "multiple_of": _promised,
}
