# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit matrices, and layers with narrow weights, beside torch and cuBLAS.

python -m benchmarks.quantized [--json]
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import beside_copy, timing
from pallas_gpu import ops

INPUTS = 4
SIZE = 8192
WEIGHTS = [(28672, 4096), (8192, 8192), (4096, 14336)]
TOKENS = [16, 4096]
GROUP = 64
E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
NOTES = (
    "Random normal operands, integers uniform; device times by CUPTI, medians of "
    f"{beside_copy.ROUNDS} rounds, interleaved, each call with other operands."
)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random operands; integers have all values of their type."""
    key = jax.random.key(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        wide = jax.random.randint(key, shape, info.min, info.max + 1, jnp.int32)
        return wide.astype(dtype)
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


@jax.jit
def difference(got: jax.Array, expected: jax.Array) -> jax.Array:
    """The relative error, by norms."""
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)


@jax.jit
def reference(a: jax.Array, b: jax.Array) -> jax.Array:
    """The first rows of a product with b (N, K), in float32."""
    left, right = a[:128].astype(jnp.float32), b.astype(jnp.float32)
    return jnp.dot(left, right.T, precision=jax.lax.Precision.HIGHEST)


type Inputs = list[tuple[Any, ...]]


def compiled(work: dict[str, tuple[Callable[..., Any], Inputs]]) -> dict[str, Any]:
    """Compiles functions for their inputs, all at once."""

    def one(item: tuple[Callable[..., Any], Inputs]) -> Any:
        f, inputs = item
        return jax.jit(f).lower(*inputs[0]).compile()

    with ThreadPoolExecutor() as pool:
        return dict(zip(work, pool.map(one, work.values()), strict=True))


def caller(f: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    """Returns calls of a function with one input after the other."""
    turns = itertools.cycle(inputs)
    return lambda: beside_copy.wait(f, next(turns))


def torch_product(fast: bool) -> Callable[[], Any]:
    """torch's product of e4m3 matrices with scales of tensors."""
    import torch

    def operand() -> Any:
        made = torch.randn(SIZE, SIZE, device="cuda")
        return made.to(torch.float8_e4m3fn)

    turns = itertools.cycle([(operand(), operand().t()) for _ in range(3)])
    one = torch.ones((), device="cuda")

    def run() -> None:
        torch._scaled_mm(
            *next(turns), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        torch.cuda.synchronize()

    return run


def checked(name: str, f: Any, inputs: Inputs) -> float:
    """Returns the relative error of a function, in the first rows.

    Raises:
      AssertionError: it is greater than 0.01.
    """
    expected = reference(*inputs[0][:2])
    relative = float(difference(f(*inputs[0])[:128], expected))
    assert relative < 1e-2, f"{name}: relative error {relative}"
    return relative


def products(source: Any) -> list[dict[str, Any]]:
    """Products of 8-bit matrices, of 8192 rows, columns and depth."""
    shape, blocks = (SIZE, SIZE), (SIZE // 128, SIZE // 128)
    one = jnp.float32(1)
    rows, grid = jnp.ones(SIZE), (jnp.ones((SIZE, SIZE // 128)), jnp.ones(blocks))
    product = functools.partial(ops.scaled_matmul, transpose_b=True)
    kinds: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
        "e4m3, scales of tensors": (E4M3, (one, one), {}),
        "e4m3, scales of tensors, promoted": (E4M3, (one, one), {"promote": True}),
        "e4m3, scales of rows and columns": (E4M3, (rows, rows), {}),
        "e4m3, scales of blocks": (E4M3, grid, {}),
        "int8 to int32": (jnp.int8, (), {"out_dtype": jnp.int32}),
    }
    work: dict[str, tuple[Callable[..., Any], Inputs]] = {}
    for name, (dtype, scales, options) in kinds.items():
        inputs = [
            (normal(2 * i, shape, dtype), normal(2 * i + 1, shape, dtype), *scales)
            for i in range(2)
        ]
        work[name] = functools.partial(product, **options), inputs
    ready = compiled(work)
    errors = {name: checked(name, f, work[name][1]) for name, f in ready.items()}
    calls = {name: caller(f, work[name][1]) for name, f in ready.items()}
    calls["torch._scaled_mm, e4m3, use_fast_accum"] = torch_product(True)
    calls["torch._scaled_mm, e4m3"] = torch_product(False)
    times = beside_copy.interleaved(calls, source)
    return [
        {
            "kernel": name,
            "µs": times[name] * 1e6,
            "TFLOP/s": 2 * SIZE**3 / times[name] / 1e12,
            "rel. error": errors.get(name, ""),
        }
        for name in calls
    ]


def layers(tokens: int, n: int, k: int, source: Any) -> list[dict[str, Any]]:
    """Layers with narrow weights, and with weights of bfloat16 by cuBLAS."""
    count = 2 if tokens > 64 else INPUTS
    xs = [normal(i, (tokens, k), BF16) for i in range(count)]
    kinds = {
        "int8": (jnp.int8, None),
        "int4": (jnp.int4, None),
        f"int8, groups of {GROUP}": (jnp.int8, GROUP),
        f"int4, groups of {GROUP}": (jnp.int4, GROUP),
        "e4m3": (E4M3, None),
    }
    dense = [(x, normal(9 + i, (n, k), BF16)) for i, x in enumerate(xs)]
    cublas = "cuBLAS, bfloat16"
    work: dict[str, tuple[Callable[..., Any], Inputs]] = {
        cublas: (lambda x, w: x @ w.T, dense)
    }
    bits = {cublas: 16}
    for name, (dtype, group) in kinds.items():
        scale = jnp.ones((n,) if group is None else (k // group, n))
        inputs = [(x, normal(20 + i, (n, k), dtype), scale) for i, x in enumerate(xs)]

        def f(x: Any, w: Any, s: Any) -> Any:
            return ops.linear(x, w, w_scale=s, transpose_w=True)

        work[name] = f, inputs
        bits[name] = 4 if dtype == jnp.int4 else 8
    ready = compiled(work)
    errors = {name: checked(name, f, work[name][1]) for name, f in ready.items()}
    calls = {name: caller(f, work[name][1]) for name, f in ready.items()}
    times = beside_copy.interleaved(calls, source)
    # A copy reads and writes its bytes.
    bandwidth = 2 * source.nbytes / times[beside_copy.COPY]
    return [
        {
            "tokens": tokens,
            "N, K": f"{n}, {k}",
            "weights": name,
            "µs": times[name] * 1e6,
            "of reading weights": n * k * bits[name] / 8 / bandwidth / times[name],
            "of cuBLAS": times[cublas] / times[name],
            "rel. error": errors.get(name, ""),
        }
        for name in calls
    ]


def main() -> None:
    """Prints the tables."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    options = parser.parse_args()
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    timing.report("Products of 8-bit matrices", products(source), NOTES, options.json)
    rows = [
        row
        for tokens in options.tokens
        for shape in WEIGHTS
        for row in layers(tokens, *shape, source)
    ]
    timing.report("Layers with narrow weights", rows, NOTES, options.json)


if __name__ == "__main__":
    main()
