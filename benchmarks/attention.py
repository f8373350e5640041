# SPDX-License-Identifier: Apache-2.0
"""Forward attention on a GPU: ours, upstream's and cuDNN's, in one run.

python -m benchmarks.attention [--json] [--tune] [--shapes ten] [--shape NAME ...]
    [--rounds N]

`--shapes ten` measures ten shapes of training and of long prompts, in bfloat16, beside
cuDNN; `--shapes windows` sliding windows. `--tune` measures many of our configurations
instead, and prints the fastest first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention_mgpu as upstream

import pallas_gpu as plgpu
from benchmarks import timing
from pallas_gpu import ops

INPUTS = 3
# Rows of Q whose results are compared with float32; the last ones attend to all of K.
CHECKED_ROWS = 512
LARGEST_ERROR = 5e-3
SMS = 132


@dataclasses.dataclass(frozen=True)
class Shape:
    """One problem."""

    batch: int
    length: int
    heads: int
    head_dim: int
    causal: bool = False
    kv_heads: int | None = None
    dtype: Any = jnp.float16
    window: int | None = None

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """Shape of Q and the result."""
        return self.batch, self.length, self.heads, self.head_dim

    @property
    def kv_dims(self) -> tuple[int, int, int, int]:
        """Shape of K and V."""
        return self.batch, self.length, self.kv_heads or self.heads, self.head_dim

    @property
    def flops(self) -> float:
        """Operations of both products; a causal mask halves them."""
        scores: float = self.length**2
        if self.window is not None:
            scores = self.length * (self.window + 1)
        elif self.causal:
            scores /= 2
        return 4 * self.batch * self.heads * scores * self.head_dim


_FOUR = {
    "4k": Shape(4, 4096, 16, 128),
    "4k-causal": Shape(4, 4096, 16, 128, causal=True),
    "16k": Shape(1, 16384, 16, 128),
    "d64": Shape(4, 4096, 32, 64),
}
_BF16 = {"dtype": jnp.bfloat16}
_TEN = {
    "b32-512": Shape(32, 512, 16, 128, **_BF16),
    "b8-2k-causal": Shape(8, 2048, 16, 128, True, **_BF16),
    "b2-8k-causal": Shape(2, 8192, 16, 128, True, **_BF16),
    "b1-16k-causal": Shape(1, 16384, 16, 128, True, **_BF16),
    "b8-2k-d64-causal": Shape(8, 2048, 32, 64, True, **_BF16),
    "b2-4k-d256-causal": Shape(2, 4096, 8, 256, True, **_BF16),
    "b2-4k-d256": Shape(2, 4096, 8, 256, **_BF16),
    "b2-4k-gqa-causal": Shape(2, 4096, 32, 128, True, 4, **_BF16),
    "b16-1000-causal": Shape(16, 1000, 16, 128, True, **_BF16),
    "b1-64k-causal": Shape(1, 65536, 2, 128, True, **_BF16),
}
_WINDOWS = {
    "b2-8k-window-1k": Shape(2, 8192, 16, 128, True, window=1023, **_BF16),
    "b1-32k-window-4k": Shape(1, 32768, 16, 128, True, window=4095, **_BF16),
}
SETS = {"four": _FOUR, "ten": _TEN, "windows": _WINDOWS}
SHAPES = _FOUR | _TEN | _WINDOWS
Function = Callable[..., Any]
# The default is Warpgroup, as in upstream's kernel.
LANE = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
)


# --- candidates -----------------------------------------------------------------------
# The arguments are (q, k, v, scaled q): upstream's kernel does not apply the scale.


def cudnn(s: Shape) -> Function:
    """Returns cuDNN's kernel through JAX."""

    def f(q, k, v, scaled):
        window = None if s.window is None else (s.window, 0)
        return jax.nn.dot_product_attention(
            *(q, k, v),
            is_causal=s.causal,
            local_window_size=window,
            implementation="cudnn",
        )

    return f


def peer(s: Shape, block_kv: int) -> Function:
    """Returns upstream's kernel."""
    config = upstream.TuningConfig(
        block_q=64,
        block_kv=block_kv,
        max_concurrent_steps=2,
        use_schedule_barrier=True,
        causal=s.causal,
    )
    return lambda q, k, v, scaled: upstream.attention(scaled, k, v, config)


def ours(
    s: Shape,
    config: ops.AttentionConfig | None,
    compiler_params: plgpu.CompilerParams | None = None,
) -> Function:
    """Returns this package's kernel."""

    def f(q, k, v, scaled):
        return ops.attention(
            *(q, k, v),
            causal=s.causal,
            window=None if s.window is None else (s.window, 0),
            config=config,
            compiler_params=compiler_params,
        )

    return f


def contest(s: Shape) -> dict[str, Function]:
    """Returns the candidates of a plain run."""
    if s.dtype == jnp.bfloat16:
        return {"cuDNN through JAX": cudnn(s), "pallas_gpu": ours(s, None)}
    blocks = (256, 128) if s.head_dim <= 64 else (128,)
    return {
        "cuDNN through JAX": cudnn(s),
        **{f"upstream, block_kv {n}": peer(s, n) for n in blocks},
        "pallas_gpu": ours(s, None),
        "pallas_gpu, Lane": ours(s, None, LANE),
        **{f"pallas_gpu, {what}": ours(s, c) for what, c in _changes(s).items()},
    }


def _changes(s: Shape) -> dict[str, ops.AttentionConfig]:
    best = _best(s)
    changes = {
        "no turns" if best.ping_pong else "turns": dataclasses.replace(
            best, ping_pong=not best.ping_pong
        ),
        "persistent": dataclasses.replace(best, blocks=SMS),
        "a block a tile": dataclasses.replace(best, blocks=None),
    }
    return {what: config for what, config in changes.items() if config != best}


def _best(s: Shape) -> ops.AttentionConfig:
    return ops.AttentionConfig.default(s.head_dim, causal=s.causal, kv_len=s.length)


def variants(s: Shape) -> Iterator[ops.AttentionConfig]:
    """Yields candidate configurations for a shape; not all of them fit."""
    wide = s.head_dim > 64
    sizes = (96, 128, 144, 160, 176) if wide else (96, 112, 128, 176, 192)
    for consumers, block_kv, stages in itertools.product((2, 3), sizes, (2, 3, 4)):
        if wide and (consumers == 3 or stages == 4):
            continue
        config = ops.AttentionConfig(
            consumers=consumers, block_kv=block_kv, stages=stages
        )
        yield config
        yield dataclasses.replace(config, ping_pong=False)
    best = _best(s)
    for together, blocks in itertools.product((1, 2, 4, 8, 16, 64), (None, SMS)):
        yield dataclasses.replace(best, heads_together=together, blocks=blocks)


def _name(config: ops.AttentionConfig) -> str:
    turns = "turns" if config.ping_pong else "no turns"
    blocks = "a block a tile" if config.blocks is None else f"{config.blocks} blocks"
    return (
        f"{config.consumers}x{config.rows} by {config.block_kv}, {config.stages} "
        f"stages, {turns}, {config.heads_together} heads, {blocks}"
    )


# --- measurement ----------------------------------------------------------------------


def make_inputs(s: Shape) -> list[tuple[Any, ...]]:
    """Returns several sets of (q, k, v, scaled q)."""
    keys = iter(jax.random.split(jax.random.key(0), 3 * INPUTS))

    def normal(dims: tuple[int, ...]) -> Any:
        return jax.random.normal(next(keys), dims, s.dtype)

    sets = [
        (normal(s.dims), normal(s.kv_dims), normal(s.kv_dims)) for _ in range(INPUTS)
    ]
    scale = 1 / math.sqrt(s.head_dim)
    return [
        (q, k, v, (q.astype(jnp.float32) * scale).astype(q.dtype)) for q, k, v in sets
    ]


@functools.partial(jax.jit, static_argnums=(3, 4))
def reference(q: Any, k: Any, v: Any, causal: bool, window: int | None) -> Any:
    """Returns the last rows of the first head in float32: (rows, head_dim)."""
    first = max(q.shape[1] - CHECKED_ROWS, 0)
    q, k, v = (x[0, :, 0].astype(jnp.float32) for x in (q, k, v))
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    scores = product(q[first:], k.T) / math.sqrt(q.shape[1])
    if causal:
        rows = first + jnp.arange(scores.shape[0])[:, None]
        columns = jnp.arange(scores.shape[1])
        seen = columns <= rows
        if window is not None:
            seen &= columns >= rows - window
        scores = jnp.where(seen, scores, -jnp.inf)
    return product(jax.nn.softmax(scores, axis=1), v)


def relative_error(s: Shape, f: Function, inputs: tuple[Any, ...]) -> float:
    """Returns the relative error of a candidate against float32."""
    expected = reference(*inputs[:3], s.causal, s.window)
    got = f(*inputs)[0, -CHECKED_ROWS:, 0].astype(jnp.float32)
    return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))


def accurate(
    s: Shape, candidates: Mapping[str, Function], inputs: tuple[Any, ...]
) -> tuple[dict[str, tuple[Function, float]], list[str]]:
    """Returns the working candidates with their errors, and the others' failures."""
    working, failures = {}, []
    jitted = {name: jax.jit(f) for name, f in candidates.items()}
    with ThreadPoolExecutor() as pool:
        # Compiles them at the same time; errors show again below.
        list(pool.map(lambda f: _attempt(f, inputs), jitted.values()))
    for name, compiled in jitted.items():
        try:
            error = relative_error(s, compiled, inputs)
        except Exception as e:
            text = " ".join(f"{type(e).__name__}: {e}".split())
            failures.append(f"{name}: {text[:300]}")
            continue
        if error < LARGEST_ERROR:
            working[name] = compiled, error
        else:
            failures.append(f"{name}: relative error {error}")
    return working, failures


def _attempt(f: Function, inputs: tuple[Any, ...]) -> None:
    with contextlib.suppress(Exception):
        f(*inputs)


def measure(
    label: str, candidates: Mapping[str, Function], rounds: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Times the candidates on one problem; checks them against float32."""
    s = SHAPES[label]
    inputs = make_inputs(s)
    working, failures = accurate(s, candidates, inputs[0])
    functions = {name: f for name, (f, _) in working.items()}
    times = timing.on_device(functions, inputs, rounds=rounds)
    rivals = {
        of: min((t for name, t in times.items() if name.startswith(of)), default=None)
        for of in ("cuDNN", "upstream")
    }
    rows = []
    for name, (_, error) in working.items():
        seconds = times[name]
        row = {
            "shape": label,
            "kernel": name,
            "µs": seconds * 1e6,
            "TFLOP/s": s.flops / seconds / 1e12,
            "rel. error": error,
        }
        for of, other in rivals.items():
            row[f"of {of}"] = "" if other is None else other / seconds
        rows.append(row)
    return rows, [f"{label}: {text}" for text in failures]


def _described(label: str) -> str:
    s = SHAPES[label]
    shared = f", {s.kv_heads} of K and V" if s.kv_heads else ""
    return f"{label}: {s.dims} {jnp.dtype(s.dtype).name}{shared}"


def _mean(rows: list[dict[str, Any]]) -> str:
    """Returns the geometric mean of our default's ratios to cuDNN."""
    ratios = [r["of cuDNN"] for r in rows if r["kernel"] == "pallas_gpu"]
    if not ratios or "" in ratios:
        return ""
    return f" Geometric mean of cuDNN's: {statistics.geometric_mean(ratios):.3f}."


def main() -> None:
    """Prints the table, followed by the failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--shapes", choices=list(SETS), default="four")
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=None)
    options = parser.parse_args()
    rounds = options.rounds or (10 if options.tune else 40)
    rows, failures = [], []
    labels = options.shape or list(SETS[options.shapes])
    for label in labels:
        s = SHAPES[label]
        candidates = contest(s)
        if options.tune:
            rivals = ("cuDNN", "upstream")
            candidates = {n: f for n, f in candidates.items() if n.startswith(rivals)}
            candidates |= {_name(c): ours(s, c) for c in variants(s)}
        found, failed = measure(label, candidates, rounds)
        rows += sorted(found, key=lambda r: r["µs"]) if options.tune else found
        failures += failed
    shapes = "; ".join(_described(n) for n in labels)
    notes = (
        f"Random normal, (batch, length, heads, head_dim) {shapes}; device "
        f"times, medians of {rounds} rounds of one call of each in a shuffled order, "
        f"50 ms apart; errors of {CHECKED_ROWS} rows of one head against float32."
        f"{_mean(rows)}"
    )
    if rows:
        timing.report("Attention forward", rows, notes, options.json)
    if failures and not options.json:
        print("\nFailed:\n\n" + "\n".join(f"- {text}" for text in failures))


if __name__ == "__main__":
    main()
