# SPDX-License-Identifier: Apache-2.0
"""Products that people write themselves on a GPU, beside XLA, which calls cuBLAS.

python -m benchmarks.recipes [--json]

A product with a low-rank adapter, in 15 lines of `pallas_call`; and a product of 1.45
waves of tiles with all of its epilogue, by `ops.matmul`, for which stream-K is made.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from benchmarks import timing
from pallas_gpu import ops

BF16 = jnp.bfloat16
SIZE, RANKS = 4096, (16, 64)
EPILOGUE = 1536, 4096, 8192
# Rows whose results are checked, and pairs of operands that alternate.
CHECKED, INPUTS = 256, 3
TILES = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
XLA, PART = "XLA, cuBLAS", "x @ w alone"


def lora(
    m: int,
    n: int,
    k: int,
    rank: int,
    tile: tuple[int, int] = (256, 128),
    steps: int = 4,
) -> Callable[..., Any]:
    """`x @ w + low @ b`, where `low` is `x @ a`: a persistent product in 15 lines.

    The body copies the tile's columns of `b`, at a step of each tile at which no
    warpgroup multiplies by those of the tile before any more.

    Args:
      m, n, k, rank: sizes of the product, and columns of `low`.
      tile: rows and columns of a block.
      steps: copies of blocks under way.
    """
    (tile_m, tile_n), rows, last = tile, tile[0] // 2, k // 64 - 1

    def body(x: Any, w: Any, low: Any, b: Any, o: Any, acc: Any, *scratch: Any) -> None:
        (parts, columns, full), wg = scratch, lax.axis_index("wg")
        mine = plgpu.ds(wg * rows, rows)
        plgpu.wgmma(acc, x.at[mine], w)
        plgpu.wgmma_wait(1)

        @plgpu.when((plgpu.program_id(2) == min(2 * steps, last)) & (wg == 0))
        def _() -> None:
            plgpu.copy_gmem_to_smem(b, columns, full)

        @plgpu.when(plgpu.program_id(2) == last)
        def _() -> None:
            plgpu.barrier_wait(full)
            plgpu.wgmma(acc, low[mine], columns)
            store = plgpu.TileStore(parts.at[wg], rows * tile_n // 64**2)
            store.store_all(acc[...], o.at[mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.pallas_call(
        body,
        jax.ShapeDtypeStruct((m, n), BF16),
        grid=(m // tile_m, n // tile_n, k // 64),
        in_specs=[
            spec((tile_m, 64), lambda i, j, ki: (i, ki), delay_release=1),
            spec((64, tile_n), lambda i, j, ki: (ki, j), delay_release=1),
            in_gmem((tile_m, rank), lambda i, j, ki: (i, 0)),
            in_gmem((rank, tile_n), lambda i, j, ki: (0, j)),
        ],
        out_specs=in_gmem(tile, lambda i, j, ki: (i, j)),
        scratch_shapes=[
            plgpu.ACC((rows, tile_n)),
            parts_of(2, 1),
            plgpu.SMEM((rank, tile_n), BF16, transforms=TILES),
            plgpu.Barrier(),
        ],
        num_threads=2,
        thread_name="wg",
        compiler_params=persistent(steps),
    )


in_gmem = functools.partial(plgpu.BlockSpec, memory_space=plgpu.GMEM)


def spec(shape: tuple[int, int], index_map: Any, **options: Any) -> Any:
    """A block for the tensor core, with the widest swizzle that fits its rows."""
    swizzled = min(shape[1], 64)
    tiling = plgpu.TilingTransform((8, swizzled))
    options["transforms"] = tiling, plgpu.SwizzleTransform(2 * swizzled)
    return plgpu.BlockSpec(shape, index_map, **options)


def parts_of(warpgroups: int, buffers: int) -> Any:
    """Buffers of each warpgroup for parts of its result."""
    return plgpu.SMEM((warpgroups, buffers, 64, 64), BF16, transforms=TILES)


def persistent(steps: int) -> Any:
    """A loop over K in each block, which has several tiles."""
    return plgpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        max_concurrent_steps=steps,
        strip=8,
        persistent=True,
    )


def adapted(x: Any, w: Any, a: Any, b: Any) -> Any:
    """A product with an adapter, as written in JAX."""
    return x @ w + (x @ a) @ b


def with_all(x: Any, w: Any, bias: Any, residual: Any) -> Any:
    """A product with all of its epilogue, as written in JAX."""
    return jax.nn.gelu(x @ w + bias) + residual[: len(x)]


def low_rank_work(rank: int) -> tuple[dict[str, Callable[..., Any]], Any]:
    """Products with an adapter, and their operands: x, w, a and b."""
    sizes = SIZE, SIZE, SIZE, rank

    def ours(x: Any, w: Any, a: Any, b: Any) -> Any:
        return lora(*sizes)(x, w, ops.matmul(x, a), b)

    return {
        XLA: adapted,
        f"cuBLAS, {PART}": lambda x, w, a, b: x @ w,
        "pallas_call, x @ a by ops.matmul": ours,
    }, ((SIZE, SIZE), (SIZE, SIZE), (SIZE, rank), (rank, SIZE))


def epilogue_work() -> tuple[dict[str, Callable[..., Any]], Any]:
    """Products with their epilogues, and their operands: x, w, bias and residual."""
    m, n, k = EPILOGUE

    def ours(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        return ops.matmul(x, w, bias=bias, activation="gelu", residual=residual)

    return {
        XLA: with_all,
        f"cuBLAS, {PART}": lambda x, w, *_: x @ w,
        "ops.matmul": ours,
        f"ops.matmul, {PART}": lambda x, w, *_: ops.matmul(x, w),
    }, ((m, k), (k, n), (n,), (m, n))


def types(shapes: Any) -> list[jax.ShapeDtypeStruct]:
    """The types of operands."""
    return [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]


@functools.partial(jax.jit, static_argnums=1)
def operands(seed: Any, shapes: Any) -> list[jax.Array]:
    """Returns random normal operands."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape, BF16) for key, shape in pairs]


def compiled(problems: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Compiles the candidates of all problems at once."""

    def build(item: tuple[Callable[..., Any], Any]) -> Any:
        f, shapes = item
        return jax.jit(f).lower(*types(shapes)).compile()

    with ThreadPoolExecutor() as pool:
        running = {
            what: {name: pool.submit(build, (f, shapes)) for name, f in work.items()}
            for what, (work, shapes, _) in problems.items()
        }
        return {
            what: {name: future.result() for name, future in found.items()}
            for what, found in running.items()
        }


def measure(
    what: str, candidates: dict[str, Any], shapes: Any, flops: float
) -> list[dict[str, Any]]:
    """Checks the candidates that compute all of it, in float32, and times them."""
    inputs = [operands(seed, shapes) for seed in range(INPUTS)]
    x, *others = (x.astype(jnp.float32) for x in inputs[0])
    exact = adapted if len(shapes[2]) == 2 else with_all
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(exact)(x[:CHECKED], *others)
    errors = {}
    for name, f in candidates.items():
        if "alone" in name:
            continue
        got = f(*inputs[0])[:CHECKED].astype(jnp.float32)
        errors[name] = float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))
        assert errors[name] < 1e-2, f"{name}: relative error {errors[name]}"
    times = timing.on_device(candidates, inputs)
    return [
        {
            "product": what,
            "by": name,
            "us": seconds * 1e6,
            "TFLOP/s": flops / seconds / 1e12,
            "of XLA": times[XLA] / seconds,
            "rel. error": errors.get(name, ""),
        }
        for name, seconds in times.items()
    ]


def problems() -> dict[str, Any]:
    """Returns candidates, shapes and operations of each product."""
    m, n, k = EPILOGUE
    found = {f"{m}x{n}x{k}, with all": (*epilogue_work(), 2 * m * n * k)}
    for rank in RANKS:
        work = low_rank_work(rank)
        found[f"{SIZE}^3, rank {rank}"] = (*work, 2 * SIZE**3)
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work = problems()
    rows = [
        row
        for what, ready in compiled(work).items()
        for row in measure(what, ready, *work[what][1:])
    ]
    notes = (
        "bfloat16, random normal; device times of all kernels, medians of 40 rounds of "
        "one call of each in a shuffled order, 50 ms apart. TFLOP/s of x @ w."
    )
    timing.report("Recipes", rows, notes, options.json)


if __name__ == "__main__":
    main()
