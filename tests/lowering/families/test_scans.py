# SPDX-License-Identifier: Apache-2.0
"""Cumulative operations in kernels: everywhere, under both semantics."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.semantics import BOTH, Lane, Warpgroup

WGMMA = plgpu.Layout.WGMMA
OPERATIONS = {
    "cumsum": (lax.cumsum, np.cumsum),
    "cumprod": (lax.cumprod, np.cumprod),
    "cummax": (lax.cummax, np.maximum.accumulate),
    "cummin": (lax.cummin, np.minimum.accumulate),
}


def check(body, x, expected, layout=None, semantics=BOTH, **tolerance):
    make = everywhere.elementwise(body, expected.dtype, shape=x.shape, layout=layout)
    everywhere.check(make, [x], expected, semantics=semantics, **tolerance)


@pytest.mark.parametrize(
    ("name", "axis", "reverse"),
    [
        *itertools.product(["cumsum"], [0, 1], [False, True]),
        *(("cumprod", 0, False), ("cummax", 1, True), ("cummin", 1, False)),
    ],
)
def test_a_scan_accumulates_along_its_axis(name, axis, reverse, rng):
    ours, numpys = OPERATIONS[name]
    x = rng.integers(-2, 3, (64, 32)).astype(np.int32)
    wanted = (
        np.flip(numpys(np.flip(x, axis), axis), axis) if reverse else numpys(x, axis)
    )
    check(lambda v: ours(v, axis=axis, reverse=reverse), x, wanted.astype(np.int32))


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(128,), (64, 128), (256, 8), (4, 4, 64), (64, 24)])
def test_cumsum_takes_any_shape_that_threads_share(shape, rng):
    x = rng.standard_normal(shape).astype(np.float32)
    semantics = [Warpgroup] if shape == (64, 24) else BOTH
    wanted = np.cumsum(x.astype(np.float64), axis=-1)
    check(
        lambda v: jnp.cumsum(v, axis=-1),
        x,
        wanted.astype(np.float32),
        semantics=semantics,
        atol=2e-5,
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.int8, jnp.uint32])
def test_cumsum_of_narrow_and_unsigned_types(dtype, rng):
    x = np.asarray(rng.integers(0, 3, (64, 16)).astype(dtype))
    check(lambda v: lax.cumsum(v, axis=1), x, np.cumsum(x, 1, dtype=x.dtype), WGMMA)


def test_nan_spreads_to_what_comes_after_it():
    x = np.zeros((64, 16), np.float32)
    x[5, 3] = np.nan
    check(lambda v: lax.cummax(v, axis=1), x, np.maximum.accumulate(x, 1), WGMMA)


def test_a_scan_of_an_array_in_an_unsuited_layout_converts_it_under_lane():
    x = np.ones((64, 24), np.float32)
    make = everywhere.elementwise(
        lambda v: lax.cumsum(v, axis=1), x.dtype, shape=x.shape
    )
    everywhere.check(make, [x], np.cumsum(x, axis=1), semantics=(Lane,))


def test_a_scan_without_scratch_says_how_much_it_needs():
    params = plgpu.CompilerParams(reduction_scratch_bytes=16, lowering_semantics=Lane)

    def body(x_ref, o_ref):
        o_ref[...] = lax.cumsum(plgpu.load(x_ref, layout=WGMMA), axis=0)

    out = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    kernel = plgpu.kernel(body, out_type=out, compiler_params=params)
    with pytest.raises(errors.OutOfResources, match="reduction_scratch_bytes=512"):
        plgpu.offline.lower(kernel, jnp.zeros((64, 8)))
