# SPDX-License-Identifier: Apache-2.0
"""Arrays of odd shapes in whole kernels: elementwise, reduced, scanned, transposed."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.odd_shapes import ODD_SHAPES
from tests.support.semantics import BOTH

# The name of a function: its text has an address, which differs between processes.
NAME = operator.attrgetter("__name__")

LIMITED = [np.float32, np.uint8, np.int16, jnp.bfloat16]
LIMITED += [jnp.int4, jnp.uint2, jnp.float8_e4m3fn, jnp.float4_e2m1fn]


def numbers(shape, dtype=np.int32) -> np.ndarray:
    """Small numbers, none of them 0: an element that is lost or counted twice shows."""
    rng = np.random.default_rng(len(shape))
    values = rng.integers(1, 5, shape) * rng.choice([-1, 1], shape)
    return values.astype(dtype)


def compare(function, *args, rtol=0.0, semantics=BOTH) -> None:
    """Runs a function of arrays as a kernel's body, and outside of one."""
    expected = jax.tree.map(np.asarray, function(*map(jnp.asarray, args)))

    def body(*refs):
        *inputs, out = refs
        result = function(*(ref[...] for ref in inputs))
        out[...] = jnp.broadcast_to(result, out.shape)

    shape = expected.shape or (1,)

    options = {"rtol": rtol, "semantics": semantics, "executed": semantics}
    everywhere.run(body, args, np.broadcast_to(expected, shape), **options)


@pytest.mark.parametrize("shape", ODD_SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.int8, jnp.bfloat16])
def test_elementwise(shape, dtype):
    compare(lambda x: x * x + x, numbers(shape, dtype))


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_elementwise_through_smem(shape):
    x = numbers(shape)

    def body(x, o, held):
        held[...] = x[...]
        o[...] = held[...] + 1

    everywhere.run(body, [x], x + 1, plgpu.SMEM(shape, x.dtype))


@pytest.mark.parametrize("shape", ODD_SHAPES)
@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.min, jnp.prod], ids=NAME)
def test_a_reduction_to_a_scalar_counts_no_padding(shape, reduce):
    compare(lambda x: reduce(x), numbers(shape))


@pytest.mark.parametrize("shape", [s for s in ODD_SHAPES if len(s) > 1])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.min, jnp.prod], ids=NAME)
def test_a_reduction_of_an_axis_counts_no_padding(shape, axis, reduce):
    compare(lambda x: reduce(x, axis=axis), numbers(shape))


@pytest.mark.parametrize("dtype", LIMITED)
@pytest.mark.parametrize("reduce", [jnp.max, jnp.min], ids=NAME)
def test_the_limits_of_each_type_are_identities(dtype, reduce):
    x = numbers((65, 3)).astype(dtype)
    compare(lambda x: reduce(x, axis=0), x)
    if np.dtype(dtype).kind == "f":
        compare(lambda x: reduce(x, axis=0), np.full_like(x, -np.inf))
        compare(lambda x: reduce(x, axis=0), np.full_like(x, np.nan))


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_any_and_all(fill, axis):
    x = np.full((65, 3), fill)
    x[64, 2] = not fill
    compare(lambda x: jnp.any(x, axis=axis), x)
    compare(lambda x: jnp.all(x, axis=axis), x)


@pytest.mark.parametrize("shape", [(129,), (1001,), (100, 77), (3, 5, 7, 11)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, -1])
def test_a_scan_includes_no_padding(shape, reverse, axis):
    axis %= len(shape)
    compare(lambda x: lax.cumsum(x, axis, reverse=reverse), numbers(shape))
    compare(lambda x: lax.cummax(x, axis, reverse=reverse), numbers(shape))


@pytest.mark.parametrize("shape", [(100, 77), (65, 3), (2, 1001)])
def test_a_transpose_of_an_odd_shape(shape):
    compare(lambda x: x.T + 1, numbers(shape))
    compare(lambda x: (x * 2).T.sum(axis=1), numbers(shape))


def test_vectors_broadcast_to_an_odd_matrix():
    rows, columns = numbers((100,)), numbers((77,))
    # Under Lane the author would name the layouts of the two vectors.
    warpgroup = [plgpu.LoweringSemantics.Warpgroup]
    outer = lambda a, b: a[:, None] * 10 + b[None, :]  # noqa: E731
    compare(outer, rows, columns, semantics=warpgroup)


def test_division_of_padding_does_not_trap():
    compare(lambda x: 100 // x + 100 % x, numbers((1001,)))
    compare(lambda x: 1 / x, numbers((1001,), np.float32))


@pytest.mark.smoke
@everywhere.tests(compare, numbers((7, 1001)))
def test_loops_carry_odd_shapes(x):
    return lax.fori_loop(0, 3, lambda i, y: y * 2 + x, jnp.zeros_like(x))


def test_indices_of_an_odd_shape():
    shape = (65, 3)
    compare(
        lambda x: jnp.where(
            lax.broadcasted_iota(np.int32, shape, 0) < 40,
            x,
            lax.broadcasted_iota(np.int32, shape, 1),
        ),
        numbers(shape),
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sum(x, axis=0),
        lambda x: jnp.max(x, axis=1),
        lambda x: x - jnp.max(x, axis=1, keepdims=True),
        lambda x: jnp.cumsum(x, axis=1),
        lambda x: jnp.argmax(x, axis=0).astype(jnp.int32),
        lambda x: x.T + 1,
        lambda x: jnp.sum(x.reshape(16, 4, 80), axis=1),
    ],
    ids=["sum", "max", "centred", "cumsum", "argmax", "transpose", "reshape"],
)
def test_arrays_whose_default_layout_is_not_linear(function):
    """(64, 80) in vectors of four: rows do not begin at powers of two of threads."""
    compare(function, numbers((64, 80)))
