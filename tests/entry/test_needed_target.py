# SPDX-License-Identifier: Apache-2.0
"""The target of a kernel that declares none follows from what its body uses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.checks import equations
from tests.support.entry_kernels import f32, make, numbers
from tests.support.refusal import refused, refused_by

SHAPE = (128, 64)
TMEM = plgpu.TMEM(SHAPE, jnp.float32)


def through_tmem(x, o, tile):
    tile[...] = x[...]
    o[...] = tile[...]


def target_of(kernel, *args):
    (eqn,) = [
        eqn
        for eqn in jax.make_jaxpr(kernel)(*args).jaxpr.eqns
        if "compiler_params" in eqn.params
    ]
    return eqn.params["compiler_params"].target


def test_a_kernel_with_tensor_memory_is_for_blackwell():
    kernel = make(through_tmem, f32(*SHAPE), scratch_types=[TMEM])
    x = numbers(*SHAPE)
    for _ in range(2):  # the second call finds the trace of the first
        assert target_of(kernel, x) == "sm_100a"
    np.testing.assert_array_equal(kernel(x), x)


def test_a_kernel_that_runs_anywhere_is_for_every_gpu():
    def body(x, o):
        o[...] = x[...]

    assert target_of(make(body), numbers()) is None


def test_a_body_may_use_all_that_a_target_has(monkeypatch):
    monkeypatch.setattr(equations, "features", lambda jaxpr: arch.SM_100A.features)
    assert (
        target_of(
            make(through_tmem, f32(*SHAPE), scratch_types=[TMEM]), numbers(*SHAPE)
        )
        == "sm_100a"
    )


def test_the_body_is_traced_again_for_its_target():
    """Work is claimed by a counter on Hopper, by taking over clusters on Blackwell."""

    def body(x, o, tile):
        @plgpu.dynamic_scheduling_loop("i")
        def _(loop_info):
            tile[...] = x[loop_info.index[0]]
            o[loop_info.index[0]] = tile[...]

    kernel = make(
        body, f32(3, *SHAPE), scratch_types=[TMEM], grid=(3,), grid_names=("i",)
    )
    x = numbers(3, *SHAPE)
    assert "try_cluster_cancel" in str(jax.make_jaxpr(kernel)(x))
    np.testing.assert_array_equal(kernel(x), x)


@refused_by(lambda body: make(body, f32(*SHAPE), scratch_types=[TMEM])(numbers(*SHAPE)))
def test_no_gpu_has_the_tensor_cores_of_two_generations(x, o, tile):
    plgpu.run_scoped(lambda acc: None, plgpu.ACC((64, 64)))
    through_tmem(x, o, tile)


@refused
def test_an_offline_compilation_has_the_target_that_it_is_given():
    kernel = make(through_tmem, f32(*SHAPE), scratch_types=[TMEM])
    plgpu.offline.lower(kernel, numbers(*SHAPE), target="sm_90a")
