# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the first calls of `pallas_call`, and what their hints make of them."""

from __future__ import annotations

import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused, refused_by


def add_one(x, o):
    o[...] = x[...] + 1


@pytest.mark.parametrize("axis", ["parallel", "arbitrary"])
@refused
def test_an_index_map_in_elements_is_refused(axis):
    def in_elements(i):
        return i * 16, 0

    spec = plgpu.BlockSpec((16, 128), in_elements)
    params = plgpu.CompilerParams(dimension_semantics=(axis,))
    own = plgpu.BlockSpec((16, 128), lambda i: (i, 0))
    call = plgpu.pallas_call(
        add_one, f32(), grid=4, in_specs=[spec], out_specs=own, compiler_params=params
    )
    call(numbers())


def test_the_hints_for_an_index_map_in_elements_work():
    for entry, index_map in (
        (16, lambda i: (i, 0)),
        (plgpu.Element(16), lambda i: (i * 16, 0)),
    ):
        spec = plgpu.BlockSpec((entry, plgpu.Element(128)), index_map)
        own = plgpu.BlockSpec((16, 128), lambda i: (i, 0))
        call = plgpu.pallas_call(add_one, f32(), grid=4, in_specs=[spec], out_specs=own)
        np.testing.assert_array_equal(call(numbers()), numbers() + 1)


def test_every_other_block_is_not_an_index_in_elements():
    def body(x, o):
        o[...] = x[...]

    spec = plgpu.BlockSpec((2, 128), lambda i: (2 * i, 0))
    own = plgpu.BlockSpec((2, 128), lambda i: (i, 0))
    call = plgpu.pallas_call(
        body, f32(32, 128), grid=16, in_specs=[spec], out_specs=own
    )
    x = numbers()
    np.testing.assert_array_equal(
        call(x), x.reshape(-1, 4, 128)[:, :2].reshape(-1, 128)
    )


def test_a_whole_array_that_exceeds_smem_is_named():
    spec = plgpu.BlockSpec((64, 128), lambda i: (i, 0))

    def body(x, o):
        o[...] = x[plgpu.ds(plgpu.program_id(0) * 64, 64)]

    def call(given):
        return plgpu.pallas_call(
            body, f32(1024, 128), grid=16, in_specs=[given], out_specs=spec
        )

    x = numbers(1024, 128)
    with pytest.raises(
        errors.OutOfResources, match=r"argument 0 .*whole array"
    ) as info:
        call(plgpu.BlockSpec(memory_space=plgpu.SMEM))(x)
    assert "memory_space=plgpu.GMEM" in info.value.hint
    assert info.value.used_bytes == x.nbytes
    np.testing.assert_array_equal(call(plgpu.BlockSpec(memory_space=plgpu.GMEM))(x), x)


def test_a_function_as_grid():
    """As Triton takes one."""
    with pytest.raises(errors.ArgumentTypeError, match="not an integer") as info:
        plgpu.pallas_call(add_one, f32(), grid=lambda meta: (4,))
    assert "call the function, or write its result" in info.value.hint


def test_the_arguments_of_a_block_spec_in_the_old_order():
    with pytest.raises(errors.ArgumentTypeError, match="block_shape") as info:
        plgpu.BlockSpec(lambda i: (i, 0), (64, 128))
    assert "the shape is first" in info.value.hint


@refused_by(lambda body: plgpu.pallas_call(body, f32(), grid=4)(numbers()))
def test_a_name_for_an_axis_of_the_grid(x, o):
    o[plgpu.ds(lax.axis_index("i"), 1)] = x[plgpu.ds(0, 1)]
