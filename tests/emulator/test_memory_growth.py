# SPDX-License-Identifier: Apache-2.0
"""What stays in memory after a kernel has been emulated: a bounded number of plans."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu.emulator.engine import plan

_PLANS = 8


def run_another_kernel(number):
    """Emulates a kernel that differs from all others."""
    shape = (8, 8 * (1 + number % 5))

    def body(x, o):
        @plgpu.loop(0, 2)
        def _(i):
            o[...] = jnp.exp(x[...]) * number + i.astype(jnp.float32)

    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    got = plgpu.kernel(body, out_type=out)(jnp.zeros(shape))
    np.testing.assert_array_equal(got, np.full(shape, number + 1))


def test_no_more_plans_and_jaxprs_stay_than_the_cache_holds(monkeypatch):
    monkeypatch.setattr(plan, "_CACHE", type(plan._CACHE)())
    monkeypatch.setattr(plan, "_CACHE_SIZE", _PLANS)
    jaxprs = weakref.WeakSet()
    for number in range(60):
        run_another_kernel(number)
        jaxprs.update(plan._CACHE)
        assert len(plan._CACHE) <= _PLANS
    gc.collect()
    # JAX's own caches may hold a few more.
    assert len(jaxprs) <= 4 * _PLANS
