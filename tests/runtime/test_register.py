# SPDX-License-Identifier: Apache-2.0
"""The CUDA lowering of kernels: what it keeps of them, and for how long."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import arch, compiler, errors
from pallas_gpu.runtime import register

ROW = jax.ShapeDtypeStruct((128,), jnp.float32)


def doubling(target=None):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    params = plgpu.CompilerParams(target=target)
    return plgpu.kernel(body, out_type=ROW, compiler_params=params)


def lowered_body(kernel) -> weakref.ref:
    """Lowers a kernel for CUDA; returns a reference to its traced body."""
    traced = jax.jit(lambda x: kernel(x)).trace(ROW)
    traced.lower(lowering_platforms=("cuda",))
    (launch,) = [e for e in traced.jaxpr.eqns if "mesh" in e.params]
    return weakref.ref(launch.params["jaxpr"])


def test_a_body_that_nobody_can_launch_any_more_is_not_kept():
    body = lowered_body(doubling())
    gc.collect()
    assert body() is None


def test_a_body_that_can_be_launched_again_is_compiled_once(monkeypatch):
    builds = []

    def counted(build, **options):
        builds.append(build)
        return run(build, **options)

    run = compiler.run
    monkeypatch.setattr(compiler, "run", counted)
    kernel = doubling()
    assert lowered_body(kernel)() is lowered_body(kernel)()
    assert len(builds) == 1


@pytest.mark.parametrize("target", arch.TARGETS)
def test_without_a_gpu_a_program_is_lowered_for_any_target(target, monkeypatch):
    monkeypatch.setattr(register, "_attached", lambda: None)
    assert lowered_body(doubling(target))


def test_a_gpu_runs_only_kernels_of_its_target(monkeypatch):
    monkeypatch.setattr(register, "_attached", lambda: arch.SM_90A)
    with pytest.raises(errors.TargetError, match="not for the attached GPU"):
        lowered_body(doubling("sm_100a"))
