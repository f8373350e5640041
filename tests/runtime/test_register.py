# SPDX-License-Identifier: Apache-2.0
"""The CUDA lowering of kernels: what it keeps of them, and for how long."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import compiler

ROW = jax.ShapeDtypeStruct((128,), jnp.float32)


def doubling():
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return plgpu.kernel(body, out_type=ROW)


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
