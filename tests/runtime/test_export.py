# SPDX-License-Identifier: Apache-2.0
"""Functions as MLIR, and what they cost: as upstream's functions of these names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import pallas_gpu as plgpu
from tests.support.entry_kernels import f32, make
from tests.support.refusal import refused

KERNEL = make(lambda x, o: o.set(x[...] + 1))


@pytest.mark.parametrize(
    "function", [lambda x, n=2: x @ x.T * n, lambda x, n=2: n * jnp.exp(x)]
)
@pytest.mark.parametrize("options", [{}, {"n": 3}])
def test_an_estimate_is_upstreams(function, options):
    ours = plgpu.estimate_cost(function, f32(), **options)
    theirs = pl.estimate_cost(function, f32(), **options)
    for field in ("flops", "transcendentals", "bytes_accessed"):
        assert getattr(ours, field) == getattr(theirs, field)


def test_loops_count():
    loop = lambda x: jax.lax.map(jnp.exp, x)  # noqa: E731
    assert plgpu.estimate_cost(loop, f32()).transcendentals > 0


def test_a_function_of_kernels_is_lowered_for_cuda():
    assert "mosaic_gpu_v2" in plgpu.lower_as_mlir(KERNEL, f32())


def test_a_function_is_lowered_for_its_static_arguments_and_platforms():
    def function(x, n, *, add):
        return jax.lax.platform_dependent(x, cpu=lambda x: n * x + add, cuda=jnp.sin)

    text = plgpu.lower_as_mlir(
        function, f32(), 3, static_argnames="n", platforms=["cpu"], add=7
    )
    assert "dense<3.0" in text and "sine" not in text


@pytest.mark.parametrize("options", [{"dynamic_shapes": True}, {"device": "cuda:0"}])
@refused
def test_what_is_lowered_has_static_shapes_and_no_device(options):
    plgpu.lower_as_mlir(KERNEL, f32(), **options)  # HERE


def test_shapes_are_static_where_a_function_is_exported():
    with plgpu.pallas_export_experimental(False):
        export = jax.export.export(jax.jit(KERNEL), platforms=["cuda"])(f32())
    assert "mosaic_gpu_v2" in export.mlir_module()
