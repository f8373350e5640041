# SPDX-License-Identifier: Apache-2.0
"""The steps of tutorials/02_matmul on a GPU, beside cuBLAS through JAX, in one run.

python -m benchmarks.tutorial_matmul [--json]

The kernels are the notebook's own: its text form is executed, checks and all.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing

NOTEBOOK = Path(__file__).resolve().parents[1] / "tutorials" / "02_matmul.py"
SIZE = 4096
ROUNDS = 9
CALLS = 10
NOTES = (
    f"bfloat16, random normal inputs; medians of {ROUNDS} interleaved rounds of "
    f"{CALLS} calls. Step 1 is one tile: its time is the launch's."
)


def notebook() -> dict[str, Any]:
    """Executes the notebook on this process's JAX devices and returns its names."""
    # jax is imported already, so the notebook's choice of the CPU comes too late.
    return runpy.run_path(str(NOTEBOOK), run_name="notebook")


def measure_all() -> list[dict[str, Any]]:
    """Times every step of the notebook, and cuBLAS; checks them against float32."""
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(rng.standard_normal((SIZE, SIZE), np.float32), jnp.bfloat16)
        for _ in range(2)
    )
    names = notebook()
    tile = a[: names["M"], : names["K"]], b[: names["K"], : names["N"]]
    (first, one_tile), *others = names["STEPS"].items()
    rows = measure({first: one_tile}, *tile)
    rows += measure({**dict(others), "cuBLAS through JAX": jnp.matmul}, a, b)
    for row in rows:
        row["of cuBLAS"] = row["TFLOP/s"] / rows[-1]["TFLOP/s"]
    return rows


def measure(
    candidates: dict[str, Callable[..., Any]], a: Any, b: Any
) -> list[dict[str, Any]]:
    """Times kernels that compute the same product."""
    jitted = {name: jax.jit(f) for name, f in candidates.items()}
    (m, k), n = a.shape, b.shape[1]
    exact = a[:256].astype(jnp.float32) @ b.astype(jnp.float32)
    seconds = timing.on_device(jitted, (a, b), rounds=ROUNDS, calls=CALLS)
    rows = []
    for name, f in jitted.items():
        error = jnp.linalg.norm(f(a, b)[:256].astype(jnp.float32) - exact)
        relative = float(error / jnp.linalg.norm(exact))
        # Rounding to bfloat16 costs about 2**-9.
        assert relative < 1e-2, f"{name}: relative error {relative}"
        rows.append(
            {
                "step": name,
                "m, n, k": f"{m}, {n}, {k}",
                "µs": seconds[name] * 1e6,
                "TFLOP/s": 2 * m * n * k / seconds[name] / 1e12,
                "rel. error": relative,
            }
        )
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    timing.report("The steps of tutorial 2", measure_all(), NOTES, options.json)


if __name__ == "__main__":
    main()
