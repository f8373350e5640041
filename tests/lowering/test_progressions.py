# SPDX-License-Identifier: Apache-2.0
"""What is known of integer arrays holds for the values that JAX computes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gpu.layouts.edges import Edges
from pallas_gpu.lowering import contiguous
from pallas_gpu.lowering.progressions import Progression
from pallas_gpu.program.build import region_of

I32_MIN, I32_MAX = -(2**31), 2**31 - 1
SCALARS = (0, 1, 3, 8, 130, -5, I32_MAX // 128, I32_MAX, I32_MIN)


def known(f, *scalars):
    """Returns the facts of a function's results, and the function."""
    with jax.enable_x64(False):
        closed = jax.make_jaxpr(f)(*(np.int32(s) for s in scalars))
    region = region_of(closed)
    inputs = [contiguous.unknown(value.aval) for value in region.inputs]
    return contiguous._Search().run(region, inputs)


def holds(fact, value):
    """Whether a fact is true of a value, modulo a power of two."""
    value = np.asarray(value)
    if isinstance(fact, Progression):
        rest = value.astype(np.int64)
        for axis, stride in enumerate(fact.strides):
            line = np.arange(value.shape[axis]).reshape(
                [-1 if i == axis else 1 for i in range(value.ndim)]
            )
            rest = rest - (stride or 0) * line
        for axis, stride in enumerate(fact.strides):
            first = rest.take([0], axis)
            if stride is not None and ((rest - first) % 2**32).any():
                return False
        power = 2**32 if fact.modulus == 0 else fact.modulus & -fact.modulus
        return not ((rest - fact.rest) % power).any()
    for axis, edges in enumerate(fact):
        steps = np.diff(value.astype(np.int8), axis=axis)
        if edges is None:
            continue
        for step, places in zip((1, -1), edges, strict=True):
            changes = np.nonzero(steps == step)[axis] + 1
            if any(not places >> i % 16 & 1 for i in changes):
                return False
    return True


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
    is_range = isinstance(fact, Progression)
    assert expected in (None, (fact.strides, fact.divisor) if is_range else fact)


def test_what_is_claimed_wrongly_does_not_hold():
    """The comparison of this file can fail."""
    assert not holds(Progression((1,), 0, 8), np.arange(16) + 4)
    assert not holds(Progression((2,), 0, 1), np.arange(16))
    assert not holds((edges([], [12]),), np.arange(16) < 11)
    assert not holds((edges([12], []),), np.arange(16) < 12)
