# SPDX-License-Identifier: Apache-2.0
"""The tuner on 64 configurations of `ops.matmul` on a GPU: its time and its choice.

python -m benchmarks.autotune [--json] [--shape M N K]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from benchmarks import timing
from pallas_gpu import ops

SHAPE = (4096, 4096, 4096)
TILES = [(128, 128), (64, 256), (64, 128), (128, 64)]
CONFIGS = [
    ops.MatmulConfig(
        tile_m=m, tile_n=n, stages=stages, cluster=cluster, minor=minor, strip=strip
    )
    for (m, n), stages, cluster, minor, strip in itertools.product(
        TILES, (3, 4), (None, "n"), ("m", "n"), (4, 8)
    )
]
SECONDS = 170.0


def tune(a: Any, b: Any, timer: Any = None) -> plgpu.testing.TuningReport:
    """Tunes the product of two matrices without results from before."""
    with tempfile.TemporaryDirectory() as folder:
        tuned = plgpu.autotune(
            configs=CONFIGS,
            reference=_reference,
            seconds=SECONDS,
            cache_dir=folder,
            timer=timer,
        )(_matmul)
        return tuned.tune(a, b)


def _matmul(a: Any, b: Any, *, config: Any) -> Any:
    return ops.matmul(a, b, config=config)


def _reference(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def measure(
    shape: tuple[int, int, int] = SHAPE, timer: Any = None
) -> tuple[plgpu.testing.TuningReport, list[Any]]:
    """Tunes; then measures the choice, the shipped configuration and cuBLAS."""
    m, n, k = shape
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    a, b = normal(m, k), normal(k, n)
    report = tune(a, b, timer)
    candidates = {
        "the tuner's choice": jax.jit(
            functools.partial(_matmul, config=CONFIGS[report.index])
        ),
        "ops.matmul, as shipped": jax.jit(ops.matmul),
        "cuBLAS through JAX": jax.jit(jnp.matmul),
    }
    times = plgpu.testing.do_bench(candidates, a, b, rounds=25, timer=timer)
    rows = [
        {
            "m, n, k": f"{m}, {n}, {k}",
            "kernel": name,
            "µs": milliseconds * 1e3,
            "TFLOP/s": 2 * m * n * k / milliseconds / 1e9,
            "tuning, s": report.seconds if name == "the tuner's choice" else "",
        }
        for name, milliseconds in times.items()
    ]
    return report, rows


def notes(report: plgpu.testing.TuningReport) -> str:
    """Returns what the tuner did, in one paragraph."""
    outcomes = [row.outcome for row in report.rows]
    counts = ", ".join(f"{outcomes.count(x)} {x}" for x in dict.fromkeys(outcomes))
    steps = ", ".join(f"{step} {x:.1f} s" for step, x in report.steps.items())
    return (
        f"bfloat16, random normal; {len(outcomes)} configurations: {counts}. {steps}. "
        f"The choice is {report.config}. Device times, medians of 25 rounds with the "
        "L2 flushed."
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    sizes: Any = {"nargs": 3, "default": SHAPE, "metavar": ("M", "N", "K")}
    parser.add_argument("--shape", type=int, **sizes)
    options = parser.parse_args()
    report, rows = measure(tuple(options.shape))
    timing.report("The tuner", rows, notes(report), options.json)


if __name__ == "__main__":
    main()
