# SPDX-License-Identifier: Apache-2.0
"""Kernels that cannot be lowered: each error says all it has to say, and where."""

import inspect
import os

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.old_refusal import MARK
from tests.support.semantics import BOTH, Lane, Warpgroup, under

pytestmark = pytest.mark.smoke

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
EXPONENTS = jax.ShapeDtypeStruct(X.shape, jnp.float8_e8m0fnu)
STRIDED = plgpu.Layout.WG_STRIDED(X.shape, 4)
NO_SCRATCH = plgpu.CompilerParams(reduction_scratch_bytes=0)


def error_of(body, semantics, x=X, **options):
    """The error of lowering a kernel, with all its rows and the marked line."""
    kernel = plgpu.kernel(body, out_type=x, **options)
    with pytest.raises(errors.PallasGpuError) as info:
        plgpu.offline.lower(under(semantics, kernel), x)
    text = str(info.value)
    for label in ("expected:", "got:", "hint:", "at:"):
        assert f"\n  {label}" in text, f"no row {label!r} in\n{text}"
    lines, first = inspect.getsourcelines(body)
    marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(MARK)]
    file = os.path.basename(__file__)
    places = [f"{file}:{line}" for line in marked]
    assert any(str(info.value.where).split(" ")[0].endswith(p) for p in places), text
    assert not isinstance(info.value, errors.InternalError), text
    return info.value


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_exponents_are_not_reduced(semantics, axes):
    def body(x, o):
        o[...] = jnp.broadcast_to(lax.reduce_max(x[...], axes), x.shape)  # HERE

    error = error_of(body, semantics, EXPONENTS)
    assert type(error) is errors.DTypeError
    assert error.what == "max does not support float8_e8m0fnu operands"


@pytest.mark.parametrize("semantics", BOTH)
def test_a_loops_array_is_no_splat(semantics):
    def body(x, o):
        def step(_, value):
            return plgpu.layout_cast(value, plgpu.Layout.WG_SPLAT)  # HERE

        o[...] = lax.fori_loop(0, 3, step, jnp.zeros(x.shape))

    error = error_of(body, semantics)
    assert type(error) is errors.LayoutError
    assert error.what == "Only a splat can have a splat layout"


@pytest.mark.parametrize("semantics", BOTH)
def test_a_reversal_without_scratch(semantics):
    def body(x, o):
        o[...] = jnp.flip(x[...])  # HERE

    error = error_of(body, semantics, compiler_params=NO_SCRATCH)
    assert "reduction_scratch_bytes=" in error.hint


@pytest.mark.parametrize("semantics", BOTH)
def test_a_relayout_without_scratch(semantics):
    def body(x, o):
        strided = plgpu.layout_cast(x[...], STRIDED)
        o[...] = plgpu.layout_cast(strided, plgpu.Layout.WGMMA)  # HERE

    error = error_of(body, semantics, compiler_params=NO_SCRATCH)
    assert "reduction_scratch_bytes=" in error.hint


@pytest.mark.parametrize("semantics", BOTH)
def test_a_reduction_without_scratch(semantics):
    def body(x, o):
        o[...] = x[...] + x[...].sum()  # HERE

    error = error_of(body, semantics, compiler_params=NO_SCRATCH)
    assert "reduction_scratch_bytes=" in error.hint


def fills_smem(left_bytes):
    """Scratch that leaves only so many bytes of SMEM."""
    capacity = 232432  # of a block on sm_90a
    return [plgpu.SMEM((capacity - left_bytes,), jnp.int8)]


def test_lane_says_why_there_is_no_scratch_where_warpgroup_needs_none():
    """All warps share the columns of the row-major default, not of other layouts."""

    def body(x, o, rest):
        o[...] = jnp.cumsum(x[...], axis=0)  # HERE

    options = {"scratch_types": fills_smem(16)}
    error = error_of(body, Lane, **options)
    assert error.hint.startswith("the arrays occupy the remaining SMEM")
    assert "give the operand a layout in which warps do not share" in error.hint
    kernel = plgpu.kernel(body, out_type=X, **options)
    (report,) = plgpu.offline.lower(under(Warpgroup, kernel), X)
    assert report.mlir


@pytest.mark.parametrize("semantics", BOTH)
def test_a_layout_that_does_not_fit_the_shape(semantics):
    def body(x, o):
        o[:60] = plgpu.layout_cast(x[:60], plgpu.Layout.WGMMA)  # HERE

    assert type(error_of(body, semantics)) is errors.LayoutError
