# SPDX-License-Identifier: Apache-2.0
"""Declarations of accumulators."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import types
from tests.support.refusal import refused


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.int32])
def test_a_declaration_makes_a_fresh_reference_in_registers(dtype):
    declaration = plgpu.ACC([128, 64], dtype)
    first, second = declaration.to_ref(), declaration.to_ref()
    assert first is not second
    assert first == second
    assert hash(first) == hash(second)
    assert first.shape == (128, 64) and first.dtype == dtype
    assert first.memory_space is plgpu.REGS is declaration.memory_space


def test_references_of_different_types_differ():
    wide = plgpu.ACC((64, 64)).to_ref()
    assert wide != plgpu.ACC((64, 64), jnp.float16).to_ref()
    assert wide != plgpu.ACC((64, 128)).to_ref()
    assert wide != types.KernelRef(wide.inner_aval, types.REGS)


def test_float32_is_the_default():
    assert plgpu.ACC((64, 8)).dtype == jnp.float32


SHAPES = [(32, 64), (64, 12), (64,), (64, 64, 64), (0, 64), (64, 0), (-64, 8)]
TYPES = [jnp.bfloat16, jnp.int8, jnp.uint32, bool]


@pytest.mark.parametrize(
    "arguments", [*((shape,) for shape in SHAPES), *(((64, 64), t) for t in TYPES)]
)
@refused
def test_an_accumulator_is_of_whole_instructions_and_of_a_type_that_sums(arguments):
    plgpu.ACC(*arguments)  # HERE


@refused
def test_a_start_value_has_the_shape_of_an_accumulator():
    plgpu.ACC.init(jnp.zeros((64, 4)))  # HERE


def test_an_accumulator_has_the_shape_and_type_of_its_start_value():
    start = plgpu.ACC.init(jnp.zeros((64, 8), jnp.int32))
    assert start.declaration == plgpu.ACC((64, 8), jnp.int32)
