# SPDX-License-Identifier: Apache-2.0
"""What is known of integers and bools holds for the values that JAX computes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gpu.layouts.edges import Edges
from pallas_gpu.primitives.indices.facts import Axis, Fact
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts, all_facts_of

I32_MIN, I32_MAX = -(2**31), 2**31 - 1
SCALARS = (0, 1, 3, 8, 130, -5, I32_MAX // 128, I32_MAX, I32_MIN)


def known(f, *scalars):
    """Returns the facts of a function's results, and the function."""
    with jax.enable_x64(False):
        closed = jax.make_jaxpr(f)(*(np.int32(s) for s in scalars))
    region, facts = region_of(closed), Facts()
    return facts.run(region, facts.inputs_of(region))


def strides(fact, rank):
    return tuple(fact.factor(axis) for axis in range(rank))


def of_rest(fact):
    """The fact without what is said of the axes of the array."""
    return fact.without(fact.axes - {a for a in fact.axes if a.is_of_array})


def holds(fact, value):
    """Whether a fact is true of a value, modulo a power of two."""
    value = np.asarray(value)
    low, high = fact.bounds
    if value.min() < (value.min() if low is None else low):
        return False
    if value.max() > (value.max() if high is None else high):
        return False
    if value.dtype == bool:
        return all(map(changes_there, fact.changes(value.ndim), moved(value)))
    rest, fact = value.astype(np.int64), of_rest(fact)
    factors = strides(fact, value.ndim)
    for axis, stride in enumerate(factors):
        line = np.arange(value.shape[axis]).reshape(
            [-1 if i == axis else 1 for i in range(value.ndim)]
        )
        rest = rest - (stride or 0) * line
    for axis, stride in enumerate(factors):
        first = rest.take([0], axis)
        if stride is not None and ((rest - first) % 2**32).any():
            return False
    power = 2**32 if fact.modulus == 0 else fact.modulus & -fact.modulus
    return not ((rest - fact.rest) % power).any()


def moved(value):
    """A bool array with each of its axes as the first one."""
    return [np.moveaxis(value, axis, 0) for axis in range(value.ndim)]


def changes_there(edges, value):
    steps = np.diff(value.astype(np.int8), axis=0)
    return edges is None or all(
        places >> (i + 1) % 16 & 1
        for step, places in zip((1, -1), edges, strict=True)
        for i in np.nonzero(steps == step)[0]
    )


def line(n=64):
    return jnp.arange(n)


def edges(rises, falls):
    return Edges(sum(1 << i for i in rises), sum(1 << i for i in falls))


# name: (function, what is known of it: strides and divisor, or where a mask changes)
FUNCTIONS = {
    "offsets": (lambda i, n: i * 128 + line(), ((1,), 128)),
    "2d": (
        lambda i, n: (i * 64 + line(8))[:, None] * 32 + line(32)[None],
        ((32, 1), 2048),
    ),
    "down": (lambda i, n: n - 1 - line(), ((-1,), 1)),
    "twice": (lambda i, n: line() * 2 + i, None),
    "halves": (lambda i, n: line() // 2, ((None,), 1)),
    "remainder": (lambda i, n: lax.rem(i * 32, jnp.int32(24)) + line(), ((1,), 8)),
    "unsigned": (lambda i, n: line().astype(jnp.uint32) - 4, None),
    "narrow": (lambda i, n: (line(200).astype(jnp.int8) + 1).astype(jnp.int32), None),
    "product": (lambda i, n: (i * 8) * (n * 16) + line(), ((1,), 128)),
    "clipped": (lambda i, n: jnp.clip(i * 8 + line(), 0, 40), None),
    "extremum": (lambda i, n: jnp.minimum(i * 16, 24) + line(), ((1,), 8)),
    "chosen": (lambda i, n: jnp.where(i > 3, i * 16, 8) + line(), ((1,), 8)),
    "mixed": (lambda i, n: jnp.where(line() < 30, line(), line() + 8), None),
    "shifted": (lambda i, n: (i << 4) + (line() << 1), None),
    "wrapped": (lambda i, n: line() * (2**30) * 4 + line(), None),
    "transposed": (
        lambda i, n: (line(4)[:, None] * 16 + line(16) + i * 8).T,
        ((1, 16), 8),
    ),
    "counted": (
        lambda i, n: lax.fori_loop(0, 5, lambda j, x: x + 32, line() + i * 8),
        ((1,), 8),
    ),
    "until": (
        lambda i, n: lax.while_loop(
            lambda s: s[0] < 70,
            lambda s: (s[0] + 24, s[1] + 12),
            (jnp.int32(0), line()),
        )[1],
        ((1,), 12),
    ),
    "branches": (
        lambda i, n: lax.cond(i > 2, lambda: line() + 32, lambda: line() + i * 4),
        ((1,), 4),
    ),
    "mask": (lambda i, n: i * 128 + line() < n * 8, (edges([0], [0, 8]),)),
    "mask of a constant": (lambda i, n: i * 64 + line() < 1000, (edges([0], [8]),)),
    "to the end": (lambda i, n: i * 64 + line() <= 1023, (edges([0], [0]),)),
    "from": (lambda i, n: line() >= 24, (edges([8], []),)),
    "above": (lambda i, n: line() > 23, (edges([8], []),)),
    "odd": (lambda i, n: i * 64 + line() < 1001, (edges([0], [9]),)),
    "down to": (lambda i, n: 63 - line() > 31, (edges([], [0]),)),
    "not above": (lambda i, n: 63 - line() <= 31, (edges([0], []),)),
    "both": (
        lambda i, n: (line(16) + i * 16 < 100)[:, None] & (line(32) < 24)[None],
        (edges([0], [4]), edges([], [8])),
    ),
    "inside": (
        lambda i, n: (line() >= 3) & ~(line() + 5 > 46),
        (edges([3], [10]),),
    ),
    "exclusive": (
        lambda i, n: (line() < 3) ^ (line() < 21),
        (edges([3, 5], [3, 5]),),
    ),
    "chosen mask": (
        lambda i, n: jnp.where(n > 5, line() < 3, line() >= i * 16 + 7),
        (edges([7], [3]),),
    ),
    "chosen by element": (
        lambda i, n: jnp.where(line() < 6, line() < 3, line() > 8),
        (edges([6, 9], [3, 6]),),
    ),
    "negated": (lambda i, n: ~(line() < 40) | (line() == 3), (None,)),
    "unsigned mask": (
        lambda i, n: line().astype(jnp.uint32) - 4 < 100,
        (edges([4], [8]),),
    ),
    "two lines": (lambda i, n: line() * 2 < line() + 9, None),
    "two lines of values": (lambda i, n: line() + i < line() * 2 + n, (None,)),
    "quotient of a remainder": (lambda i, n: (i & 127) // 4 * 8, ((), 8)),
    "quotient without remainder": (lambda i, n: lax.div((i & 7) * 32, 8), ((), 4)),
    "quotient of a wrapped product": (lambda i, n: lax.div(i * 24, 3), ((), 1)),
    "remainder of a wrapped product": (
        lambda i, n: lax.rem(lax.rem(i * 24, 72) + 72, 24),
        None,
    ),
    "remainder in range": (lambda i, n: lax.rem((i & 7) * 4, 32), ((), 4)),
    "mask of bits": (lambda i, n: (i * 4) & -16, ((), 16)),
    "low bits": (lambda i, n: (i * 32 + 5) & 15, ((), 5)),
    "clamped": (lambda i, n: jnp.clip(i, 0, 63) * 8 + line(), ((1,), 8)),
    "inverted bits": (lambda i, n: ~(i * 8 - 1), ((), 8)),
    "wrapped in a byte": (
        lambda i, n: (i.astype(jnp.int8) * 48).astype(jnp.int32),
        ((), 16),
    ),
    "answered": (lambda i, n: ((i & 3) < 4) & ((n & 7) != 9), ()),
    "inverted": (lambda i, n: ((n & 7) < 8) ^ (line() < 3), (edges([3], []),)),
    "not answered": (lambda i, n: ((i & 3) != 2) | (lax.rem(n, 5) == -4), ()),
    "number": (lambda i, n: (n > 3).astype(jnp.int32) * 8 + 4, ((), 4)),
    "of a known branch": (
        lambda i, n: lax.cond((i & 3) < 4, lambda: i * 8, lambda: i),
        ((), 8),
    ),
    "after a loop": (
        lambda i, n: lax.fori_loop(0, 3, lambda j, x: x + 4, n * 8),
        ((), 4),
    ),
    "after a branch in a loop": (
        lambda i, n: lax.fori_loop(
            0, 3, lambda j, x: lax.cond(j < n, lambda: x + 6, lambda: 2 * j), n * 4
        ),
        ((), 2),
    ),
    "a ring": (lambda i, n: lax.fori_loop(0, 9, lambda j, x: 8 - x, 0), ((), 8)),
    "near the end": (lambda i, n: i + line() < n, (edges(range(16), range(16)),)),
    "down near the end": (lambda i, n: i - line() >= n * 8, None),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_facts_hold_for_all_values(name):
    f, expected = FUNCTIONS[name]
    (fact,), compiled = known(f, 0, 0), jax.jit(f)
    for i, n in itertools.product(SCALARS, repeat=2):
        value = compiled(np.int32(i), np.int32(n))
        assert holds(fact, value), (fact, i, n)
    if expected is None:
        return
    if value.dtype == bool:
        assert fact.changes(value.ndim) == expected
    else:
        start = of_rest(fact)
        for axis in range(value.ndim):
            start = start.at(axis, 0)
        assert (strides(fact, value.ndim), start.divisor) == expected


def test_what_is_claimed_wrongly_does_not_hold():
    """The comparison of this file can fail."""
    line = Fact.along(Axis(0, 16))
    multiple = Fact(modulus=8)
    assert not holds(line.plus(multiple), np.arange(16) + 4)
    assert not holds(line.scaled(2).plus(Fact()), np.arange(16))
    assert not holds(line, np.arange(16) + 16)
    assert not holds(Fact(low=0, high=3), np.full(16, 4))
    masked = Fact(others=frozenset({Axis(0, 16)}), edges=((0, edges([], [12])),))
    assert not holds(masked, np.arange(16) < 11)
    risen = Fact(others=frozenset({Axis(0, 16)}), edges=((0, edges([12], [])),))
    assert not holds(risen, np.arange(16) < 12)


def test_a_value_has_the_fact_that_holds_wherever_it_is_computed():
    """A loop of a function that is called twice, with a branch that is never taken."""

    @jax.jit
    def loop(n):
        def step(j, x):
            return lax.cond(n < 0, lambda: x, lambda: n)

        return lax.fori_loop(0, 4, step, n)

    with jax.enable_x64(False):
        closed = jax.make_jaxpr(lambda i: (loop((i & 3) * 8), loop((i & 7) * 12)))(3)
    region = region_of(closed)
    facts, loops = all_facts_of(region), [op for op in region.ops if op.name == "scan"]
    assert [facts.of(x).divisor for x in region.results] == [8, 12]
    assert loops[0].regions == loops[1].regions
    (branch,) = [op for op in loops[0].regions[0].ops if op.name == "cond"]
    taken, never = branch.regions
    assert {facts.of(x).divisor for x in (*taken.inputs, *never.inputs)} == {4}
