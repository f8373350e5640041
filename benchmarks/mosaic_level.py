# SPDX-License-Identifier: Apache-2.0
"""Kernels of the Mosaic level by this package and by upstream, in one run.

python -m benchmarks.mosaic_level [--rounds N]

Each kernel is one source, which takes the module with the Mosaic level's names.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as upstream

from pallas_gpu import mosaic
from pallas_gpu.testing.rounds import Rounds
from tests.support.mosaic_level import emitting
from tests.support.mosaic_level.flash_attention import Attention
from tests.support.mosaic_level.matmul import Matmul

# Upstream's twice: how far its two times are apart says what a difference means. And
# of two calls one would be the slow one behind a pause in half of the rounds, of which
# the median is anything between the times of both places.
SIDES: dict[str, ModuleType] = {
    "ours": mosaic,
    "upstream": upstream,
    "again": upstream,
}
SIZE = 4096


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel at one size.

    Attributes:
      make: returns the function of the operands, for a module.
      operands: makes them.
      expected: of some of the first rows of the result, in NumPy.
      flops: of one call.
    """

    make: Callable[[ModuleType], Callable[..., Any]]
    operands: Callable[[], Sequence[jax.Array]]
    expected: Callable[..., np.ndarray]
    flops: float


def normal(*shapes: Sequence[int], dtype: Any = jnp.float16) -> list[jax.Array]:
    """Returns normal arrays of some shapes."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.normal(k, s, jnp.float32).astype(dtype)
        for k, s in zip(keys, shapes, strict=True)
    ]


def as_float(*arrays: Any) -> list[np.ndarray]:
    """Returns arrays in float32, by NumPy."""
    return [np.asarray(x).astype(np.float32) for x in arrays]


def product_rows(a: Any, b: Any) -> np.ndarray:
    """Returns the first rows of a product."""
    a, b = as_float(a[:256], b)
    return a @ b


def attention_rows(q: Any, k: Any, v: Any) -> np.ndarray:
    """Returns attention of the first queries of the first head."""
    q, k, v = as_float(q[0, :256], k[0], v[0])
    scores = q @ k.T / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


HEADS, LENGTH, HEAD_DIM = 16, 4096, 128
CASES = {
    f"attention h{HEADS} s{LENGTH} d{HEAD_DIM}": Case(
        lambda mgpu: Attention(mgpu, HEADS, LENGTH, HEAD_DIM).kernel(),
        lambda: normal(*((HEADS, LENGTH, HEAD_DIM),) * 3),
        attention_rows,
        4.0 * HEADS * LENGTH**2 * HEAD_DIM,
    ),
    f"matmul {SIZE}^3": Case(
        lambda mgpu: Matmul(mgpu, SIZE, SIZE, SIZE).kernel(),
        lambda: normal((SIZE, SIZE), (SIZE, SIZE)),
        product_rows,
        2.0 * SIZE**3,
    ),
}


def measure(name: str, case: Case, rounds: int) -> None:
    """Checks both sides of a case, and prints their times."""
    operands = case.operands()
    expected = case.expected(*operands)
    calls = {}
    for side, mgpu in SIDES.items():
        with emitting():
            function = jax.jit(case.make(mgpu))
        (found,) = as_float(jax.tree.leaves(function(*operands))[0])
        flat = found.reshape(-1)[: expected.size].reshape(expected.shape)
        error = np.abs(flat - expected).max() / np.abs(expected).max()
        print(f"{name:24} {side:9} largest error {error:.1e} of the largest value")
        calls[side] = lambda function=function: function(*operands)
    measured = Rounds(calls, pause_seconds=0.01)
    for _ in range(rounds):
        measured.run()
    times = {side: statistics.median(x) for side, x in measured.times.items()}
    for side, ms in times.items():
        rate = case.flops / ms / 1e9
        print(f"{name:24} {side:9} {ms * 1e3:9.1f} us {rate:8.0f} TFLOP/s")
    ratios = (f"{times[side] / times['ours']:.3f}" for side in ("upstream", "again"))
    print(f"{name:24} ratios    {', '.join(ratios)}")


def main() -> None:
    """Measures every case; a failure does not stop the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(jax.devices()[0].device_kind)
    for name, case in CASES.items():
        try:
            measure(name, case, options.rounds)
        except Exception:
            print(f"{name} fails:\n{traceback.format_exc(limit=-4)}")


if __name__ == "__main__":
    main()
