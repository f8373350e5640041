# SPDX-License-Identifier: Apache-2.0
"""Kernels written with pipelines, once for both packages, in one run on a GPU.

python -m benchmarks.pipelines [--json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as upstream

import pallas_gpu
from benchmarks import timing
from pallas_gpu import arch, ops

INPUTS = 5
SHAPES = [(4096, 4096, 4096), (4096, 8192, 4096)]
BLOCKS = 2 * arch.SM_90A.sm_count
ROWS, COLUMNS = 16 * 16 * BLOCKS, 256
PACKAGES = {
    "upstream": (upstream, pl.run_scoped),
    "pallas_gpu": (pallas_gpu, pallas_gpu.run_scoped),
}


def matmul(package: str, m: int, n: int, k: int) -> Callable[..., Any]:
    """A persistent product of two compute warpgroups and their memory warpgroup."""
    plgpu, run_scoped = PACKAGES[package]
    tile_m, tile_n, tile_k, part = 256, 128, 64, 64
    tiles = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    def pipeline(mi: Any, ni: Any, step: Any, context: Any) -> Any:
        def spec(shape: Any, index_map: Any) -> Any:
            return plgpu.BlockSpec(
                shape, index_map, transforms=tiles, delay_release=1,
                memory_space=plgpu.SMEM,
            )  # fmt: skip

        return plgpu.emit_pipeline_warp_specialized(
            step, grid=(k // tile_k,), wg_axis="wg", num_compute_wgs=2,
            memory_registers=40, max_concurrent_steps=4, compute_context=context,
            in_specs=[
                spec((tile_m, tile_k), lambda ki: (mi, ki)),
                spec((tile_k, tile_n), lambda ki: (ki, ni)),
            ],
        )  # fmt: skip

    def body(a: Any, b: Any, o: Any) -> None:
        def nothing(*_: Any) -> None:
            return None

        def scoped(allocations: Any, parts: Any) -> None:
            wg = lax.axis_index("wg")

            @plgpu.nd_loop((m // tile_m * (n // tile_n),), collective_axes="sm")
            def _(info: Any) -> None:
                grid = m // tile_m, n // tile_n
                mi, ni = plgpu.planar_snake(info.index[0], grid, 0, 8)
                rows = pl.ds(wg * 128, 128)

                def step(_: Any, a_block: Any, b_block: Any, acc: Any) -> Any:
                    plgpu.wgmma(acc, a_block.at[rows], b_block)
                    plgpu.wgmma_wait(1)
                    return acc

                def context(run: Any) -> None:
                    def with_accumulator(acc: Any) -> Any:
                        run(acc)
                        return acc[...]

                    acc = run_scoped(
                        with_accumulator, plgpu.ACC((128, tile_n), jnp.float32)
                    ).astype(o.dtype)
                    for i in range(128 // part):
                        for j in range(tile_n // part):
                            slot = parts.at[wg, (i * 2 + j) % 2]
                            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                            slot[...] = acc[
                                i * part : (i + 1) * part, j * part : (j + 1) * part
                            ]
                            plgpu.commit_smem()
                            row = mi * tile_m + wg * 128 + i * part
                            column = ni * tile_n + j * part
                            plgpu.copy_smem_to_gmem(
                                slot, o.at[pl.ds(row, part), pl.ds(column, part)]
                            )

                pipeline(mi, ni, step, context)(a, b, allocations=allocations)

            plgpu.wait_smem_to_gmem(0)

        run_scoped(
            scoped,
            pipeline(0, 0, nothing, nothing).get_allocations(a, b),
            plgpu.SMEM((2, 2, part, part), jnp.bfloat16, transforms=tiles),
            collective_axes="wg",
        )

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(arch.SM_90A.sm_count,), grid_names=("sm",),
        num_threads=3, thread_name="wg",
    )  # fmt: skip


def simple_matmul(m: int, n: int, k: int, depth: int) -> Callable[..., Any]:
    """A product by `pallas_call` with one sequential axis: what a first kernel is."""
    plgpu = pallas_gpu
    tiles = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    def product(a: Any, b: Any, o: Any, acc: Any) -> None:
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(1)

        @plgpu.when(plgpu.program_id(2) == plgpu.num_programs(2) - 1)
        def _() -> None:
            o[...] = acc[...].astype(o.dtype)

    def spec(shape: Any, index_map: Any, delay: int = 0) -> Any:
        return plgpu.BlockSpec(shape, index_map, transforms=tiles, delay_release=delay)

    return plgpu.pallas_call(
        product,
        jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(m // 128, n // 128, k // 64),
        in_specs=[
            spec((128, 64), lambda i, j, ki: (i, ki), 1),
            spec((64, 128), lambda i, j, ki: (ki, j), 1),
        ],
        out_specs=spec((128, 128), lambda i, j, ki: (i, j)),
        scratch_shapes=[plgpu.ACC((128, 128))],
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            max_concurrent_steps=depth,
        ),
    )


def threaded_matmul(
    m: int, n: int, k: int, tile: tuple[int, int, int], depth: int, strip: int
) -> Callable[..., Any]:
    """The same with two compute warpgroups a block, which share the block of B.

    Args:
      m, n, k: sizes of the product.
      tile: rows, columns and depth of a block's step.
      depth: steps in flight.
      strip: columns of blocks that a row of blocks spans before the next row starts, so
        that concurrent blocks share what they read from L2.
    """
    plgpu = pallas_gpu
    tile_m, tile_n, tile_k = tile
    rows = tile_m // 2

    def product(a: Any, b: Any, o: Any, acc: Any) -> None:
        mine = plgpu.ds(lax.axis_index("wg") * rows, rows)
        plgpu.wgmma(acc, a.at[mine], b)
        plgpu.wgmma_wait(1)

        @plgpu.when(plgpu.program_id(3) == plgpu.num_programs(3) - 1)
        def _() -> None:
            o[mine] = acc[...].astype(o.dtype)

    def spec(shape: Any, index_map: Any, delay: int = 0) -> Any:
        swizzled = min(shape[1], 64)
        return plgpu.BlockSpec(
            shape, index_map, delay_release=delay,
            transforms=[
                plgpu.TilingTransform((8, swizzled)),
                plgpu.SwizzleTransform(2 * swizzled),
            ],
        )  # fmt: skip

    return plgpu.pallas_call(
        product, jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(n // tile_n // strip, m // tile_m, strip, k // tile_k),
        in_specs=[
            spec((tile_m, tile_k), lambda s, i, j, ki: (i, ki), 1),
            spec((tile_k, tile_n), lambda s, i, j, ki: (ki, s * strip + j), 1),
        ],
        out_specs=spec((tile_m, tile_n), lambda s, i, j, ki: (i, s * strip + j)),
        scratch_shapes=[plgpu.ACC((rows, tile_n))],
        num_threads=2, thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",),
            max_concurrent_steps=depth,
        ),
    )  # fmt: skip


# Tile, steps in flight and width of a strip of `threaded_matmul`.
THREADED = [
    ((256, 128, 64), 3, 8),
    ((256, 128, 64), 3, 16),
    ((256, 128, 32), 6, 8),
    ((128, 256, 64), 3, 8),
]


def copy(package: str) -> Callable[..., Any]:
    """A streaming copy: each block copies rows through SMEM."""
    plgpu, _ = PACKAGES[package]
    spec = plgpu.BlockSpec(
        (16, COLUMNS), lambda i: (i * BLOCKS + lax.axis_index("block"), 0),
        memory_space=plgpu.SMEM,
    )  # fmt: skip

    def step(_: Any, x: Any, o: Any) -> None:
        o[...] = x[...]

    def body(x: Any, o: Any) -> None:
        plgpu.emit_pipeline(
            step, grid=(ROWS // (16 * BLOCKS),), in_specs=[spec], out_specs=[spec],
            max_concurrent_steps=3,
        )(x, o)  # fmt: skip

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
        grid=(BLOCKS,), grid_names=("block",),
    )  # fmt: skip


def measure_matmul(m: int, n: int, k: int) -> list[dict[str, Any]]:
    """Times the products; checks them against float32."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    inputs = [(normal(m, k), normal(k, n)) for _ in range(INPUTS)]
    candidates = {"cuBLAS through JAX": jax.jit(jnp.matmul)}
    candidates["pallas_gpu.ops.matmul"] = jax.jit(ops.matmul)
    for package in PACKAGES:
        candidates[f"{package}, emit_pipeline_warp_specialized"] = jax.jit(
            matmul(package, m, n, k)
        )
    name = "pallas_gpu.pallas_call, one warpgroup, 128x128x64, 2 steps"
    candidates[name] = jax.jit(simple_matmul(m, n, k, 2))
    for tile, depth, strip in THREADED:
        shape = "x".join(map(str, tile))
        name = f"pallas_gpu.pallas_call, {shape}, {depth} steps, strips of {strip}"
        candidates[name] = jax.jit(threaded_matmul(m, n, k, tile, depth, strip))
    a, b = inputs[0]
    reference = a[:256].astype(jnp.float32) @ b.astype(jnp.float32)
    for name, f in candidates.items():
        error = jnp.linalg.norm(f(a, b)[:256].astype(jnp.float32) - reference)
        relative = float(error / jnp.linalg.norm(reference))
        assert relative < 1e-2, f"{name}: relative error {relative}"
    return _rows(f"{m}x{n}x{k}", timing.on_device(candidates, inputs))


def measure_copy() -> list[dict[str, Any]]:
    """Times the copies; checks that they are exact."""
    rng = np.random.default_rng(0)
    inputs = [
        (jnp.asarray(rng.standard_normal((ROWS, COLUMNS), np.float32)),)
        for _ in range(INPUTS)
    ]
    # XLA's own kernel for a copy; a negation cannot be elided.
    candidates: dict[str, Any] = {"XLA, a negation": jax.jit(jnp.negative)}
    for package in PACKAGES:
        candidates[f"{package}, emit_pipeline"] = jax.jit(copy(package))
        (x,) = inputs[0]
        assert bool(jnp.all(candidates[f"{package}, emit_pipeline"](x) == x))
    return _rows(f"copy of {ROWS}x{COLUMNS} f32", timing.on_device(candidates, inputs))


def _rows(problem: str, times: dict[str, float]) -> list[dict[str, Any]]:
    first = next(iter(times.values()))
    return [
        {
            "problem": problem,
            "kernel": name,
            "µs": seconds * 1e6,
            "of the first": first / seconds,
        }
        for name, seconds in times.items()
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for shape in SHAPES for row in measure_matmul(*shape)]
    rows += measure_copy()
    notes = (
        "bfloat16 products and float32 copies, random normal; device times, medians of "
        "40 rounds of one call of each in a shuffled order, 50 ms apart."
    )
    timing.report("Pipelines", rows, notes, options.json)


if __name__ == "__main__":
    main()
