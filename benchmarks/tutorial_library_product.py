# SPDX-License-Identifier: Apache-2.0
"""The product of tutorial 7 on a GPU, `ops.matmul` and cuBLAS, in one run.

python -m benchmarks.tutorial_library_product

The kernel is the notebook's own: its text form is executed, checks included.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import timing
from pallas_gpu import ops

NOTEBOOK = Path(__file__).resolve().parents[1] / "tutorials" / "07_library_product.py"


def main() -> None:
    """Prints microseconds and the ratio to cuBLAS for each size."""
    product = runpy.run_path(str(NOTEBOOK), run_name="notebook")["product"]
    candidates = {
        "tutorial 7": product,
        "ops.matmul": ops.matmul,
        "cuBLAS through JAX": jnp.matmul,
    }
    for size in (4096, 8192):
        keys = jax.random.split(jax.random.key(0), (3, 2))
        inputs = [
            tuple(jax.random.normal(x, (size, size), jnp.bfloat16) for x in pair)
            for pair in keys
        ]
        seconds = timing.on_device(candidates, inputs)
        for name, time in seconds.items():
            ratio = seconds["cuBLAS through JAX"] / time
            print(f"{size} {name}: {time * 1e6:.1f} us, {ratio:.3f} of cuBLAS")


if __name__ == "__main__":
    main()
