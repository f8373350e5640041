# SPDX-License-Identifier: Apache-2.0
"""The steps of tutorials/02_matmul on a GPU, and cuBLAS through JAX, in one run.

python -m benchmarks.tutorial_matmul [--json]

The kernels are the notebook's own: its text form is executed, checks included.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing

NOTEBOOK = Path(__file__).resolve().parents[1] / "tutorials" / "02_matmul.py"
SIZE = 4096
INPUTS = 5
# NVIDIA's data sheet of the H200 SXM, bfloat16 without sparsity.
PEAK_TFLOPS = 989
NOTES = (
    "bfloat16, random normal inputs; device times, medians of 40 rounds in a shuffled "
    "order. Step 1 is one tile on one SM."
)


def notebook() -> dict[str, Any]:
    """Executes the notebook on this process's JAX devices; returns its namespace."""
    # jax is imported already, so the notebook's selection of the CPU has no effect.
    return runpy.run_path(str(NOTEBOOK), run_name="notebook")


def measure_all() -> list[dict[str, Any]]:
    """Times every step of the notebook, and cuBLAS; checks them against float32."""
    keys = jax.random.split(jax.random.key(0), (INPUTS, 2))
    inputs = [tuple(normal(key) for key in pair) for pair in keys]
    names = notebook()
    m, n, k = (names[axis] for axis in "MNK")
    tiles = [(a[:m, :k], b[:k, :n]) for a, b in inputs]
    (first, one_tile), *others = names["STEPS"].items()
    rows = measure({first: one_tile}, tiles)
    rows += measure({**dict(others), "cuBLAS through JAX": jnp.matmul}, inputs)
    for row in rows:
        row["of cuBLAS"] = row["TFLOP/s"] / rows[-1]["TFLOP/s"]
    return rows


def normal(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (SIZE, SIZE), jnp.float32).astype(jnp.bfloat16)


def measure(
    candidates: dict[str, Callable[..., Any]], inputs: Sequence[Sequence[Any]]
) -> list[dict[str, Any]]:
    """Times kernels that compute the same products."""
    jitted = {name: jax.jit(f) for name, f in candidates.items()}
    a, b = inputs[0]
    (m, k), n = a.shape, b.shape[1]
    exact = np.asarray(a[:256], np.float32) @ np.asarray(b, np.float32)
    seconds = timing.on_device(jitted, inputs)
    rows = []
    for name, f in jitted.items():
        error = np.linalg.norm(np.asarray(f(a, b)[:256], np.float32) - exact)
        relative = float(error / np.linalg.norm(exact))
        tflops = 2 * m * n * k / seconds[name] / 1e12
        # Rounding to bfloat16 has an error of about 2**-9.
        assert relative < 1e-2, f"{name}: relative error {relative}"
        assert tflops < PEAK_TFLOPS, f"{name}: {tflops} TFLOP/s exceeds the peak"
        rows.append(
            {
                "step": name,
                "m, n, k": f"{m}, {n}, {k}",
                "µs": seconds[name] * 1e6,
                "TFLOP/s": tflops,
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
