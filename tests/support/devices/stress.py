# SPDX-License-Identifier: Apache-2.0
"""Collectives on GPUs, each launched often, while devices wait at random.

`python -m tests.support.devices.stress [--calm] [launches] [name ...]` on two GPUs or
more; with one launch, under `compute-sanitizer`. A delay is in front of each signal of
a collective, and behind it, so that devices and CTAs come in any order; `--calm` leaves
the delays out.
"""

from __future__ import annotations

import argparse
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
    # A device has bits of its own in a sum of eight, which bfloat16 represents: a wrong
    # one says whose part is missing, or is that of another row or launch.
    own = 8 // lax.axis_size(axis_name)
    rows = x.reshape(-1, 64)
    digit = 1 + rows[:, :1] % (2**own - 1)
    places = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    a = jnp.where(places == 0, digit << (own * lax.axis_index(axis_name)), 0)
    w = jnp.ones((64, 256), jnp.bfloat16)
    return f(a.astype(jnp.bfloat16), w, axis_name, method=method)


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


def compare(ours, theirs, launches):
    """Raises AssertionError: how many results of each launch on each device differ."""
    wrong = (ours != theirs).reshape(-1, launches, ours[0].size)
    if not wrong.any():
        return
    at = np.argwhere(ours != theirs)[:: max(1, wrong.sum() // 6)]
    pairs = [
        f"{tuple(i)}: {ours[tuple(i)]} not {theirs[tuple(i)]}" for i in at.tolist()
    ]
    counts = "\n".join(str(device) for device in wrong.sum(-1).tolist())
    raise AssertionError(
        f"of {ours[0].size} results, for each device and launch, there differ\n"
        + "\n".join([counts, *pairs])
    )


def check(name, launches):
    in_a_program = min(launches, IN_A_PROGRAM)

    def program(method):
        def local(x):
            def step(x, _):
                y = CASES[name](x, axis_name="x", method=method)
                return x + 1, y

            return lax.scan(step, x, None, length=in_a_program)[1]

        return over(mesh(), local)

    method = name.split()[-1] if name.endswith("shot") else "kernel"
    ours, theirs = program(method), program("lax")
    for i in range(0, launches, IN_A_PROGRAM):
        x = jnp.arange(LENGTH * jax.device_count(), dtype=jnp.int32) * 7 % 1001 + i
        x = jax.device_put(x, jax.NamedSharding(mesh(), jax.P("x")))
        compare(np.asarray(ours(x)), np.asarray(theirs(x)), in_a_program)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("launches", type=int, nargs="?", default=200)
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="name")
    parser.add_argument("--calm", action="store_true", help="no delays")
    options = parser.parse_args()
    launches = options.launches
    for name in ("semaphore_signal", "semaphore_signal_parallel", "atomic_xchg"):
        if not options.calm:
            setattr(plgpu, name, delayed(getattr(plgpu, name)))
    return run(
        {name: functools.partial(check, name, launches) for name in options.names}
    )


if __name__ == "__main__":
    sys.exit(main())
