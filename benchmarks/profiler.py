# SPDX-License-Identifier: Apache-2.0
"""The cost of a profiled matrix product on a GPU: 16 spans per CTA, and all waits.

python -m benchmarks.profiler [--json]

The kernel is step 4 of tutorials/02_matmul: a producer and two consumers, a CTA per
tile of 256 x 128.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from benchmarks import timing, tutorial_matmul

ROUNDS = 40
# Of each warpgroup's part of a tile: the scopes around it. Two consumers multiply and
# store, a producer fetches: 2 (3 + 3) + 4 spans.
SCOPES = {
    "fetch": ("producer", "tile", "fetch", "copies"),
    "multiply": ("tile", "multiply", "steps"),
    "store": ("epilogue", "store", "parts"),
}
NOTES = (
    "4096 x 4096 x 4096, bfloat16, random normal inputs; device times of the kernel, "
    f"medians of {ROUNDS} rounds in a shuffled order."
)


def product() -> Callable[..., Any]:
    """Returns the tutorial's product with scopes in it."""
    names = tutorial_matmul.notebook()["work"].__globals__
    for name, scopes in SCOPES.items():
        names[name] = _scoped(names[name], scopes)

    def specialised(a: Any, b: Any) -> Any:
        (m, k), n = a.shape, b.shape[1]

        @plgpu.kernel(
            out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
            grid=(m // names["BLOCK_M"], n // names["N"]),
            grid_names=("m", "n"),
            **names["WARPGROUPS"],
            scratch_types=names["scratch"](),
        )
        def product(
            a: Any, b: Any, out: Any, a_smem: Any, b_smem: Any, out_smem: Any,
            full: Any, empty: Any,
        ) -> None:  # fmt: skip
            def one_tile(do: Callable[..., None]) -> None:
                row, column = lax.axis_index("m"), lax.axis_index("n")
                do(row * names["BLOCK_M"], column * names["N"], 0)

            refs = a, b, out, a_smem, b_smem, out_smem, full, empty
            names["work"](one_tile, k // names["K"], *refs, share=None)

        return product(a, b)

    return specialised


def _scoped(f: Callable[..., Any], scopes: tuple[str, ...]) -> Callable[..., Any]:
    def scoped(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name in scopes:
                stack.enter_context(jax.named_scope(name))
            return f(*args)

    return scoped


def measure_all() -> list[dict[str, Any]]:
    """Times the product as it is, and profiled."""
    plain = product()
    spans = plgpu.testing.profile(plain, space=16, waits=False)
    waits = plgpu.testing.profile(plain)
    keys = jax.random.split(jax.random.key(0))
    a, b = (tutorial_matmul.normal(key) for key in keys)
    calls: dict[str, Callable[[], Any]] = {
        "as it is": lambda: jax.jit(plain)(a, b),
        "16 spans per CTA": lambda: spans(a, b).results,
        "and waits": lambda: waits(a, b).results,
    }
    expected = jnp.matmul(a, b)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        error = jnp.abs(call().astype(jnp.float32) - expected.astype(jnp.float32))
        assert float(error.max()) <= 2, name
    for _ in range(ROUNDS):
        time.sleep(0.05)
        for name in random.sample(list(calls), len(calls)):
            found = plgpu.testing.kernel_times(calls[name])
            times[name].append(max(ms for kernel, ms in found if "product" in kernel))
    base = statistics.median(times["as it is"])
    medians = {name: statistics.median(t) for name, t in times.items()}
    return [
        {"kernel": name, "µs": 1e3 * t, "cost in %": 100 * (t / base - 1)}
        for name, t in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure_all()
    timing.report("Cost of the profiler", rows, NOTES, options.json)


if __name__ == "__main__":
    main()
