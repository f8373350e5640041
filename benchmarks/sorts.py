# SPDX-License-Identifier: Apache-2.0
"""Sorts: of long arrays beside XLA and torch, of rows, and the largest.

python -m benchmarks.sorts [--json] [--only long rows top_k]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from benchmarks import timing
from examples import radix_sort
from pallas_gpu.composites import sorting

LONG = 1 << 24
ROUNDS = 15
BLOCKS = 264  # rows that are sorted at the same time
# Of a vector, and how many of its elements: on both sides of what `selects` chooses.
SELECTIONS = {
    64: (1, 2, 3, 5),
    512: (4, 8, 16, 24),
    1024: (8, 16, 32, 48),
    2048: (16, 32, 64, 96),
    8192: (32, 64, 128, 192),
}


def _device_seconds(
    candidates: dict[str, Callable[..., Any]], inputs: Any
) -> dict[str, float]:
    return timing.on_device(candidates, inputs, rounds=ROUNDS, pause_seconds=0.01)


# --- long arrays ----------------------------------------------------------------------


def long_arrays() -> Iterator[dict[str, Any]]:
    """Yields the rows of a table: 2**24 keys of 32 bits, alone and with values."""
    values = jnp.arange(LONG, dtype=jnp.uint32)
    for name, most in (("all values", 1 << 32), ("16 values", 16)):
        many = [jax.random.bits(jax.random.key(i), (LONG,), jnp.uint32) for i in (0, 1)]
        inputs = [(x % jnp.uint32(most) if most < 1 << 32 else x,) for x in many]
        for moved in ((), (values,)):
            args = [(*x, *moved) for x in inputs]
            ours = jax.jit(radix_sort.sort)
            xla = jax.jit(lambda *x: tuple(lax.sort(x, num_keys=1)))
            _require_equal(ours(*args[0]), xla(*args[0]))
            seconds = _device_seconds({"ours": ours, "XLA": xla}, args)
            yield {
                "keys": name,
                "with": "values" if moved else "",
                "radix_sort, us": seconds["ours"] * 1e6,
                "XLA (CUB), us": seconds["XLA"] * 1e6,
                "torch.sort, us": _torch_seconds(args[0][0]) * 1e6,
                "of XLA": seconds["XLA"] / seconds["ours"],
                "10^9 keys/s": LONG / seconds["ours"] / 1e9,
            }


def _require_equal(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        assert bool(jnp.array_equal(a, b)), "the arrays are not sorted"


def _torch_seconds(keys: jax.Array) -> float:
    """The median of torch.sort of 31 bits, which returns positions of 64 bits, too."""
    import torch

    x = torch.from_dlpack((keys >> 1).astype(jnp.int32))
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.sort(x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[ROUNDS // 2]


# --- rows of a block ------------------------------------------------------------------


def rows() -> Iterator[dict[str, Any]]:
    """Yields the rows of a table: sorts of rows, one for each block."""
    for dtype in ("int32", "float32", "bfloat16"):
        for size in (128, 1024, 4096, 8192):
            x = jax.random.normal(jax.random.key(size), (BLOCKS, size)) * 1e4
            x = x.astype(dtype)

            def body(x_ref, o_ref):
                i = lax.axis_index("row")
                o_ref[i] = jnp.sort(x_ref[i])

            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            ours = plgpu.kernel(
                body, out_type=like, grid=(BLOCKS,), grid_names=("row",)
            )
            candidates = {"ours": jax.jit(ours), "XLA": jax.jit(jnp.sort)}
            _require_equal([ours(x)], [jnp.sort(x)])
            seconds = _device_seconds(candidates, [(x,)])
            yield {
                "rows": f"{BLOCKS}x{size} {dtype}",
                "a block each, us": seconds["ours"] * 1e6,
                "XLA, us": seconds["XLA"] * 1e6,
                "of XLA": seconds["XLA"] / seconds["ours"],
            }


# --- the largest ----------------------------------------------------------------------


def largest() -> Iterator[dict[str, Any]]:
    """Yields the rows of a table: `top_k` by selection and by a network."""
    for size, counts in SELECTIONS.items():
        x = jax.random.normal(jax.random.key(size), (size,))
        for k in counts:
            expected = lax.top_k(x, k)
            seconds = {}
            for selects in (True, False):
                with mock.patch.object(sorting, "selects", lambda *_, s=selects: s):
                    run = jax.jit(_top_k(k)).lower(x).compile()
                _require_equal(run(x), expected)
                seconds[selects] = _device_seconds({"": run}, [(x,)])[""]
            yield {
                "elements": size,
                "k": k,
                "selection, us": seconds[True] * 1e6,
                "network, us": seconds[False] * 1e6,
                "chosen": "selection" if sorting.selects(size, k) else "network",
                "best": "selection" if seconds[True] < seconds[False] else "network",
            }


def _top_k(k: int) -> Callable[..., Any]:
    def body(x_ref, values_ref, positions_ref):
        values_ref[...], positions_ref[...] = lax.top_k(x_ref[...], k)

    types = [jax.ShapeDtypeStruct((k,), t) for t in (jnp.float32, jnp.int32)]
    return plgpu.kernel(body, out_type=types)


TABLES = {
    "long": ("Sorts of 2^24 uint32", long_arrays),
    "rows": ("Sorts of rows", rows),
    "top_k": ("The largest of a vector, in one block", largest),
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    for name in options.only:
        title, table = TABLES[name]
        notes = f"Device times, medians of {ROUNDS} rounds."
        timing.report(title, list(table()), notes, options.json)


if __name__ == "__main__":
    main()
