# SPDX-License-Identifier: Apache-2.0
"""Copies on a GPU: streams, gather, a product that TMA adds up, and their rivals.

python -m benchmarks.copies [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import copy_kernels, timing
from benchmarks.beside_copy import COPY, ROUNDS, interleaved, wait

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
      args: the arrays.
      moved_bytes: bytes that it has to read and write.
      ours: candidates of this package, by name; the fastest counts.
      rivals: candidates of others: functions that wait for their result.
      reference: the same in plain JAX, and the rival `XLA`.
      tolerance: of the relative error of the result.
      target: what the fastest of ours should reach, of the fastest rival.
    """

    name: str
    args: tuple[Any, ...]
    moved_bytes: int
    ours: Mapping[str, Callable[..., Any]]
    rivals: Mapping[str, Callable[..., Any]]
    reference: Callable[..., Any] | None
    tolerance: float
    target: float


def streams(blocks: int = 132) -> dict[str, Callable[..., Any]]:
    """Returns the copies by TMA; some by blocks that stay on their SMs."""
    return {
        "TMA, 4 tiles of 16 KiB": copy_kernels.stream(32, 4),
        "TMA, 2 tiles of 32 KiB": copy_kernels.stream(64, 2),
        "TMA, ring of 8 x 16 KiB": copy_kernels.ring(32, 8, _divisor(blocks, 32)),
        "TMA, ring of 6 x 32 KiB": copy_kernels.ring(64, 6, _divisor(blocks, 64)),
    }


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
        for rows, slots in ((16, 4), (32, 2), (32, 4))
    }


def gathers() -> dict[str, Callable[..., Any]]:
    """Returns the gathers of rows of 4 KiB."""
    return {
        f"{slots} groups of {rows} rows": copy_kernels.gather(rows, slots)
        for rows, slots in ((4, 2), (8, 2), (4, 4))
    }


def products() -> dict[str, Callable[..., Any]]:
    """Returns the products whose parts TMA adds up."""
    return {
        f"{n} parts, tiles of {rows}x128": copy_kernels.split_product(n, depth, rows)
        for n, depth, rows in ((32, 6, 128), (32, 4, 64), (16, 4, 64))
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
    def normal(shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(jax.random.key(0), shape, _BF16)

    def stream(name: str, ours: Mapping[str, Any], target: float) -> Work:
        x = normal(STREAM)
        return Work(name, (x,), 2 * x.nbytes, ours, {}, None, 0.0, target)

    def gather() -> Work:
        x = normal(ROWS)
        rows = jax.random.permutation(jax.random.key(1), ROWS[0]).astype(jnp.int32)
        rivals = {
            f"Triton {rows}x{warps}": triton.gather(rows, warps)
            for rows, warps in ((1, 4), (2, 8), (4, 8))
        }
        return Work(
            "gather of rows of 4 KiB, 2 GiB", (x, rows), 2 * x.nbytes, gathers(),
            rivals, lambda x, rows: jnp.take(x, rows, axis=0), 0.0, 0.9,
        )  # fmt: skip

    def product() -> Work:
        m, n, k = PRODUCT
        a, b = normal((m, k)), normal((k, n))
        return Work(
            f"product {m}x{n}x{k} of bf16", (a, b), a.nbytes + b.nbytes, products(), {},
            functools.partial(jnp.matmul, preferred_element_type=jnp.float32),
            1e-3, 1.0,
        )  # fmt: skip

    return [
        lambda: stream("copy of 2 GiB by TMA", streams(_sms()), 0.99),
        lambda: stream("copy of 2 GiB by cp.async", thread_streams(), 0.90),
        gather,
        product,
    ]


def _sms() -> int:
    return getattr(jax.devices()[0], "core_count", 132)


def measure(work: Work) -> list[dict[str, Any]]:
    """Checks and measures the candidates of a row, interleaved."""
    import torch

    reference = work.reference or (lambda x: x)
    jitted = {**work.ours, **({"XLA": work.reference} if work.reference else {})}
    candidates: dict[str, Callable[[], Any]] = {
        name: functools.partial(wait, jax.jit(f), work.args)
        for name, f in jitted.items()
    }
    for name, f in work.rivals.items():
        candidates[name] = functools.partial(f, *work.args)
    expected = _sample(jax.jit(reference)(*work.args))
    errors = {name: _error(run(), expected) for name, run in candidates.items()}
    wrong = {name: e for name, e in errors.items() if not e <= work.tolerance}
    if wrong:
        raise AssertionError(f"{work.name}: wrong results: {wrong}")
    seconds = interleaved(candidates, torch.from_dlpack(work.args[0]))
    copied = 2 * work.args[0].nbytes / seconds[COPY]
    rivals = [name for name in seconds if name not in work.ours and name != COPY]
    rival = min(rivals or [COPY], key=seconds.__getitem__)
    own = min(work.ours, key=seconds.__getitem__)
    rows = []
    for name, spent in sorted(seconds.items(), key=lambda item: item[1]):
        moved = 2 * work.args[0].nbytes if name == COPY else work.moved_bytes
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
