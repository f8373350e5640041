# SPDX-License-Identifier: Apache-2.0
"""The custom call: what it becomes in StableHLO, and that it runs on a GPU."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu.runtime import custom_call, environment


def lowered_text(function, *avals) -> str:
    traced = jax.jit(function).trace(*avals)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_call_carries_the_module_and_its_hash(serialize_body):
    aval = jax.ShapeDtypeStruct((128,), jnp.float32)
    text = lowered_text(lambda x: custom_call.call([x], [aval], serialize_body()), aval)
    assert "@mosaic_gpu_v2" in text
    assert "kernel_hash" in text and "module" in text
    assert "has_side_effect = true" not in text


def test_unused_call_stays_only_with_a_side_effect(serialize_body):
    aval = jax.ShapeDtypeStruct((128,), jnp.float32)

    def program(x, effect):
        custom_call.call([x], [aval], serialize_body(), has_side_effect=effect)
        return x

    assert "mosaic_gpu_v2" in lowered_text(lambda x: program(x, True), aval)
    assert "mosaic_gpu_v2" not in lowered_text(lambda x: program(x, False), aval)


def test_operands_and_results_are_row_major(serialize_body):
    aval = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    text = lowered_text(lambda x: custom_call.call([x], [aval], serialize_body()), aval)
    assert "operand_layouts = [dense<[1, 0]>" in text
    assert "result_layouts = [dense<[1, 0]>" in text


def test_an_alias_names_operand_and_result(serialize_body):
    aval = jax.ShapeDtypeStruct((128,), jnp.float32)

    def program(x):
        return custom_call.call(
            [x], [aval], serialize_body(), input_output_aliases={0: 0}
        )

    assert "output_operand_alias" in lowered_text(program, aval)


@pytest.mark.offline
def test_first_call_prepares_the_environment(serialize_body, monkeypatch):
    monkeypatch.delenv(environment.RUNTIME_LIB_VARIABLE, raising=False)
    custom_call.prepare_once.cache_clear()
    aval = jax.ShapeDtypeStruct((128,), jnp.float32)
    lowered_text(lambda x: custom_call.call([x], [aval], serialize_body()), aval)
    assert os.environ[environment.RUNTIME_LIB_VARIABLE].endswith(".so")


@pytest.mark.gpu
def test_the_kernel_runs_on_a_gpu(serialize_body, rng):
    x = rng.standard_normal(128).astype(np.float32)
    aval = jax.ShapeDtypeStruct((128,), jnp.float32)
    program = jax.jit(lambda x: custom_call.call([x], [aval], serialize_body()))
    with jax.default_device(jax.devices("cuda")[0]):
        (got,) = program(x)
    np.testing.assert_allclose(got, np.exp(x + 1), rtol=1e-5)
