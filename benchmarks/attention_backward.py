# SPDX-License-Identifier: Apache-2.0
"""Attention forward with backward on a GPU: ours, upstream's and cuDNN's, in one run.

python -m benchmarks.attention_backward [--json] [--shape NAME ...] [--rounds N]
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import attention_mgpu as upstream

from benchmarks import timing
from benchmarks.attention import Shape
from pallas_gpu import ops

INPUTS = 2
LARGEST_ERROR = 1.5e-2
# Products of the backward pass are 2.5 times those of the forward pass.
PASSES = 3.5


SHAPES = {
    "512": Shape(32, 512, 16, 128),
    "2k-causal": Shape(8, 2048, 16, 128, causal=True),
    "8k-causal": Shape(2, 8192, 16, 128, causal=True),
    "16k-causal": Shape(1, 16384, 16, 128, causal=True),
    "d64-causal": Shape(8, 2048, 32, 64, causal=True),
    "d256-causal": Shape(2, 4096, 8, 256, causal=True),
    "d256": Shape(2, 4096, 8, 256),
    "gqa-causal": Shape(2, 4096, 32, 128, causal=True, kv_heads=4),
    "1000-causal": Shape(16, 1000, 16, 128, causal=True),
    "64k-causal": Shape(1, 65536, 2, 128, causal=True),
}
Function = Callable[..., Any]


# --- candidates -----------------------------------------------------------------------
# The arguments are (q, k, v, dO) in bfloat16 and in float16, which upstream's kernels
# take; the results are the output and the three derivatives.


def with_backward(f: Function, takes_halves: bool = False) -> Function:
    """Returns the function that also computes derivatives."""

    def both(*operands):
        q, k, v, do = operands[4:] if takes_halves else operands[:4]
        out, vjp = jax.vjp(f, q, k, v)
        return out, *vjp(do)

    return both


def cudnn(s: Shape) -> Function:
    """Returns cuDNN's kernels through JAX."""
    return functools.partial(
        jax.nn.dot_product_attention, is_causal=s.causal, implementation="cudnn"
    )


def peer(s: Shape, blocks: tuple[int, int, int, int]) -> Function:
    """Returns upstream's kernels, which apply no scale."""
    config = upstream.TuningConfig(
        block_q=64,
        block_kv=128 if s.head_dim <= 128 else 64,
        max_concurrent_steps=2,
        use_schedule_barrier=True,
        causal=s.causal,
        block_q_dkv=blocks[0],
        block_kv_dkv=blocks[1],
        block_q_dq=blocks[2],
        block_kv_dq=blocks[3],
    )
    scale = 1 / math.sqrt(s.head_dim)
    return lambda q, k, v: upstream.attention(q * scale, k, v, config)


def ours(s: Shape, **options: Any) -> Function:
    """Returns this package's kernels."""
    return functools.partial(ops.attention, causal=s.causal, **options)


def contest(s: Shape) -> dict[str, Function]:
    """Returns the candidates."""
    candidates = {
        "cuDNN through JAX": cudnn(s),
        "upstream": peer(s, (64, 64, 64, 64)),
        "upstream, 128": peer(s, (64, 128, 128, 64)),
        "pallas_gpu": ours(s),
        "pallas_gpu, deterministic": ours(s, deterministic=True),
    }
    return {
        name: with_backward(f, name.startswith("upstream"))
        for name, f in candidates.items()
    }


# --- measurement ----------------------------------------------------------------------


def make_inputs(s: Shape) -> list[tuple[Any, ...]]:
    """Returns several sets of (q, k, v, dO), and of the same in float16."""
    shapes = s.dims, s.kv_dims, s.kv_dims, s.dims
    keys = jax.random.split(jax.random.key(0), (INPUTS, len(shapes)))
    pairs = [zip(row, shapes, strict=True) for row in keys]
    sets = [[jax.random.normal(k, x, jnp.bfloat16) for k, x in p] for p in pairs]
    return [(*x, *(part.astype(jnp.float16) for part in x)) for x in sets]


@functools.partial(jax.jit, static_argnums=(4,))
def reference(q: Any, k: Any, v: Any, do: Any, causal: bool) -> Any:
    """Returns out, dQ, dK and dV of the heads of one head of K and V, in float32.

    A loop over tiles of rows, so that the scores of long sequences fit.
    """
    length, group, head_dim = q.shape
    rows = math.gcd(length, 1024)
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scale = 1 / math.sqrt(head_dim)

    def tile(carry: Any, operands: Any) -> Any:
        first, q, do = operands
        s = product("qgd,kd->gqk", q, k) * scale
        if causal:
            row = first + jnp.arange(rows)[:, None]
            s = jnp.where(jnp.arange(length) <= row, s, -jnp.inf)
        p = jax.nn.softmax(s, axis=2)
        out = product("gqk,kd->qgd", p, v)
        dp = product("qgd,kd->gqk", do, v)
        ds = p * (dp - jnp.sum(out * do, axis=2).T[..., None]) * scale
        dk, dv = carry
        dk += product("gqk,qgd->kd", ds, q)
        dv += product("gqk,qgd->kd", p, do)
        return (dk, dv), (out, product("gqk,kd->qgd", ds, k))

    tiled = [x.reshape(-1, rows, group, head_dim) for x in (q, do)]
    zeros = jnp.zeros_like(k), jnp.zeros_like(v)
    firsts = jnp.arange(0, length, rows)
    (dk, dv), (out, dq) = jax.lax.scan(tile, zeros, (firsts, *tiled))
    return out.reshape(q.shape), dq.reshape(q.shape), dk, dv


def expected(s: Shape, inputs: tuple[Any, ...]) -> Any:
    """Returns the reference of the last head of K and V of the last sequence."""
    group = s.dims[2] // s.kv_dims[2]
    q, k, v, do = (x[-1].astype(jnp.float32) for x in inputs[:4])
    return reference(q[:, -group:], k[:, -1], v[:, -1], do[:, -group:], s.causal)


def relative_errors(s: Shape, results: Any, wanted: Any) -> list[float]:
    """Returns the relative errors of out, dQ, dK and dV."""
    group = s.dims[2] // s.kv_dims[2]
    parts = [slice(-group, None), slice(-group, None), -1, -1]
    errors = []
    for result, part, want in zip(results, parts, wanted, strict=True):
        got = result[-1, :, part].astype(jnp.float32)
        errors.append(float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)))
    return errors


def accurate(
    s: Shape, candidates: Mapping[str, Function], inputs: tuple[Any, ...]
) -> tuple[dict[str, tuple[Function, list[float]]], list[str]]:
    """Returns the working candidates with their errors, and the others' failures."""
    wanted = expected(s, inputs)
    working, failures = {}, []
    for name, f in candidates.items():
        compiled = jax.jit(f)
        try:
            errors = relative_errors(s, compiled(*inputs), wanted)
        except Exception as e:
            text = " ".join(f"{type(e).__name__}: {e}".split())
            failures.append(f"{name}: {text[:300]}")
            continue
        if max(errors) < LARGEST_ERROR:
            working[name] = compiled, errors
        else:
            failures.append(f"{name}: relative errors {errors}")
    return working, failures


def rows_of(
    label: str, working: Mapping[str, Any], times: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Returns the table's rows of one problem."""
    s, rows = SHAPES[label], []
    rivals = {
        of: min((t for name, t in times.items() if name.startswith(of)), default=None)
        for of in ("cuDNN", "upstream")
    }
    for name, (_, errors) in working.items():
        row = {
            "shape": label,
            "kernels": name,
            "µs": times[name] * 1e6,
            "TFLOP/s": PASSES * s.flops / times[name] / 1e12,
            "error of out": errors[0],
            "of derivatives": max(errors[1:]),
        }
        for of, other in rivals.items():
            row[f"of {of}"] = "" if other is None else other / times[name]
        rows.append(row)
    return rows


def measure(label: str, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Times the candidates on one problem; checks them against float32."""
    s = SHAPES[label]
    inputs = make_inputs(s)
    working, failures = accurate(s, contest(s), inputs[0])
    functions = {name: f for name, (f, _) in working.items()}
    times = timing.on_device(functions, inputs, rounds=rounds)
    return rows_of(label, working, times), [f"{label}: {text}" for text in failures]


def main() -> None:
    """Prints the table, followed by the failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    rows, failures = [], []
    for label in options.shape or SHAPES:
        found, failed = measure(label, options.rounds)
        rows += found
        failures += failed
    shapes = "; ".join(
        f"{n}: {s.dims}" + (f", {s.kv_heads} kv heads" if s.kv_heads else "")
        for n, s in SHAPES.items()
    )
    notes = (
        "bfloat16 (upstream: float16), random normal, (batch, length, heads, head_dim) "
        f"{shapes}; device times of forward and backward, medians of {options.rounds} "
        "rounds of one call of each in a shuffled order; TFLOP/s of "
        f"{PASSES} times the forward "
        "pass's operations; relative errors of one head of K and V against float32. "
        "Products with the scale before upstream's kernels are counted, too."
    )
    if rows:
        ratios = [r["of cuDNN"] for r in rows if r["kernels"] == "pallas_gpu"]
        mean = float(np.exp(np.mean(np.log(ratios)))) if ratios else math.nan
        notes += f" Geometric mean of ours, of cuDNN: {mean:.4g}."
        title = "Attention forward and backward"
        timing.report(title, rows, notes, options.json)
    if failures and not options.json:
        print("\nFailed:\n\n" + "\n".join(f"- {text}" for text in failures))


if __name__ == "__main__":
    main()
