# SPDX-License-Identifier: Apache-2.0
"""Cumulative operations in kernels: everywhere, under both semantics."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import rates
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering.families.scans import Scan
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.semantics import Lane, under

WGMMA = plgpu.Layout.WGMMA
OPERATIONS = {
    "cumsum": (lax.cumsum, np.cumsum),
    "cumprod": (lax.cumprod, np.cumprod),
    "cummax": (lax.cummax, np.maximum.accumulate),
    "cummin": (lax.cummin, np.minimum.accumulate),
}


def check(body, x, expected, layout=None):
    make = everywhere.elementwise(body, expected.dtype, shape=x.shape, layout=layout)
    everywhere.check(make, [x], expected)


def test_a_scan_across_warps_costs_their_exchanges():
    across = place(plgpu.Layout.WG_STRIDED((128,), 1), (128,))
    exchange = 2 * (rates.BARRIER + rates.SMEM_LATENCY)
    assert Scan(0).cost(across, 32) > 2 * exchange


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
    x = rng.integers(-9, 10, shape).astype(np.float32)
    check(lambda v: jnp.cumsum(v, axis=-1), x, np.cumsum(x, axis=-1))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.int8, jnp.uint32])
def test_cumsum_of_narrow_and_unsigned_types(dtype, rng):
    x = np.asarray(rng.integers(0, 3, (64, 16)).astype(dtype))
    check(lambda v: lax.cumsum(v, axis=1), x, np.cumsum(x, 1, dtype=x.dtype), WGMMA)


def test_nan_spreads_to_what_comes_after_it():
    x = np.zeros((64, 16), np.float32)
    x[5, 3] = np.nan
    check(lambda v: lax.cummax(v, axis=1), x, np.maximum.accumulate(x, 1), WGMMA)


@refused
def test_a_scan_without_scratch_says_how_much_it_needs():
    def body(x_ref, o_ref):
        o_ref[...] = lax.cumsum(plgpu.load(x_ref, layout=WGMMA), axis=0)  # HERE

    x, params = jnp.zeros((64, 8)), plgpu.CompilerParams(reduction_scratch_bytes=16)
    kernel = everywhere.kernel(body, x, compiler_params=params)()
    plgpu.offline.lower(under(Lane, kernel), x)
