# SPDX-License-Identifier: Apache-2.0
"""What stays in memory after a kernel has been emulated: a bounded number of plans,
each of a bounded size.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.slow
def test_no_more_plans_and_jaxprs_stay_than_the_cache_holds(monkeypatch):
    make, jaxprs = plan._plans.__wrapped__, weakref.WeakSet()

    def seen(jaxpr):
        jaxprs.add(jaxpr)
        return make(jaxpr)

    assert plan._plans.cache_info().maxsize is not None
    monkeypatch.setattr(plan, "_plans", functools.lru_cache(maxsize=_PLANS)(seen))
    for number in range(60):
        run_another_kernel(number)
    assert plan._plans.cache_info().misses >= 60
    gc.collect()
    # JAX's own caches may hold a few more.
    assert len(jaxprs) <= 4 * _PLANS


def test_a_plan_of_a_long_loop_stays_small():
    def body(x, o):
        @plgpu.loop(0, 500)
        def _(i):
            o[i] = x[i]

    out = jax.ShapeDtypeStruct((500,), jnp.float32)
    kernel, x = plgpu.kernel(body, out_type=out), jnp.zeros(500)
    kernel(x)
    plan._plans.cache_clear()
    tracemalloc.start()
    try:
        kernel(x)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        plan._plans.cache_clear()
        gc.collect()
        held = before - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0 < held < 150_000


def test_threads_may_ask_for_plans_at_once(monkeypatch):
    jaxprs = [jax.make_jaxpr(lambda x, i=i: x + i)(1.0) for i in range(6)]
    small = functools.lru_cache(maxsize=2)(plan._plans.__wrapped__)
    monkeypatch.setattr(plan, "_plans", small)
    failures = []

    def ask(first):
        try:
            for i in itertools.islice(itertools.count(first, 5), 1500):
                assert plan.plan_of(jaxprs[i * i % 6]).steps
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
