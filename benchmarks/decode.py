# SPDX-License-Identifier: Apache-2.0
"""Decode attention on a GPU: ours, cuDNN's and XLA's, beside a copy, in one run.

python -m benchmarks.decode [--json] [--batch N ...]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import beside_copy, timing
from pallas_gpu import ops

HEADS, KV_HEADS, HEAD_DIM, KV_LEN = 32, 8, 128, 8192
BATCHES = 1, 16, 128
# Sets of operands of at least so many bytes: each candidate of a round reads another
# one, and between two calls with one set others read more than the L2 holds.
COLD_BYTES = 320 * 2**20
# Sequences whose results are compared with float32.
CHECKED = 2
LARGEST_ERROR = 5e-3
# Elements of 8 bits are those of the cache times this, rounded.
NARROW_FACTOR = 16
COPIED_BYTES = 2**30
Function = Callable[..., Any]


# --- operands -------------------------------------------------------------------------


def make_inputs(batch: int) -> list[tuple[Any, ...]]:
    """Returns several sets of q, k and v."""
    kv = batch, KV_LEN, KV_HEADS, HEAD_DIM
    sets = -(-COLD_BYTES // (4 * math.prod(kv)))

    def normal(seed: int, shape: tuple[int, ...]) -> Any:
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

    q = batch, 1, HEADS, HEAD_DIM
    shapes = q, kv, kv
    return [
        tuple(normal(3 * i + j, shape) for j, shape in enumerate(shapes))
        for i in range(sets)
    ]


@functools.partial(jax.jit, static_argnums=1)
def narrow(x: Any, dtype: Any) -> Any:
    """Returns a cache in 8 bits."""
    x = x.astype(jnp.float32) * NARROW_FACTOR
    if dtype == jnp.int8:
        x = jnp.clip(jnp.round(x), -127, 127)
    return x.astype(dtype)


def page_table(batch: int, page_size: int) -> Any:
    """Returns a permutation of all pages."""
    pages = np.random.default_rng(0).permutation(batch * KV_LEN // page_size)
    return jnp.asarray(pages.reshape(batch, -1), jnp.int32)


def in_pages(x: Any, page_size: int, table: Any) -> Any:
    """Returns a cache whose pages lie where the table says."""
    pages = x.reshape(-1, page_size, KV_HEADS, HEAD_DIM)
    return pages[jnp.argsort(table.reshape(-1))]


# --- candidates -----------------------------------------------------------------------


def standard(implementation: str) -> Function:
    """Returns a kernel of JAX."""
    return functools.partial(
        jax.nn.dot_product_attention, implementation=implementation
    )


def contest(
    batch: int, inputs: list[tuple[Any, ...]]
) -> dict[str, tuple[Function, list[tuple[Any, ...]], int]]:
    """Returns candidates, their operands, and the bytes of an element of the cache."""
    found: dict[str, Any] = {
        "cuDNN through JAX": (standard("cudnn"), inputs, 2),
        "XLA": (standard("xla"), inputs, 2),
        "pallas_gpu": (ops.decode_attention, inputs, 2),
    }
    lengths = jnp.full((batch,), KV_LEN, jnp.int32)

    def with_lengths(q, k, v, n):
        return ops.decode_attention(q, k, v, lengths=n)

    def with_pages(q, k, v, n, table):
        return ops.decode_attention(q, k, v, lengths=n, page_table=table)

    def scaled(q, k, v):
        factor = 1 / NARROW_FACTOR
        return ops.decode_attention(q, k, v, k_scale=factor, v_scale=factor)

    given = [(*x, lengths) for x in inputs]
    found["pallas_gpu, lengths"] = with_lengths, given, 2
    for size in (16, 64):
        table = page_table(batch, size)
        moved = [
            (q, *(in_pages(x, size, table) for x in kv), lengths, table)
            for q, *kv in inputs
        ]
        found[f"pallas_gpu, lengths, pages of {size}"] = with_pages, moved, 2
    for dtype in (jnp.float8_e4m3fn, jnp.int8):
        small = [(q, narrow(k, dtype), narrow(v, dtype)) for q, k, v in inputs]
        found[f"pallas_gpu, {jnp.dtype(dtype).name}"] = scaled, small, 1
    return found


@jax.jit
def reference(q: Any, k: Any, v: Any) -> Any:
    """Returns attention of the first sequences in float32."""
    q, k, v = (x[:CHECKED].astype(jnp.float32) for x in (q, k, v))
    heads = q.reshape(q.shape[0], KV_HEADS, -1, HEAD_DIM)
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scores = product("bhgd,bkhd->bhgk", heads, k) / math.sqrt(HEAD_DIM)
    out = product("bhgk,bkhd->bhgd", jax.nn.softmax(scores, -1), v)
    return out.reshape(q.shape)


def relative_error(f: Function, name: str, args: Any, inputs: Any) -> float:
    """Returns the error of a candidate, of 8 bits against the rounded cache."""
    q, k, v = inputs
    if args[1].dtype.itemsize == 1:
        k, v = (x.astype(jnp.float32) / NARROW_FACTOR for x in args[1:3])
    expected = reference(q, k, v)
    got = f(*args)[:CHECKED].astype(jnp.float32)
    return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))


# --- measurement ----------------------------------------------------------------------


def measure(batch: int, source: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Checks the candidates, then times them beside a copy of `source`."""
    inputs = make_inputs(batch)
    candidates = contest(batch, inputs)
    jitted = {name: jax.jit(f) for name, (f, _, _) in candidates.items()}
    lowered = {n: f.lower(*candidates[n][1][0]) for n, f in jitted.items()}
    with ThreadPoolExecutor() as pool:
        executables = pool.map(lambda x: x.compile(), lowered.values())
        compiled = dict(zip(lowered, executables, strict=True))
    errors, failures, runs = {}, [], {}
    for i, (name, f) in enumerate(compiled.items()):
        _, sets, _ = candidates[name]
        error = relative_error(f, name, sets[0], inputs[0])
        if not error < LARGEST_ERROR:
            failures.append(f"batch {batch}, {name}: relative error {error}")
            continue
        errors[name] = error
        first = i % len(sets)
        turns = itertools.cycle(sets[first:] + sets[:first])
        runs[name] = lambda f=f, turns=turns: f(*next(turns))
    times = beside_copy.interleaved(runs, source)
    copied = 2 * COPIED_BYTES / times[beside_copy.COPY]
    rows = []
    for name, error in errors.items():
        size = 2 * batch * KV_LEN * KV_HEADS * HEAD_DIM * candidates[name][2]
        seconds = times[name]
        rows.append(
            {
                "batch": batch,
                "kernel": name,
                "µs": seconds * 1e6,
                "TB/s of K and V": size / seconds / 1e12,
                "of the copy": size / seconds / copied,
                "of cuDNN": times["cuDNN through JAX"] / seconds,
                "rel. error": error,
            }
        )
    return rows, failures


def main() -> None:
    """Prints the table, followed by the failures."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--batch", action="append", type=int)
    options = parser.parse_args()
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    rows, failures = [], []
    for batch in options.batch or BATCHES:
        found, failed = measure(batch, source)
        rows += found
        failures += failed
    notes = (
        f"bfloat16, random normal, one query, {HEADS} heads, {KV_HEADS} of K and V, "
        f"head_dim {HEAD_DIM}, {KV_LEN} tokens in each sequence; device times, medians "
        f"of {beside_copy.ROUNDS} rounds; errors of {CHECKED} sequences against "
        "float32."
    )
    timing.report("Decode attention", rows, notes, options.json)
    if failures:
        print("\nFailed:\n\n" + "\n".join(f"- {text}" for text in failures))


if __name__ == "__main__":
    main()
