# SPDX-License-Identifier: Apache-2.0
"""The ready kernels for SparseCores: calls, what NumPy computes, their streams."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu.sparsecore import ops

GATHER, SCATTER = "stream.indirect.gather", "stream.indirect.scatter"
ADD_F32, ADD_S32 = (f"stream.indirect.scatter.add.{t}" for t in ("f32", "s32"))
LOAD, STORE, DMA = "stream.linear.gather", "stream.linear.scatter", "dma.local"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
      call: the operation, of the arguments and options.
      args: makes arguments.
      expected: what NumPy computes of them, a list of arrays.
      large: makes arguments for which its loops are as fast as they get; None: it has
        no loop of its own over vectors.
      bundles: the most bundles of such a loop for a vector; more than 1.25 only where
        a slot of the bundles is needed more often.
    """

    call: Callable[..., Any]
    args: Callable[[np.random.Generator], list[Any]]
    expected: Callable[..., list[np.ndarray]]
    large: Callable[[], list[Any]] | None = None
    bundles: float = 1.25


def _lookup(dtype: Any, width: int, *, missing: bool = False) -> Case:
    def args(rng: np.random.Generator) -> list[Any]:
        rows = rng.integers(-1 if missing else 0, 60, 100).astype(np.int32)
        table = rng.integers(-99, 99, (60, width))
        return [jnp.asarray(table, dtype), rows]

    def expected(table: Any, rows: Any) -> list[np.ndarray]:
        found = np.asarray(table)[rows]
        return [np.where((rows < 0)[:, None], np.zeros_like(found), found)]

    def call(table: Any, rows: Any, **options: Any) -> Any:
        return ops.embedding_lookup(table, rows, missing=missing, **options)

    return Case(call, args, expected)


def _sums(width: int, dtype: Any, count: int = 50) -> Case:
    def args(rng: np.random.Generator) -> list[Any]:
        data = rng.integers(-9, 9, (300, width)).astype(dtype)
        return [data, rng.integers(-1, count + 2, 300).astype(np.int32)]

    def expected(data: Any, segments: Any) -> list[np.ndarray]:
        sums, known = np.zeros((count, width), dtype), segments < count
        known &= segments >= 0
        np.add.at(sums, segments[known], data[known])
        return [sums]

    def call(data: Any, segments: Any, **options: Any) -> Any:
        return ops.segment_sum(data, segments, count, **options)

    return Case(
        call,
        args,
        expected,
        lambda: [np.zeros((32768, width), dtype), np.zeros(32768, np.int32)],
    )


def _bag_args(rng: np.random.Generator) -> list[Any]:
    offsets = np.sort([0, *rng.integers(0, 333, 20), 333])
    return [
        rng.integers(-9, 9, (100, 64)).astype(np.float32),
        rng.integers(0, 100, 333).astype(np.int32),
        offsets.astype(np.int32),
    ]


def _bags(table: Any, rows: Any, offsets: Any) -> list[np.ndarray]:
    bags = itertools.pairwise(offsets)
    return [np.stack([table[rows[a:b]].sum(0) for a, b in bags])]


def _counts(x: Any) -> list[np.ndarray]:
    return [np.bincount(x[(x >= 0) & (x < 64)], minlength=64).astype(np.int32)]


def _different(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    numbers = rng.permutation(rows * columns) - columns
    return numbers.reshape(rows, columns)


def _sorted(keys: Any, values: Any) -> list[np.ndarray]:
    order = np.argsort(keys, 1)[:, ::-1]
    return [np.take_along_axis(x, order, 1) for x in (keys, values)]


def _largest(k: int) -> Case:
    def expected(x: Any) -> list[np.ndarray]:
        order = np.argsort(x, 1)[:, ::-1][:, :k].astype(np.int32)
        return [np.take_along_axis(x, order, 1), order]

    return Case(
        lambda x, **options: ops.top_k(x, k, **options),
        lambda rng: [_different(rng, 9, 60).astype(np.float32)],
        expected,
        large=(lambda: [np.zeros((64, 2048), np.float32)]) if k < 8 else None,
        # Two sorts for each, of which a bundle starts one.
        bundles=2.25,
    )


def _deduplicated(rows: Any) -> list[np.ndarray]:
    unique, inverse, counts = [], [], []
    for block in np.split(
        np.concatenate([rows, rows[-1:].repeat(-len(rows) % 256)]), 4
    ):
        found, places = np.unique(block, return_inverse=True)
        unique.append(np.pad(found, (0, 64 - len(found)), constant_values=-1))
        inverse.append(places)
        counts.append(len(found))
    where = np.concatenate(inverse)[: len(rows)]
    return [np.int32(x) for x in (np.stack(unique), where, counts)]


def _dispatched(x: Any, experts: Any) -> list[np.ndarray]:
    rows = np.zeros((8, 20, x.shape[1]), x.dtype)
    places, counts = np.full(len(experts), -1, np.int32), np.zeros(8, int)
    for token, expert in enumerate(experts):
        if 0 <= expert < 8 and counts[expert] < 20:
            rows[expert, counts[expert]] = x[token]
            places[token] = expert * 20 + counts[expert]
        if 0 <= expert < 8:
            counts[expert] += 1
    return [rows, places]


CASES: dict[str, Case] = {
    "embedding_lookup": _lookup(jnp.float32, 128),
    "embedding_lookup of 64": _lookup(jnp.float32, 64),
    "embedding_lookup of bf16": _lookup(jnp.bfloat16, 100),
    "embedding_lookup with missing rows": _lookup(jnp.bfloat16, 64, missing=True),
    "segment_sum": _sums(128, np.float32),
    "segment_sum of 32": _sums(32, np.int32),
    "embedding_bag": Case(
        ops.embedding_bag,
        _bag_args,
        _bags,
        lambda: [
            np.zeros((100, 64), np.float32),
            np.zeros(32768, np.int32),
            np.zeros(21, np.int32),
        ],
    ),
    "histogram": Case(
        lambda x, **options: ops.histogram(x, 64, **options),
        lambda rng: [rng.integers(-3, 70, 1000).astype(np.int32)],
        _counts,
        large=lambda: [np.zeros(65536, np.int32)],
        # A load and an adding store have one slot.
        bundles=2,
    ),
    "sort": Case(
        ops.sort,
        lambda rng: [_different(rng, 9, 40).astype(np.int32)],
        lambda keys: [np.sort(keys, 1)],
        large=lambda: [np.zeros((64, 1024), np.int32)],
    ),
    "sort with values": Case(
        lambda *x, **options: ops.sort(*x, descending=True, **options),
        lambda rng: [
            _different(rng, 9, 64).astype(np.float32),
            rng.integers(0, 99, (9, 64)).astype(np.int32),
        ],
        _sorted,
        large=lambda: [
            np.zeros((64, 1024), np.float32),
            np.zeros((64, 1024), np.int32),
        ],
    ),
    "top_k": _largest(5),
    "top_k of more than a register": _largest(40),
    "deduplicate": Case(
        lambda rows, **options: ops.deduplicate(
            rows, block=64 if rows.size < 2048 else 2048, **options
        ),
        lambda rng: [rng.integers(0, 30, 250).astype(np.int32)],
        _deduplicated,
        large=lambda: [np.zeros(131072, np.int32)],
    ),
    "dispatch": Case(
        lambda x, experts, **options: ops.dispatch(
            x, experts, 8 if len(x) < 2048 else 64, 20, **options
        ),
        lambda rng: [
            rng.integers(-9, 9, (220, 32)).astype(np.float32),
            rng.integers(-1, 9, 220).astype(np.int32),
        ],
        _dispatched,
        large=lambda: [np.zeros((8192, 32), np.float32), np.zeros(8192, np.int32)],
        bundles=2,  # as of histogram
    ),
}


# What libtpu makes of the cases: copies in the code by their kind, words of VMEM
# and of VMEM_SHARED, on v5p, v6e and tpu7x.
OnChips = tuple[int, int, int]
MADE: dict[str, tuple[dict[str, OnChips], OnChips, OnChips]] = {
    "embedding_lookup": (
        {GATHER: (1, 1, 2), LOAD: (1, 1, 2), STORE: (1, 1, 2)},
        (2176, 2176, 4224),
        (0, 0, 0),
    ),
    "embedding_lookup of 64": (
        {GATHER: (1, 1, 2), LOAD: (1, 1, 2), STORE: (1, 1, 2)},
        (1040, 1040, 2080),
        (0, 0, 0),
    ),
    "embedding_lookup of bf16": (
        {GATHER: (1, 1, 2), LOAD: (1, 1, 2), STORE: (1, 1, 2)},
        (912, 912, 1824),
        (0, 0, 0),
    ),
    "embedding_lookup with missing rows": (
        {GATHER: (1, 1, 2), LOAD: (2, 2, 4), STORE: (1, 1, 2)},
        (528, 528, 1056),
        (0, 0, 0),
    ),
    "segment_sum": (
        {DMA: (2, 4, 4), ADD_F32: (3, 6, 4), LOAD: (4, 8, 6)},
        (2304, 2304, 4352),
        (16384, 16384, 16384),
    ),
    "segment_sum of 32": (
        {DMA: (2, 4, 4), ADD_S32: (3, 6, 4), LOAD: (4, 8, 6)},
        (560, 560, 1088),
        (4096, 4096, 4096),
    ),
    "embedding_bag": (
        {DMA: (2, 2, 4), GATHER: (3, 3, 4), ADD_F32: (3, 3, 4), LOAD: (2, 2, 4)},
        (1072, 1072, 2112),
        (8192, 8192, 8192),
    ),
    "histogram": (
        {DMA: (1, 1, 1), ADD_S32: (1, 1, 1), LOAD: (1, 1, 1), STORE: (1, 1, 1)},
        (288, 320, 576),
        (128, 128, 256),
    ),
    "sort": ({LOAD: (1, 1, 1), STORE: (1, 1, 1)}, (2048, 2048, 2048), (0, 0, 0)),
    "sort with values": (
        {LOAD: (2, 2, 2), STORE: (2, 2, 2)},
        (4096, 4096, 4096),
        (0, 0, 0),
    ),
    "top_k": ({LOAD: (1, 1, 1), STORE: (2, 2, 2)}, (1280, 1280, 1536), (0, 0, 0)),
    "top_k of more than a register": (
        {LOAD: (2, 2, 2), STORE: (2, 2, 2)},
        (4096, 4096, 4096),
        (0, 0, 0),
    ),
    "deduplicate": ({LOAD: (1, 1, 1), STORE: (3, 3, 3)}, (544, 544, 576), (0, 0, 0)),
    "dispatch": (
        {
            DMA: (1, 1, 1),
            GATHER: (1, 1, 2),
            SCATTER: (1, 1, 1),
            LOAD: (4, 4, 6),
            STORE: (4, 4, 5),
        },
        (528, 528, 1056),
        (384, 384, 512),
    ),
}
