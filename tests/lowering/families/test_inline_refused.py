# SPDX-License-Identifier: Apache-2.0
"""What inline code refuses: arguments, results and references that are not declared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import mosaic as mgpu
from tests.support import everywhere
from tests.support.inline_code import (
    AUTHORED,
    F32,
    I32,
    OUT,
    SHAPE,
    SPLAT,
    STRIDED,
    TILED,
    WGMMA,
    X,
    array,
    double,
    emulated_double,
    loaded,
)
from tests.support.refusal import refused, refused_by


def run_once(body, *scratch, interpret=None, **options):
    make = everywhere.kernel(body, OUT, *scratch, **options)
    return make(interpret)(X)


def read_all(emulate, transforms=()):
    """Inline code that reads a reference, and stores nothing."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms),), emulate=emulate)
    def read(ctx, ref):
        mgpu.warpgroup_barrier()

    return read


@refused_by(run_once, interpret=plgpu.InterpretParams(inline_mgpu="ignore"))
def test_code_with_results_is_not_ignored(x, o):
    o[...] = double(loaded(x))  # HERE


@refused_by(run_once)
def test_emulate_returns_the_declared_shape(x, o):
    @plgpu.inline_mgpu(
        arg_types=(STRIDED,), return_type=array(), emulate=lambda x: x[:3]
    )
    def same(ctx, x):
        return x

    o[...] = same(loaded(x))  # HERE


@refused_by(run_once)
def test_emulate_returns_the_declared_tree(x, o):
    @plgpu.inline_mgpu(
        arg_types=(STRIDED,), return_type=array(), emulate=lambda x: (x, x)
    )
    def same(ctx, x):
        return x

    o[...] = same(loaded(x))  # HERE


@refused_by(run_once)
def test_an_exception_of_emulate_is_reported(x, o):
    read_all(lambda ref: ref.__setitem__((0, 0), 1))(x)  # HERE
    o[...] = x[...]


@refused_by(run_once)
def test_the_arguments_have_the_tree_of_their_types(x, o):
    o[...] = double(loaded(x), loaded(x))  # HERE


@refused_by(run_once)
def test_a_reference_is_declared_as_one(x, o):
    o[...] = double(x)  # HERE


@refused_by(run_once)
def test_an_array_is_declared_as_one(x, o):
    read_all(None)(loaded(x))  # HERE


@refused_by(run_once)
def test_an_argument_fits_its_layout(x, o):
    o[...] = double(loaded(x)[:32])  # HERE


@refused_by(run_once)
def test_gmem_is_not_tiled(x, o):
    read_all(None, TILED)(x)  # HERE
    o[...] = x[...]


@refused_by(run_once, plgpu.SMEM(SHAPE, F32, transforms=TILED))
def test_the_transforms_are_those_of_the_reference(x, o, smem):
    read_all(None)(smem)  # HERE
    o[...] = x[...]


@refused_by(run_once, plgpu.SMEM(SHAPE, F32), compiler_params=AUTHORED)
def test_declared_transforms_need_an_array_that_has_them(x, o, smem):
    smem[...] = x[...]
    read_all(lambda ref: None, TILED)(smem)  # HERE
    o[...] = x[...]


@refused_by(run_once, compiler_params=AUTHORED)
def test_an_operand_is_in_the_declared_layout(x, o):
    o[...] = emulated_double(loaded(x, WGMMA))  # HERE


@refused_by(run_once, compiler_params=AUTHORED)
def test_a_splat_is_declared_for_equal_elements_only(x, o):
    @plgpu.inline_mgpu(arg_types=(SPLAT,))
    def take(ctx, x):
        pass

    take(loaded(x))  # HERE
    o[...] = x[...]


def returning(make, **declared):
    """A body with inline code that returns what `make` makes of an array."""

    def body(x, o):
        @plgpu.inline_mgpu(
            arg_types=(STRIDED,),
            return_type=array(**declared),
            emulate=lambda x: np.zeros(declared.get("shape", SHAPE)),
        )
        def wrong(ctx, x):
            return make(x)

        wrong(loaded(x))  # HERE
        o[...] = x[...]

    return body


RESULTS = {
    "tree": (lambda x: (x, x), {}),
    "type": (lambda x: "x", {}),
    "shape": (lambda x: x, {"shape": (128, 128), "layout": WGMMA}),
    "dtype": (lambda x: x, {"dtype": I32}),
    "layout": (lambda x: x, {"layout": WGMMA}),
    "splat": (lambda x: x, {"layout": SPLAT}),
}


@pytest.mark.parametrize("case", RESULTS)
@refused
def test_results_are_what_is_declared(case):
    make, declared = RESULTS[case]
    run_once(returning(make, **declared))


@refused_by(run_once, plgpu.ACC((64, 128)))
def test_accumulators_are_not_given(x, o, acc):
    read_all(None)(acc)  # HERE
    o[...] = x[...]


@refused_by(run_once, plgpu.Barrier())
def test_emulate_is_not_given_barriers(x, o, barrier):
    read_all(lambda ref: None)(barrier)  # HERE
    o[...] = x[...]


@refused_by(run_once)
def test_a_warp_has_no_arrays_of_inline_code(x, o):
    @plgpu.warp_map
    def _(i):
        double(jnp.zeros(SHAPE))  # HERE

    o[...] = x[...]


@refused_by(run_once)
def test_the_function_has_a_parameter_for_the_context(x, o):
    code = plgpu.inline_mgpu(arg_types=(STRIDED,), return_type=array())
    o[...] = code(lambda x: x + x)(loaded(x))  # HERE


@refused_by(run_once)
def test_emulate_has_no_parameter_for_the_context(x, o):
    code = plgpu.inline_mgpu(
        arg_types=(STRIDED,), return_type=array(), emulate=lambda ctx, x: x + x
    )
    o[...] = code(lambda ctx, x: x + x)(loaded(x))  # HERE


@pytest.mark.parametrize("what", ["array", "reference"])
@refused_by(run_once)
def test_arrays_and_references_are_not_captured(x, o, *, what):
    value = loaded(x) if what == "array" else x

    @plgpu.inline_mgpu(return_type=array())
    def code(ctx):
        return mgpu.FragmentedArray.load_strided(value)  # HERE

    o[...] = code()


@refused
def test_types_are_layouts_and_references():
    plgpu.inline_mgpu(arg_types=(jax.ShapeDtypeStruct(SHAPE, F32),))  # HERE


@refused
def test_results_are_declared_with_layouts():
    plgpu.inline_mgpu(return_type=jax.ShapeDtypeStruct(SHAPE, F32))  # HERE


@refused
def test_a_result_fits_its_layout():
    plgpu.inline_mgpu(return_type=array(shape=(32, 32)))  # HERE


@refused
def test_a_layout_of_upstream_is_refused():
    from jax.experimental.pallas import mosaic_gpu

    plgpu.ShapeDtypeStruct(SHAPE, F32, mosaic_gpu.Layout.WGMMA)  # HERE
