# SPDX-License-Identifier: Apache-2.0
"""Gathers and scatters of values: everywhere, with every mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere

I32 = jnp.int32
# Positions beyond both ends, repeated, and out of order.
INDEX = np.array([3, 1, 40, 3, -2, 0, 15, 3], np.int32)


def numbers(shape, dtype="int32"):
    x = (np.arange(np.prod(shape)) * 7 % 101 % 50).reshape(shape)
    return (x % 3 == 0) if dtype == "bool" else x.astype(jnp.dtype(dtype))


def check(body, x, index=INDEX, **options):
    """The body gives in a kernel what it gives in JAX."""
    with jax.enable_x64(x.dtype.itemsize == 8):
        expected = np.asarray(jax.jit(body)(jnp.asarray(x), jnp.asarray(index)))
        make = everywhere.elementwise(body, expected.dtype, shape=expected.shape)
        everywhere.check(make, [x, index], expected, **options)


GATHERS = {
    "take rows": lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
    "take columns": lambda x, i: jnp.take(x, i, axis=1, mode="clip"),
    "fill": lambda x, i: jnp.take(x, i, axis=0, mode="fill", fill_value=9),
    "fill by default": lambda x, i: x.at[i].get(mode="fill"),
    "rows": lambda x, i: x[i % 16],
    "columns": lambda x, i: x[:, i % 16],
    "elements": lambda x, i: x[i % 16, (i + 3) % 16],
    "outer": lambda x, i: x[(i % 16)[:, None], (i[:4] % 8)[None, :]],
    "along rows": lambda x, i: jnp.take_along_axis(x, x.astype(I32) % 16, 1),
    "along columns": lambda x, i: jnp.take_along_axis(x, x.astype(I32) % 16, 0),
    "one row": lambda x, i: x[i[3]],
    "a row that is a value": lambda x, i: jnp.take(x, i[:1] % 16, axis=0),
    "diagonal": lambda x, i: jnp.diagonal(x),
    "window": lambda x, i: lax.gather(
        x,
        jnp.stack([i, i[::-1]], 1),
        lax.GatherDimensionNumbers((1, 2), (), (0, 1)),
        (3, 4),
        mode="clip",
    ),
}


@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_agrees_with_jax(name):
    check(GATHERS[name], numbers((32, 16)))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32", "int64"])
def test_every_width(dtype):
    check(lambda x, i: x.at[i, i].get(mode="fill"), numbers((32, 16), dtype))
    check(lambda x, i: x.at[i].set(x[:8]), numbers((32, 16), dtype))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_every_type_of_index(dtype):
    index = (INDEX % 40).astype(dtype)
    check(lambda x, i: x.at[i].get(mode="fill", fill_value=3), numbers((32, 16)), index)


SCATTERS = {
    "one row": lambda x, i: x.at[3].add(1),
    "one column": lambda x, i: x.at[:, 5].set(0),
    "rows in order": lambda x, i: x.at[jnp.arange(3)].add(1),
    "set rows": lambda x, i: x.at[i].set(x[:8]),
    "clip": lambda x, i: x.at[i].set(x[8:16], mode="clip"),
    "add rows": lambda x, i: x.at[i].add(x[:8]),
    "subtract": lambda x, i: x.at[i].subtract(x[:8]),
    "multiply": lambda x, i: x.at[i % 4, i].multiply(2),
    "max of columns": lambda x, i: x.at[:, i].max(x[:, :8] + 9),
    "min": lambda x, i: x.at[i].min(x[16:24]),
    "unique": lambda x, i: x.at[jnp.arange(8) * 2].set(x[:8], unique_indices=True),
    "histogram": lambda x, i: jnp.zeros(64, I32).at[x.reshape(-1)].add(1),
    "bincount": lambda x, i: jnp.bincount(x[0], length=8),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_a_scatter_agrees_with_jax(name):
    check(SCATTERS[name], numbers((32, 16)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_sums_are_in_order_to_the_last_bit(dtype, rng):
    x = rng.standard_normal(512).astype(jnp.dtype(dtype))
    bins = rng.integers(0, 5, 512).astype(np.int32)
    expected = np.zeros(5, x.dtype)
    for i, value in zip(bins, x, strict=True):
        expected[i] = expected[i] + value
    make = everywhere.elementwise(
        lambda v, i: jnp.zeros(5, v.dtype).at[i].add(v), x.dtype, shape=(5,)
    )
    everywhere.check(make, [x, bins], expected, emulate=dtype == "float32")


@pytest.mark.parametrize("shape", [(5,), (129,), (5, 3), (3, 4, 8), (2, 3, 4, 5)])
def test_every_rank(shape):
    def body(x, i):
        rows = x.at[i[:3] % 5].get(mode="clip")
        return x.at[i].add(1, mode="drop").at[jnp.array(0)].set(rows[0])

    check(body, numbers(shape), INDEX[:3])


@pytest.mark.parametrize(("bytes_", "rows"), [(96, 8), (1008, 16)])
def test_a_small_scratch_is_used_in_rounds(bytes_, rows):
    """Of fewer bytes there are more rounds, and of more rows, too."""

    def body(x_ref, i_ref, o_ref):
        x, i = x_ref[...], i_ref[...]
        y = x.at[i].add(x[:8], mode="drop").at[:, jnp.arange(8) * 2].multiply(3)
        o_ref[...] = jnp.take_along_axis(y, jnp.abs(x) % 16, 1)

    x = numbers((rows, 16))
    y = jnp.asarray(x).at[INDEX].add(x[:8], mode="drop")
    y = np.asarray(y.at[:, jnp.arange(8) * 2].multiply(3))
    everywhere.run(
        body,
        [x, INDEX],
        np.take_along_axis(y, x % 16, 1),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=bytes_),
    )


@everywhere.tests(check, numbers((32, 16), "float32"), atol=1e-5)
def test_functions_of_jnp_on_top(x, i):
    chosen = jnp.select([x > 30, x < 10], [x, -x], 0.5)
    steps = jnp.diff(jnp.repeat(chosen, 2, axis=1), axis=1)
    counted = jnp.linspace(0, 31, 32)[:, None] + jnp.mgrid[:32, :31][1]
    return steps + counted + jnp.diagonal(x[:16])[:1, None]
