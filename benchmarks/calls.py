# SPDX-License-Identifier: Apache-2.0
"""Host time of one call of a small kernel, beside a bare FFI call, on a GPU.

python -m benchmarks.calls [--json]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as upstream

import pallas_gpu
from benchmarks import timing
from pallas_gpu import compiler
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering.machine import Build
from pallas_gpu.runtime import custom_call, register

# Eager calls of upstream trace, lower and compile each time.
CALLS, CALLS_OF_UPSTREAM, ROUNDS = 200, 2, 11
RESULT = jax.ShapeDtypeStruct((128,), jnp.float32)


def kernel(plgpu: Any) -> Callable[..., Any]:
    """A kernel of one block that adds two arrays, by one of the two packages."""

    def add(x: Any, y: Any, o: Any) -> None:
        o[...] = x[...] + y[...]

    return plgpu.kernel(add, out_type=RESULT)


def bare_call(x: Any, y: Any) -> Callable[..., Any]:
    """The FFI call that `kernel` becomes, written by hand."""
    (equation,) = jax.make_jaxpr(kernel(pallas_gpu))(x, y).eqns
    params = CallParams(**equation.params)
    build = Build(params, register.attached_target())
    module = compiler.run(build, until="serialize").serialized
    call = jax.ffi.ffi_call(custom_call.CALL_TARGET, [RESULT])

    def run(x: Any, y: Any) -> Any:
        return call(
            x, y, kernel_hash=module.hash, module=module.bytecode,
            use_custom_barrier=False, skip_device_barrier=False,
            uses_xla_collective_metadata=False,
        )[0]  # fmt: skip

    return run


def measure() -> list[dict[str, Any]]:
    """Times batches of calls without waiting for the device; checks the results."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal(128, np.float32)) for _ in range(2))
    candidates = {
        "jit, ffi_call": jax.jit(bare_call(x, y)),
        "jit, pallas_gpu": jax.jit(kernel(pallas_gpu)),
        "jit, upstream": jax.jit(kernel(upstream)),
        "eager, pallas_gpu": kernel(pallas_gpu),
        "eager, upstream": kernel(upstream),
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for name, f in candidates.items():
        np.testing.assert_array_equal(f(x, y), x + y, err_msg=name)
    for _ in range(ROUNDS):
        for name, f in candidates.items():
            calls = CALLS_OF_UPSTREAM if name == "eager, upstream" else CALLS
            start = time.perf_counter()
            for _ in range(calls):
                f(x, y)
            times[name].append((time.perf_counter() - start) / calls)
            jax.block_until_ready(f(x, y))
    medians = {name: sorted(values)[ROUNDS // 2] for name, values in times.items()}
    first = next(iter(medians.values()))
    return [
        {"call": name, "µs": seconds * 1e6, "of the first": seconds / first}
        for name, seconds in medians.items()
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    notes = (
        f"128 float32, random normal; host time of a call without waiting for its "
        f"result, medians of {ROUNDS} interleaved rounds."
    )
    timing.report("Host time of a call", measure(), notes, options.json)


if __name__ == "__main__":
    main()
