# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit matrices, and layers with narrow weights, beside torch and cuBLAS.

python -m benchmarks.quantized [--json] [--tokens 16 4096]
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import beside_copy, timing
from pallas_gpu import ops

INPUTS = 4
SIZE = 8192
WEIGHTS = [(28672, 4096), (8192, 8192), (4096, 14336)]
TOKENS = [16, 4096]
GROUP = 64
# Rows and columns whose results are checked.
CHECKED = 128
E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
struct = jax.ShapeDtypeStruct
NOTES = (
    "Random normal operands, integers uniform; device times by CUPTI, medians of "
    f"{beside_copy.ROUNDS} rounds, interleaved, each call with other operands."
)


type Shapes = tuple[jax.ShapeDtypeStruct, ...]
type Work = dict[str, tuple[Callable[..., Any], Shapes]]


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random operands; integers have all values of their type."""
    key = jax.random.key(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        wide = jax.random.randint(key, shape, info.min, info.max + 1, jnp.int32)
        return wide.astype(dtype)
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def inputs(shapes: Shapes, count: int) -> list[tuple[jax.Array, ...]]:
    """Operands for some calls: two random ones, and scales that are one."""
    return [
        (
            *(normal(2 * i + j, s.shape, s.dtype) for j, s in enumerate(shapes[:2])),
            *(jnp.ones(s.shape, s.dtype) for s in shapes[2:]),
        )
        for i in range(count)
    ]


def compiled(tables: Mapping[Any, Work]) -> dict[Any, dict[str, Any]]:
    """Compiles the functions of all tables at once."""

    def one(item: tuple[Callable[..., Any], Shapes]) -> Any:
        f, shapes = item
        return jax.jit(f).lower(*shapes).compile()

    with ThreadPoolExecutor() as pool:
        running = {
            table: {name: pool.submit(one, item) for name, item in work.items()}
            for table, work in tables.items()
        }
        return {
            table: {name: future.result() for name, future in found.items()}
            for table, found in running.items()
        }


def caller(f: Callable[..., Any], operands: Any) -> Callable[[], Any]:
    """Returns calls of a function with operands of one call after the other."""
    turns = itertools.cycle(operands)
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


@jax.jit
def some_rows(a: jax.Array, start: int, step: int) -> jax.Array:
    """Rows of a matrix at equal distances, in float32."""
    return a[start + step * jnp.arange(CHECKED)].astype(jnp.float32)


def checked(name: str, f: Any, operands: tuple[jax.Array, ...]) -> float:
    """Returns the relative error of a function in columns of all its tiles.

    Raises:
      AssertionError: it is greater than 0.01.
    """
    x, w = operands[:2]
    step = w.shape[0] // CHECKED
    right = np.asarray(some_rows(w, step // 2, step))
    got = np.asarray(some_rows(f(*operands).T, step // 2, step)).T
    tokens = slice(None, None, max(x.shape[0] // CHECKED, 1))
    expected = np.asarray(x[tokens].astype(jnp.float32)) @ right.T
    error = np.linalg.norm(got[tokens] - expected) / np.linalg.norm(expected)
    assert error < 1e-2, f"{name}: relative error {error}"
    return float(error)


def product_work() -> Work:
    """Products of 8-bit matrices, of 8192 rows, columns and depth."""
    blocks = SIZE // 128
    one, rows = struct((), jnp.float32), struct((SIZE,), jnp.float32)
    grid = [struct(s, jnp.float32) for s in ((SIZE, blocks), (blocks, blocks))]
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "e4m3, scales of tensors": (E4M3, (one, one), {}),
        "e4m3, scales of tensors, promoted": (E4M3, (one, one), {"promote": True}),
        "e4m3, scales of rows and columns": (E4M3, (rows, rows), {}),
        "e4m3, scales of blocks": (E4M3, grid, {}),
        "int8 to int32": (jnp.int8, (), {"out_dtype": jnp.int32}),
    }
    product = functools.partial(ops.scaled_matmul, transpose_b=True)
    return {
        name: (
            functools.partial(product, **options),
            (*[struct((SIZE, SIZE), dtype)] * 2, *scales),
        )
        for name, (dtype, scales, options) in kinds.items()
    }


TORCH = "torch._scaled_mm, e4m3, use_fast_accum"


def products(ready: dict[str, Any], source: Any) -> list[dict[str, Any]]:
    """Times of products of 8-bit matrices."""
    made = {name: inputs(shapes, 2) for name, (_, shapes) in product_work().items()}
    errors = {name: checked(name, f, made[name][0]) for name, f in ready.items()}
    calls = {name: caller(f, made[name]) for name, f in ready.items()}
    calls[TORCH] = torch_product(True)
    calls["torch._scaled_mm, e4m3"] = torch_product(False)
    times = beside_copy.interleaved(calls, source)
    return [
        {
            "kernel": name,
            "µs": times[name] * 1e6,
            "TFLOP/s": 2 * SIZE**3 / times[name] / 1e12,
            "of torch": times[TORCH] / times[name],
            "rel. error": errors.get(name, ""),
        }
        for name in calls
    ]


CUBLAS = "cuBLAS, bfloat16"


def layer_work(tokens: int, n: int, k: int) -> Work:
    """Layers with narrow weights, and with weights of bfloat16 by cuBLAS."""
    kinds = {
        "int8": (jnp.int8, None),
        "int4": (jnp.int4, None),
        f"int8, groups of {GROUP}": (jnp.int8, GROUP),
        f"int4, groups of {GROUP}": (jnp.int4, GROUP),
        "e4m3": (E4M3, None),
    }
    x = struct((tokens, k), BF16)
    found: Work = {CUBLAS: (lambda x, w: x @ w.T, (x, struct((n, k), BF16)))}

    def layer(x: Any, w: Any, s: Any) -> Any:
        return ops.linear(x, w, w_scale=s, transpose_w=True)

    for name, (dtype, group) in kinds.items():
        scale = struct((n,) if group is None else (k // group, n), jnp.float32)
        found[name] = layer, (x, struct((n, k), dtype), scale)
    return found


def copier(nbytes: int) -> Callable[[], Any]:
    """A kernel of torch that moves so many bytes in all: half are read, half written.

    Beside the bandwidth of a long copy it shows what any kernel of this size loses when
    it starts and ends.
    """
    import torch

    def operand() -> Any:
        return torch.ones(nbytes // 8, dtype=torch.int32, device="cuda")

    turns = itertools.cycle([(operand(), operand()) for _ in range(INPUTS)])

    def run() -> None:
        source, target = next(turns)
        torch.neg(source, out=target)
        torch.cuda.synchronize()

    return run


def bits(dtype: Any) -> int:
    """The bits of an element in memory."""
    return 4 if dtype == jnp.int4 else 8 * jnp.dtype(dtype).itemsize


def layers(
    tokens: int, n: int, k: int, ready: dict[str, Any], source: Any
) -> list[dict[str, Any]]:
    """Times of layers with narrow weights."""
    shapes = {name: s for name, (_, s) in layer_work(tokens, n, k).items()}
    count = 2 if tokens > 64 else INPUTS
    made = {name: inputs(s, count) for name, s in shapes.items()}
    errors = {name: checked(name, f, made[name][0]) for name, f in ready.items()}
    calls = {name: caller(f, made[name]) for name, f in ready.items()}
    sizes = {name: n * k * bits(s[1].dtype) // 8 for name, s in shapes.items()}
    if tokens <= 64:
        copies = {f"copy of {width} bits": n * k * width // 8 for width in (8, 4)}
        calls |= {name: copier(nbytes) for name, nbytes in copies.items()}
        sizes |= copies
    times = beside_copy.interleaved(calls, source)
    # A copy reads and writes its bytes.
    bandwidth = 2 * source.nbytes / times[beside_copy.COPY]

    return [
        {
            "tokens": tokens,
            "N, K": f"{n}, {k}",
            "weights": name,
            "µs": times[name] * 1e6,
            "of reading weights": sizes[name] / bandwidth / times[name],
            "of cuBLAS": times[CUBLAS] / times[name],
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
    sizes = [(t, *shape) for t in options.tokens for shape in WEIGHTS]
    ready = compiled(
        {"products": product_work(), **{size: layer_work(*size) for size in sizes}}
    )
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    rows = products(ready["products"], source)
    timing.report("Products of 8-bit matrices", rows, NOTES, options.json)
    rows = [row for size in sizes for row in layers(*size, ready[size], source)]
    timing.report("Layers with narrow weights", rows, NOTES, options.json)


if __name__ == "__main__":
    main()
