# SPDX-License-Identifier: Apache-2.0
"""Copies on a GPU: streams, gather, a product that TMA adds up, and their rivals.

python -m benchmarks.copies [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import copy_kernels, timing
from benchmarks.beside_copy import COPY, ROUNDS, interleaved, wait
from benchmarks.split_products import SplitProduct, split_product
from pallas_gpu import ops

# Full sizes: 2 GiB of bf16, rows of 4 KiB, and a product of few elements and a long K.
STREAM = (2**30 // copy_kernels.WIDTH, copy_kernels.WIDTH)
ROWS = (2**19, 2048)
PRODUCT = (256, 256, 65536)
_BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Work:
    """One row of the table.

    Attributes:
      name: what is done, with its size.
      inputs: the arrays of a call; calls use them in turn.
      source: what the device copy copies.
      moved_bytes: bytes that it has to read and write.
      ours: candidates of this package, by name; the fastest counts.
      rivals: candidates of others: functions that wait for their result.
      xla: the same in plain JAX, the rival `XLA`.
      exact: what results are compared with; None: the first array itself.
      tolerance: of the relative error of the result.
      target: what the fastest of ours should reach, of the fastest rival.
    """

    name: str
    inputs: list[tuple[Any, ...]]
    source: Any
    moved_bytes: int
    ours: Mapping[str, Callable[..., Any]]
    rivals: Mapping[str, Callable[..., Any]]
    xla: Callable[..., Any] | None
    exact: Callable[..., Any] | None
    tolerance: float
    target: float


# Rows of 512 bytes and tiles of a block, and blocks on an SM, of copies by TMA: from
# 64 to 192 KiB are under way on each SM. docs/performance.md has others, which are
# slower: hints to the L2 cache, clusters, tiles far apart, blocks that stay.
_STREAMS = [
    (32, 4, 3), (64, 4, 1), (32, 4, 2), (32, 4, 1), (64, 2, 1), (16, 8, 1), (64, 1, 4),
    (64, 1, 3), (64, 1, 2), (32, 1, 8), (32, 1, 4), (16, 1, 12), (16, 1, 8),
]  # fmt: skip


def streams(blocks: int = 132) -> dict[str, Callable[..., Any]]:
    """Returns the copies by TMA; one by blocks that stay on their SMs."""
    found = {
        f"TMA, {resident} x {slots} x {rows // 2} KiB": copy_kernels.stream(
            rows, slots, resident=resident
        )
        for rows, slots, resident in _STREAMS
    }
    ring = copy_kernels.ring(64, 6, _divisor(blocks, 64))
    return {**found, "TMA, ring of 6 x 32 KiB": ring}


def _divisor(blocks: int, rows: int) -> int:
    """The number of blocks of a ring: it divides the number of tiles."""
    tiles = STREAM[0] // rows
    return next(n for n in range(blocks, 0, -1) if tiles % n == 0)


def thread_streams() -> dict[str, Callable[..., Any]]:
    """Returns the copies by cp.async."""
    return {
        f"cp.async, {slots} tiles of {rows // 2} KiB": copy_kernels.stream(
            rows, slots, by_threads=True
        )
        for rows, slots in ((16, 4), (32, 4), (32, 8))
    }


def gathers() -> dict[str, Callable[..., Any]]:
    """Returns the gathers of rows of 4 KiB."""
    return {
        f"{slots} groups of {rows} rows": copy_kernels.gather(rows, slots)
        for rows, slots in ((4, 4), (8, 2), (4, 8), (8, 4))
    }


def products() -> dict[str, Callable[..., Any]]:
    """Returns the products whose parts TMA adds up."""
    return {
        f"{c.parts} parts, tiles of {c.tile_m}x{c.tile_n}": split_product(c)
        for c in (
            SplitProduct(16, tile_m=64, stages=8),
            SplitProduct(32, tile_m=64, tile_n=256),
            SplitProduct(32),
        )
    }


# What is compiled for each row, for tests without a GPU: kernels, shapes and dtypes.
CASES: dict[str, Callable[[], list[tuple[Any, list[Any]]]]] = {
    "streams": lambda: [(f, [(STREAM, _BF16)]) for f in streams().values()],
    "streams by threads": lambda: [
        (f, [(STREAM, _BF16)]) for f in thread_streams().values()
    ],
    "gathers": lambda: [
        (f, [(ROWS, _BF16), (ROWS[:1], jnp.int32)]) for f in gathers().values()
    ],
    "products": lambda: [
        (f, [((PRODUCT[0], PRODUCT[2]), _BF16), ((PRODUCT[2], PRODUCT[1]), _BF16)])
        for f in products().values()
    ],
}


def works() -> list[Callable[[], Work]]:
    """Returns functions that make each row's arrays when it is measured."""
    from benchmarks import triton_copies as triton

    @functools.partial(jax.jit, static_argnums=(0,))
    def normal(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, _BF16)

    def stream(name: str, ours: Mapping[str, Any], target: float) -> Work:
        x = normal(STREAM)
        size = 2 * x.nbytes
        return Work(name, [(x,)], x, size, ours, {}, None, None, 0.0, target)

    def gather() -> Work:
        x, taken = normal(ROWS), functools.partial(jnp.take, axis=0)
        rows = jax.random.permutation(jax.random.key(1), ROWS[0]).astype(jnp.int32)
        rivals = {
            f"Triton {rows}x{warps}": triton.gather(rows, warps)
            for rows, warps in ((1, 4), (2, 8), (4, 8))
        }
        return Work(
            "gather of rows of 4 KiB, 2 GiB", [(x, rows)], x, 2 * x.nbytes, gathers(),
            rivals, taken, taken, 0.0, 0.9,
        )  # fmt: skip

    def product() -> Work:
        m, n, k = PRODUCT
        # The L2 does not hold what was read two calls before.
        inputs = [(normal((m, k), i), normal((k, n), i + 3)) for i in range(3)]
        size = sum(x.nbytes for x in inputs[0])
        ours = {**products(), "ops.matmul": _matmul}
        return Work(
            f"product {m}x{n}x{k} of bf16", inputs, normal(STREAM), size, ours, {},
            functools.partial(jnp.matmul, preferred_element_type=jnp.float32),
            _exact, 1e-3, 1.0,
        )  # fmt: skip

    return [
        lambda: stream("copy of 2 GiB by TMA", streams(_sms()), 0.99),
        lambda: stream("copy of 2 GiB by cp.async", thread_streams(), 0.90),
        gather,
        product,
    ]


_matmul = functools.partial(ops.matmul, out_dtype=jnp.float32)


def _exact(a: Any, b: Any) -> Any:
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")


def _sms() -> int:
    return getattr(jax.devices()[0], "core_count", 132)


def measure(work: Work) -> list[dict[str, Any]]:
    """Checks and measures the candidates of a row, interleaved."""
    import torch

    exact = work.exact or (lambda x: x)
    jitted = {**work.ours, **({"XLA": work.xla} if work.xla else {})}
    functions: dict[str, Callable[..., Any]] = {
        name: functools.partial(wait, jax.jit(f)) for name, f in jitted.items()
    }
    functions |= {name: lambda args, f=f: f(*args) for name, f in work.rivals.items()}
    first = work.inputs[0]
    expected = _sample(jax.jit(exact)(*first))
    errors = {name: _error(f(first), expected) for name, f in functions.items()}
    wrong = {name: e for name, e in errors.items() if not e <= work.tolerance}
    if wrong:
        raise AssertionError(f"{work.name}: wrong results: {wrong}")
    inputs = itertools.cycle(work.inputs)
    candidates: dict[str, Callable[[], Any]] = {
        name: lambda f=f: f(next(inputs)) for name, f in functions.items()
    }
    seconds = interleaved(candidates, torch.from_dlpack(work.source))
    copied = 2 * work.source.nbytes / seconds[COPY]
    rivals = [name for name in seconds if name not in work.ours and name != COPY]
    rival = min(rivals or [COPY], key=seconds.__getitem__)
    own = min(work.ours, key=seconds.__getitem__)
    rows = []
    for name, spent in sorted(seconds.items(), key=lambda item: item[1]):
        if name == COPY and work.source is not first[0]:
            continue
        moved = 2 * work.source.nbytes if name == COPY else work.moved_bytes
        rows.append(
            {
                "work": work.name,
                "by": f"**{name}**" if name == own else name,
                "us": spent * 1e6,
                "TB/s": moved / spent / 1e12,
                "of the best rival": seconds[rival] / spent,
                "of the copy": moved / spent / copied,
                "error": errors.get(name, ""),
                "target": work.target if name == own else "",
            }
        )
    return rows


def _sample(x: Any) -> np.ndarray:
    """Returns every so many elements of a result, the first and the last ones."""
    flat = x.reshape(-1)
    parts = [flat[:65536], flat[-65536:], flat[:: max(len(flat) // 65536, 1) | 1]]
    parts = [p.float().cpu() if hasattr(p, "cpu") else p for p in parts]
    return np.concatenate([np.asarray(p).astype(np.float64) for p in parts])


def _error(got: Any, expected: np.ndarray) -> float:
    """Returns the relative error in the Euclidean norm, of a sample."""
    return float(np.linalg.norm(_sample(got) - expected) / np.linalg.norm(expected))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch
    import triton

    rows = [row for work in works() for row in measure(work())]
    notes = (
        f"torch {torch.__version__}, Triton {triton.__version__}. Random normal; "
        f"device times, medians of {ROUNDS} rounds in a shuffled order. The fastest of "
        "ours is in bold, with its target: of the best rival, or of the device copy."
    )
    timing.report("Copies", rows, notes, options.json)


if __name__ == "__main__":
    main()
