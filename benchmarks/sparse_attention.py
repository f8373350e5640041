# SPDX-License-Identifier: Apache-2.0
"""Attention over blocks that a table names: loops that copy ahead, and Triton's.

python -m benchmarks.sparse_attention [--json]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from benchmarks import timing
from benchmarks.beside_copy import COPY, interleaved, wait
from examples.sparse_attention import BLOCK, reference, sparse_attention

# Heads, queries and keys, elements of a head, blocks of a row of the table.
SIZES = [(16, 16384, 128, 32), (16, 16384, 64, 32), (16, 8192, 128, 8)]
STAGES = (1, 2, 3)


def arrays(heads: int, rows: int, d: int, blocks: int) -> tuple[Any, ...]:
    """Returns random queries, keys, values, and a table."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape, table = (heads, rows, d), (heads, rows // BLOCK, blocks)
    qkv = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:3])
    return *qkv, jax.random.randint(keys[3], table, 0, rows // BLOCK)


def measure(*size: int) -> list[dict[str, Any]]:
    """Checks and times one size."""
    import torch

    from benchmarks import triton_sparse_attention as triton

    args = arrays(*size)
    approx = plgpu.CompilerParams(approx_math=True)
    ours: dict[str, dict[str, Any]] = {
        "pallas_gpu": {},
        "pallas_gpu, approx_math": {"compiler_params": approx},
        **{f"pallas_gpu, num_stages={n}": {"num_stages": n} for n in STAGES},
    }
    candidates: dict[str, Callable[..., Any]] = {
        name: jax.jit(functools.partial(sparse_attention, **options))
        for name, options in ours.items()
    }
    for n in STAGES:
        candidates[f"Triton, num_stages={n}"] = triton.sparse_attention(BLOCK, n)
    # Of a few heads: the gathered keys and values of all would not fit.
    few = [x[:1] for x in args]
    exact = jax.jit(reference)(*few).astype(jnp.float32)
    for name, run in candidates.items():
        got = jnp.from_dlpack(wait(run, few)).astype(jnp.float32)
        error = float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))
        assert error < 1e-2, f"{name}: relative error {error}"
    runs = {name: functools.partial(wait, f, args) for name, f in candidates.items()}
    seconds = interleaved(runs, torch.from_dlpack(args[0]))
    del seconds[COPY]
    heads, rows, d, blocks = size
    best = min(t for name, t in seconds.items() if name.startswith("Triton"))
    return [
        {
            "heads, rows, d, blocks": ", ".join(map(str, size)),
            "by": name,
            "us": t * 1e6,
            "TFLOP/s": 4 * heads * rows * blocks * BLOCK * d / t / 1e12,
            "of Triton's best": best / t,
        }
        for name, t in seconds.items()
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch
    import triton

    rows = [row for size in SIZES for row in measure(*size)]
    notes = f"torch {torch.__version__}, Triton {triton.__version__}. Random normal."
    timing.report("Sparse attention", rows, notes, options.json)


if __name__ == "__main__":
    main()
