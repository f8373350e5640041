# SPDX-License-Identifier: Apache-2.0
"""What is known of a value before a kernel runs: along what it changes, and how.

A value is `sum(factor * position) + r`. The positions are those on axes of the grid, in
loops, along the axes of an array. Of `r` are known the axes on which it depends in some
other way, its remainder modulo a number, and its range.

Integers wrap: factors and remainders hold modulo 2**bits of the type, so of a divisor
only the power of two is certain; ranges hold as they are. Index arithmetic that is
known to wrap is an error of the trace.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from pallas_gpu import _jax
from pallas_gpu.layouts.edges import Edges


class Axis(NamedTuple):
    """What a value may change along.

    Attributes:
      of: the name of an axis of the grid, the number of an axis of an array, a loop, a
        value that is not followed further, such as a reference.
      size: how many positions it has, from 0; None if that is not known.
    """

    of: Any
    size: int | None = None

    @property
    def is_of_array(self) -> bool:
        return isinstance(self.of, int)

    def covers(self, of: Any) -> bool:
        """Whether a function of its positions may change along an axis."""
        return self.of == of or (self is ANYTHING and not isinstance(of, int))


# Memory, time, and what is unknown: it stands for all axes but those of arrays.
ANYTHING = Axis("anything")


class Fact(NamedTuple):
    """What is known of a value: it is `sum(factor * position) + r`.

    Attributes:
      terms: the axes with their factors, none of them 0.
      others: the axes on which r depends; no terms have these.
      rest, modulus: r is `rest` modulo this; a modulus of 0 means that r is `rest`.
      low, high: the range of r; None where it is not known.
      edges: of bools: where they change along axes of the array. They may change
        anywhere along others among `others`.
    """

    terms: tuple[tuple[Axis, int], ...] = ()
    others: frozenset[Axis] = frozenset()
    rest: int = 0
    modulus: int = 1
    low: int | None = None
    high: int | None = None
    edges: tuple[tuple[int, Edges], ...] = ()

    @classmethod
    def number(cls, n: int) -> Fact:
        """Returns the fact of a known integer."""
        return cls(rest=n, modulus=0, low=n, high=n)

    @classmethod
    def along(cls, axis: Axis) -> Fact:
        """Returns the fact of the position on an axis."""
        return cls(((axis, 1),), rest=0, modulus=0, low=0, high=0)

    # --- questions --------------------------------------------------------------------

    @property
    def constant(self) -> int | None:
        """The value, if it is a known integer."""
        return self.low if not self.terms and self.low == self.high else None

    @property
    def divisor(self) -> int:
        """A known divisor of the value; 0 if it is 0."""
        factors = (factor for _, factor in self.terms)
        return math.gcd(self.rest, self.modulus, *factors)

    @property
    def is_linear(self) -> bool:
        """Whether it is a number plus multiples of positions."""
        return self.modulus == 0 and not self.others

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """The least and the largest value; both occur if it is linear."""
        low, high = self.low, self.high
        for axis, factor in self.terms:
            end = None if axis.size is None else factor * (axis.size - 1)
            low = _sum(low, 0 if factor > 0 else end)
            high = _sum(high, end if factor > 0 else 0)
        return low, high

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes on which it depends."""
        return self.others.union(axis for axis, _ in self.terms)

    def depends_on(self, *axes: Any) -> bool:
        """Whether it may differ between positions on some axes, given by `Axis.of`."""
        return any(axis.covers(of) for axis in self.axes for of in axes)

    def factor(self, of: Any) -> int | None:
        """Returns by how much it grows along an axis; None if that is not known."""
        if any(axis.covers(of) for axis in self.others):
            return None
        return next((factor for axis, factor in self.terms if axis.of == of), 0)

    def at(self, of: Any, position: int) -> Fact:
        """Returns the fact of the value at a position of an axis."""
        factor = sum(factor for axis, factor in self.terms if axis.of == of)
        terms = tuple(term for term in self.terms if term[0].of != of)
        others = frozenset(axis for axis in self.others if axis.of != of)
        there = Fact(terms, others, *self[2:])
        return there.plus(Fact.number(factor * position)) if factor else there

    def changes(self, rank: int) -> tuple[Edges | None, ...]:
        """Returns where an array of bools changes along each axis; None: anywhere."""
        varying, known = {axis.of for axis in self.others}, dict(self.edges)
        return tuple(known.get(i) if i in varying else Edges() for i in range(rank))

    def depending_on(self, axes: Collection[Axis]) -> Fact:
        """Returns the same, of a value whose r may depend on more axes."""
        if self.others.issuperset(axes):
            return self
        fact, _, others = _aligned(self, Fact.number(0), axes)
        return Fact(fact.terms, canonical(others.union(axes)), *fact[2:])

    # --- arithmetic -------------------------------------------------------------------

    def without(self, axes: Collection[Axis]) -> Fact:
        """Counts terms to r, which then depends on their axes."""
        moved = {axis: f for axis, f in self.terms if axis in axes}
        if not moved:
            return self
        low, high = Fact(tuple(moved.items()), low=self.low, high=self.high).bounds
        return Fact(
            tuple(term for term in self.terms if term[0] not in moved),
            self.others.union(moved),
            *reduced(self.rest, math.gcd(self.modulus, *moved.values())),
            low,
            high,
        )

    def flat(self) -> Fact:
        """Counts all terms to r."""
        return self.without(self.axes)

    def plus(self, other: Fact, sign: int = 1) -> Fact:
        """Returns the sum, or the difference."""
        a, b, others = _aligned(self, other.scaled(sign))
        terms = dict(a.terms)
        for axis, factor in b.terms:
            terms[axis] = terms.get(axis, 0) + factor
        return Fact(
            tuple((axis, factor) for axis, factor in terms.items() if factor),
            others,
            *reduced(a.rest + b.rest, math.gcd(a.modulus, b.modulus)),
            _sum(a.low, b.low),
            _sum(a.high, b.high),
        )

    def scaled(self, factor: int) -> Fact:
        """Returns a multiple."""
        if factor in (0, 1):
            return self if factor else Fact.number(0)
        ends = [None if end is None else end * factor for end in (self.low, self.high)]
        return Fact(
            tuple((axis, f * factor) for axis, f in self.terms),
            self.others,
            *reduced(self.rest * factor, self.modulus * abs(factor)),
            *(ends if factor > 0 else reversed(ends)),
        )

    def times(self, other: Fact) -> Fact:
        """Returns the product."""
        for one, factor in ((self, other.constant), (other, self.constant)):
            if factor is not None:
                return one.scaled(factor)
        a, b = self.flat(), other.flat()
        cross = math.gcd(a.rest * b.modulus, b.rest * a.modulus, a.modulus * b.modulus)
        ends = [
            None if x is None or y is None else x * y
            for x in (a.low, a.high)
            for y in (b.low, b.high)
        ]
        known = [end for end in ends if end is not None]
        is_known = len(known) == len(ends)
        return Fact(
            (),
            canonical(a.others | b.others),
            *reduced(a.rest * b.rest, cross),
            min(known) if is_known else None,
            max(known) if is_known else None,
        )

    def or_else(self, other: Fact, choice: Collection[Axis] = ()) -> Fact:
        """Returns what holds of one or the other.

        Args:
          choice: the axes on which it depends which one it is.
        """
        if self == other and self.is_linear:
            return self
        differ = {axis for axis, _ in {*self.terms} ^ {*other.terms}}
        a, b, others = _aligned(self, other, differ.union(choice))
        return Fact(
            a.terms,
            canonical(others.union(choice)),
            *reduced(a.rest, math.gcd(a.modulus, b.modulus, a.rest - b.rest)),
            None if a.low is None or b.low is None else min(a.low, b.low),
            None if a.high is None or b.high is None else max(a.high, b.high),
            changes_of(a, b),
        )


def changes_of(*facts: Fact) -> tuple[tuple[int, Edges], ...]:
    """Returns where a monotonic function of bools may change, or one that is chosen."""
    axes = {axis.of for fact in facts for axis in fact.others if axis.is_of_array}
    found = []
    for i in sorted(axes):
        each = [fact.changes(i + 1)[i] for fact in facts]
        if None not in each:
            found.append((i, functools.reduce(Edges.union, each)))
    return tuple(found)


def _aligned(
    a: Fact, b: Fact, axes: Collection[Axis] = ()
) -> tuple[Fact, Fact, frozenset[Axis]]:
    """Returns facts without terms along axes on which the other's r depends."""
    others = a.others.union(b.others, axes)
    if not others:
        return a, b, others
    if ANYTHING in others:
        terms = (axis for axis, _ in (*a.terms, *b.terms) if not axis.is_of_array)
        others = others.union(terms)
    a, b = a.without(others), b.without(others)
    return a, b, canonical(a.others | b.others)


def canonical(axes: Iterable[Axis]) -> frozenset[Axis]:
    """Returns axes without those that `ANYTHING` stands for."""
    axes = frozenset(axes)
    if ANYTHING not in axes:
        return axes
    return frozenset(a for a in axes if a.is_of_array or a is ANYTHING)


def reduced(rest: int, modulus: int) -> tuple[int, int]:
    """Returns a remainder in its range, and the modulus."""
    return (rest % modulus if modulus else rest), modulus


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


# --- values of a type -----------------------------------------------------------------


def axes_of(aval: Any) -> list[Axis]:
    """Returns the axes of an array along which its elements may differ."""
    return [Axis(i, n) for i, n in enumerate(getattr(aval, "shape", ())) if n != 1]


def unknown(aval: Any) -> Fact:
    """Returns what holds of any value of a type."""
    return fitted(Fact(others=frozenset({ANYTHING, *axes_of(aval)})), aval)


def literal(value: Any) -> Fact:
    """Returns the fact of a constant."""
    array = np.asarray(value)
    if array.shape or array.dtype.kind not in "iub":
        return fitted(Fact(others=frozenset(axes_of(array))), array)
    return Fact.number(int(array))


def is_integer(aval: Any) -> bool:
    """Whether a type is that of integers, or of arrays of them."""
    return kind(aval) in ("i", "u")


def kind(aval: Any) -> str | None:
    """Returns NumPy's letter for the elements of a type; None for references."""
    if isinstance(aval, _jax.AbstractRef):
        return None
    return getattr(getattr(aval, "dtype", None), "kind", None)


def limits(aval: Any) -> tuple[int, int]:
    """Returns the least and the largest integer of a type."""
    return _limits(aval.dtype)


@functools.cache
def _limits(dtype: Any) -> tuple[int, int]:
    bits, signed = 8 * dtype.itemsize, dtype.kind == "i"
    least = -(1 << (bits - 1)) if signed else 0
    return least, least + (1 << bits) - 1


def fits(fact: Fact, aval: Any) -> bool:
    """Whether a fact says that an integer is in the range of its type."""
    (low, high), (least, most) = fact.bounds, limits(aval)
    return low is not None and high is not None and least <= low and high <= most


def fitted(fact: Fact, aval: Any) -> Fact:
    """Returns what holds of a result that wraps if it does not fit its type."""
    elements = kind(aval)
    if elements == "b" and None in (fact.low, fact.high):
        return fact._replace(low=fact.low or 0, high=1)
    if elements not in ("i", "u") or fits(fact, aval):
        return fact
    (least, most), bits = limits(aval), 8 * aval.dtype.itemsize
    number = fact.constant
    if number is not None:
        return Fact.number((number - least) % (1 << bits) + least)
    if bits < 32:
        # It is used as an index after a conversion, which makes no difference of this.
        fact = fact.flat()
        modulus = math.gcd(fact.modulus, 1 << bits)
        fact = fact._replace(rest=fact.rest % modulus, modulus=modulus)
        return fact._replace(low=least, high=most)
    low = 0 if least == 0 and not fact.terms else None
    if fact.low == low and fact.high is None:
        return fact
    return fact._replace(low=low, high=None)
