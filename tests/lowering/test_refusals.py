# SPDX-License-Identifier: Apache-2.0
"""Kernels that cannot be lowered: each error says all it has to say, and where."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support.refusal import in_each, refused, refused_by
from tests.support.semantics import BOTH, Lane, Warpgroup, under

pytestmark = pytest.mark.smoke

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
EXPONENTS = jax.ShapeDtypeStruct(X.shape, jnp.float8_e8m0fnu)
STRIDED = plgpu.Layout.WG_STRIDED(X.shape, 4)
NO_SCRATCH = plgpu.CompilerParams(reduction_scratch_bytes=0)


def lower(body, semantics, x=X, **options):
    kernel = plgpu.kernel(body, out_type=x, **options)
    return plgpu.offline.lower(under(semantics, kernel), x)


by_both = functools.partial(refused_by, in_each(lower, semantics=BOTH))


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
@by_both(x=EXPONENTS)
def test_exponents_are_not_reduced(x, o, *, axes):
    o[...] = jnp.broadcast_to(lax.reduce_max(x[...], axes), x.shape)  # HERE


@by_both()
def test_a_loops_array_is_no_splat(x, o):
    def step(_, value):
        return plgpu.layout_cast(value, plgpu.Layout.WG_SPLAT)  # HERE

    o[...] = lax.fori_loop(0, 3, step, jnp.zeros(x.shape))


@by_both(compiler_params=NO_SCRATCH)
def test_a_reversal_without_scratch(x, o):
    o[...] = jnp.flip(x[...])  # HERE


@by_both(compiler_params=NO_SCRATCH)
def test_a_relayout_without_scratch(x, o):
    strided = plgpu.layout_cast(x[...], STRIDED)
    o[...] = plgpu.layout_cast(strided, plgpu.Layout.WGMMA)  # HERE


@by_both(compiler_params=NO_SCRATCH)
def test_a_reduction_without_scratch(x, o):
    o[...] = x[...] + x[...].sum()  # HERE


def fills_smem(left_bytes):
    """Scratch that leaves only so many bytes of SMEM."""
    capacity = 232432  # of a block on sm_90a
    return [plgpu.SMEM((capacity - left_bytes,), jnp.int8)]


def columns(x, o, rest):
    o[...] = jnp.cumsum(x[...], axis=0)  # HERE


@refused
def test_lane_says_why_there_is_no_scratch():
    """All warps share the columns of the row-major default, not of other layouts."""
    lower(columns, Lane, scratch_types=fills_smem(16))


def test_warpgroup_needs_none():
    (report,) = lower(columns, Warpgroup, scratch_types=fills_smem(16))
    assert report.mlir


@by_both()
def test_a_layout_that_does_not_fit_the_shape(x, o):
    o[:60] = plgpu.layout_cast(x[:60], plgpu.Layout.WGMMA)  # HERE
