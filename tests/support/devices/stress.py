# SPDX-License-Identifier: Apache-2.0
"""Collectives on GPUs, each launched often, while devices wait at random.

`python -m tests.support.devices.stress [launches] [name ...]` on two GPUs or more; with
one launch, under `compute-sanitizer`. A delay is in front of each signal of a
collective, and behind it, so that devices and CTAs come in any order.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops import collectives
from tests.support.devices.card import mesh, over
from tests.support.devices.checks import run

IN_A_PROGRAM = 20
MOST_NANOSECONDS = 1 << 13


def delayed(signal):
    """Returns a signal with a delay of up to 8 µs in front of it and behind it."""

    def wait():
        clock = plgpu.inline_ptx("mov.u32 $0, %clock;", dtype=jnp.int32, pure=False)
        bits = (clock * np.int32(-1640531527)) >> 16
        plgpu.delay(bits & np.int32(MOST_NANOSECONDS - 1))

    def run(*args, **options):
        wait()
        signal(*args, **options)
        wait()

    return run


def there_and_back(x, axis_name, method):
    options = {"axis_name": axis_name, "method": method}
    tokens = np.arange(64, dtype=np.int32).reshape(-1, 1)
    experts = (tokens + np.int32([[0, 3]]) + lax.axis_index(axis_name)) % 8
    x = x.astype(jnp.float32).reshape(64, -1)
    sent = collectives.dispatch(x, experts, num_experts=8, **options)
    weights = jnp.ones(experts.shape, jnp.float32)
    return collectives.combine(sent.rows, experts, sent.slots, weights, **options)


def product(f, x, axis_name, method):
    # Sums that are exact, in any order, also if they are rounded on the way.
    a = (x.reshape(-1, 64) % 2).astype(jnp.bfloat16)
    w = jnp.ones((64, 256), jnp.bfloat16)
    return f(a, w, axis_name, method=method)


def small(f):
    """Few elements of 16 bits, which travel with flags."""

    def run(x, axis_name, method):
        few = (x[: 1 << 13] % 16).astype(jnp.bfloat16)
        return f(few, axis_name=axis_name, method=method)

    return run


LENGTH = 1 << 17
CASES = {
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "one_shot": collectives.all_reduce,
    "two_shot": collectives.all_reduce,
    "all_to_all": functools.partial(
        collectives.all_to_all, split_axis=0, concat_axis=0
    ),
    "rotate": collectives.rotate,
    "dispatch, combine": there_and_back,
    "all_gather_matmul": functools.partial(product, collectives.all_gather_matmul),
    "matmul_reduce_scatter": functools.partial(
        product, collectives.matmul_reduce_scatter
    ),
}


for name in ("all_gather", "reduce_scatter", "one_shot", "all_to_all"):
    CASES[f"small {name}"] = small(CASES[name])


def check(name, launches):
    def program(method):
        def local(x):
            def step(x, _):
                y = CASES[name](x, axis_name="x", method=method)
                return x + 1, y

            return lax.scan(step, x, None, length=min(launches, IN_A_PROGRAM))[1]

        return over(mesh(), local)

    method = name.split()[-1] if name.endswith("shot") else "kernel"
    ours, theirs = program(method), program("lax")
    for i in range(0, launches, IN_A_PROGRAM):
        x = jnp.arange(LENGTH * jax.device_count(), dtype=jnp.int32) * 7 % 1001 + i
        x = jax.device_put(x, jax.NamedSharding(mesh(), jax.P("x")))
        np.testing.assert_array_equal(*(np.asarray(f(x)) for f in (ours, theirs)))


def main() -> int:
    launches = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    for name in ("semaphore_signal", "semaphore_signal_parallel", "atomic_xchg"):
        setattr(plgpu, name, delayed(getattr(plgpu, name)))
    names = sys.argv[2:] or CASES
    return run({name: functools.partial(check, name, launches) for name in names})


if __name__ == "__main__":
    sys.exit(main())
