# SPDX-License-Identifier: Apache-2.0
"""Functions as MLIR, and what they cost: as upstream's functions of these names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.interpreters import mlir
from jaxlib.mlir import ir, passmanager

import pallas_gpu as plgpu
from pallas_gpu.emitters import module
from pallas_gpu.runtime.serialize import FORWARD_COMPATIBLE
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


def serialized_kernel(text):
    """The version of the kernel in a program for CUDA, and the kernel read back."""
    with mlir.make_ir_context():
        (call,) = (
            op
            for function in ir.Module.parse(text).body.operations
            for op in function.regions[0].blocks[0].operations
            if op.operation.name == "stablehlo.custom_call"
        )
        bytecode = call.attributes["mhlo.backend_config"]["module"].value_bytes
    with module.make_context():
        kernel = ir.Module.parse(bytecode)
        version = kernel.operation.attributes["stable_mosaic_gpu.version"].value
        passes = "builtin.module(mosaic_gpu-serde{serialize=false})"
        passmanager.PassManager.parse(passes).run(kernel.operation)
        return version, str(kernel)


def test_an_exported_kernel_has_a_form_that_older_plugins_read():
    exported = jax.export.export(jax.jit(KERNEL), platforms=["cuda"])(f32())
    version, text = serialized_kernel(exported.mlir_module())
    lowered = jax.jit(KERNEL).trace(f32()).lower(lowering_platforms=("cuda",))
    newest, now = serialized_kernel(lowered.as_text())
    assert (version, text) == (FORWARD_COMPATIBLE, now)
    assert version < newest


def test_the_author_may_choose_the_version():
    params = plgpu.CompilerParams(ir_version=5)
    kernel = make(lambda x, o: o.set(x[...] + 1), compiler_params=params)
    exported = jax.export.export(jax.jit(kernel), platforms=["cuda"])(f32())
    assert serialized_kernel(exported.mlir_module())[0] == 5


@refused
def test_a_version_of_the_future_cannot_be_written():
    params = plgpu.CompilerParams(ir_version=99)
    kernel = make(lambda x, o: o.set(x[...] + 1), compiler_params=params)
    plgpu.lower_as_mlir(kernel, f32())
