# SPDX-License-Identifier: Apache-2.0
"""Kernels written with pipelines, once for both packages, in one run on a GPU.

python -m benchmarks.pipelines [--json] [--sweep copy|matmul]
"""

from __future__ import annotations

import argparse
import dataclasses
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
# Rows and columns of a part of a product that is stored at once.
PART = 64
SHAPES = [(4096, 4096, 4096), (4096, 8192, 4096)]
BLOCKS = 2 * arch.SM_90A.sm_count
ROWS, COLUMNS = 16 * 16 * BLOCKS, 256
PACKAGES = {
    "upstream": (upstream, pl.run_scoped),
    "pallas_gpu": (pallas_gpu, pallas_gpu.run_scoped),
}


@dataclasses.dataclass(frozen=True)
class Product:
    """How the persistent product is divided.

    Attributes:
      tile_m, tile_n: rows and columns of a block's tile.
      depth: steps of 64 in flight.
      slots: buffers of 64x64 elements of each warpgroup for its results.
      strip: columns of tiles that are visited before the next columns.
      dynamic: whether blocks claim tiles when they are free (`pallas_gpu` only).
    """

    tile_m: int = 256
    tile_n: int = 128
    depth: int = 4
    slots: int = 2
    strip: int = 8
    dynamic: bool = False


def matmul(
    package: str, m: int, n: int, k: int, how: Product = Product()
) -> Callable[..., Any]:
    """A persistent product of two compute warpgroups and their memory warpgroup."""
    plgpu, run_scoped = PACKAGES[package]
    tile_m, tile_n, tile_k = how.tile_m, how.tile_n, 64
    rows_of_wg = tile_m // 2
    tiles_m, tiles_n = m // tile_m, n // tile_n
    tiles = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    def pipeline(mi: Any, ni: Any, step: Any, context: Any) -> Any:
        def spec(shape: Any, index_map: Any) -> Any:
            return plgpu.BlockSpec(
                shape, index_map, transforms=tiles, delay_release=1,
                memory_space=plgpu.SMEM,
            )  # fmt: skip

        return plgpu.emit_pipeline_warp_specialized(
            step, grid=(k // tile_k,), wg_axis="wg", num_compute_wgs=2,
            memory_registers=40, max_concurrent_steps=how.depth,
            compute_context=context,
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

            if how.dynamic:
                loop = plgpu.dynamic_scheduling_loop(("sm",), thread_axis="wg")
            else:
                loop = plgpu.nd_loop((tiles_m * tiles_n,), collective_axes="sm")

            @loop
            def _(info: Any) -> None:
                grid = tiles_m, tiles_n
                mi, ni = plgpu.planar_snake(info.index[0], grid, 0, how.strip)
                rows = pl.ds(wg * rows_of_wg, rows_of_wg)

                def step(_: Any, a_block: Any, b_block: Any, acc: Any) -> Any:
                    plgpu.wgmma(acc, a_block.at[rows], b_block)
                    plgpu.wgmma_wait(1)
                    return acc

                def context(run: Any) -> None:
                    def with_accumulator(acc: Any) -> Any:
                        run(acc)
                        return acc[...]

                    acc = run_scoped(
                        with_accumulator, plgpu.ACC((rows_of_wg, tile_n), jnp.float32)
                    ).astype(o.dtype)
                    start = mi * tile_m + wg * rows_of_wg, ni * tile_n
                    store(plgpu, acc, parts.at[wg], o, start)

                pipeline(mi, ni, step, context)(a, b, allocations=allocations)

            plgpu.wait_smem_to_gmem(0)

        run_scoped(
            scoped,
            pipeline(0, 0, nothing, nothing).get_allocations(a, b),
            plgpu.SMEM((2, how.slots, PART, PART), jnp.bfloat16, transforms=tiles),
            collective_axes="wg",
        )

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(tiles_m * tiles_n if how.dynamic else arch.SM_90A.sm_count,),
        grid_names=("sm",),
        num_threads=3, thread_name="wg",
    )  # fmt: skip


def store(plgpu: Any, acc: Any, slots: Any, o: Any, start: tuple[Any, Any]) -> None:
    """Stores a warpgroup's result in parts, each through one of its buffers."""
    count, columns = slots.shape[0], acc.shape[1] // PART
    for i in range(acc.shape[0] // PART):
        for j in range(columns):
            slot = slots.at[(i * columns + j) % count]
            plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
            rows, cols = (slice(x * PART, (x + 1) * PART) for x in (i, j))
            slot[...] = acc[rows, cols]
            plgpu.commit_smem()
            to = (
                pl.ds(at + x * PART, PART) for at, x in zip(start, (i, j), strict=True)
            )
            plgpu.copy_smem_to_gmem(slot, o.at[tuple(to)])


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
    m: int,
    n: int,
    k: int,
    tile: tuple[int, int, int],
    depth: int,
    strip: int,
    persistent: bool,
) -> Callable[..., Any]:
    """The same with two compute warpgroups a block, which share the block of B.

    Args:
      m, n, k: sizes of the product.
      tile: rows, columns and depth of a block's step.
      depth: steps in flight.
      strip, persistent: order of the tiles, and whether a block has several: see
        `CompilerParams`.
    """
    plgpu = pallas_gpu
    tile_m, tile_n, tile_k = tile
    rows = tile_m // 2

    def product(a: Any, b: Any, o: Any, acc: Any, *parts: Any) -> None:
        mine = plgpu.ds(lax.axis_index("wg") * rows, rows)
        plgpu.wgmma(acc, a.at[mine], b)
        plgpu.wgmma_wait(1)

        @plgpu.when(plgpu.program_id(2) == plgpu.num_programs(2) - 1)
        def _() -> None:
            if not persistent:
                o[mine] = acc[...].astype(o.dtype)
                return
            own = parts[0].at[lax.axis_index("wg")]
            store = plgpu.TileStore(own, rows * tile_n // PART**2)
            store.store_all(acc[...], o.at[mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def spec(shape: Any, index_map: Any, **options: Any) -> Any:
        swizzled = min(shape[1], 64)
        transforms = (
            plgpu.TilingTransform((8, swizzled)),
            plgpu.SwizzleTransform(2 * swizzled),
        )
        options = {"transforms": transforms} | options
        return plgpu.BlockSpec(shape, index_map, **options)

    # A persistent block stores parts of its tile, and keeps a fourth step in flight.
    in_parts: dict[str, Any] = {"memory_space": plgpu.GMEM, "transforms": ()}
    tiles = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    parts = plgpu.SMEM((2, 2, PART, PART), jnp.bfloat16, transforms=tiles)
    return plgpu.pallas_call(
        product, jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(m // tile_m, n // tile_n, k // tile_k),
        in_specs=[
            spec((tile_m, tile_k), lambda i, j, ki: (i, ki), delay_release=1),
            spec((tile_k, tile_n), lambda i, j, ki: (ki, j), delay_release=1),
        ],
        out_specs=spec(
            (tile_m, tile_n), lambda i, j, ki: (i, j), **in_parts if persistent else {}
        ),
        scratch_shapes=[plgpu.ACC((rows, tile_n)), *[parts] * persistent],
        num_threads=2, thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            max_concurrent_steps=depth, strip=strip, persistent=persistent,
        ),
    )  # fmt: skip


# Tile, steps in flight, width of a strip, and whether `threaded_matmul` is persistent.
THREADED = [
    ((256, 128, 64), 3, 8, False),
    ((256, 128, 32), 6, 8, False),
    ((128, 256, 64), 3, 8, False),
    ((256, 128, 64), 4, 8, True),
    ((128, 256, 64), 4, 4, True),
    ((128, 256, 64), 4, 8, True),
]


@dataclasses.dataclass(frozen=True)
class Copy:
    """How the streaming copy is divided.

    Attributes:
      rows: rows of a block of 256 columns.
      depth: steps in flight.
      per_sm: thread blocks for each SM.
    """

    rows: int = 4
    depth: int = 6
    per_sm: int = 4

    @property
    def smem_bytes(self) -> int:
        """SMEM of a thread block: rings of blocks of the input and of the output."""
        return 2 * self.depth * self.rows * COLUMNS * 4


def copy(package: str, rows: int = ROWS, how: Copy = Copy()) -> Callable[..., Any]:
    """A streaming copy: each block copies rows through SMEM."""
    plgpu, _ = PACKAGES[package]
    blocks = how.per_sm * arch.SM_90A.sm_count
    assert rows % (how.rows * blocks) == 0
    spec = plgpu.BlockSpec(
        (how.rows, COLUMNS), lambda i: (i * blocks + lax.axis_index("block"), 0),
        memory_space=plgpu.SMEM,
    )  # fmt: skip

    def step(_: Any, x: Any, o: Any) -> None:
        o[...] = x[...]

    def body(x: Any, o: Any) -> None:
        plgpu.emit_pipeline(
            step, grid=(rows // (how.rows * blocks),), in_specs=[spec],
            out_specs=[spec], max_concurrent_steps=how.depth,
        )(x, o)  # fmt: skip

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((rows, COLUMNS), jnp.float32),
        grid=(blocks,), grid_names=("block",),
    )  # fmt: skip


def products(m: int, n: int, k: int) -> dict[str, Callable[..., Any]]:
    """Returns the products by name, cuBLAS first."""
    candidates = {"cuBLAS through JAX": jax.jit(jnp.matmul)}
    candidates["pallas_gpu.ops.matmul"] = jax.jit(ops.matmul)
    for package in PACKAGES:
        candidates[f"{package}, emit_pipeline_warp_specialized"] = jax.jit(
            matmul(package, m, n, k)
        )
    name = "pallas_gpu.pallas_call, one warpgroup, 128x128x64, 2 steps"
    candidates[name] = jax.jit(simple_matmul(m, n, k, 2))
    for tile, depth, strip, persistent in THREADED:
        shape = "x".join(map(str, tile))
        name = f"pallas_gpu.pallas_call, {shape}, {depth} steps, strips of {strip}"
        name += ", persistent" if persistent else ""
        call = threaded_matmul(m, n, k, tile, depth, strip, persistent)
        candidates[name] = jax.jit(call)
    return candidates


def swept_products(m: int, n: int, k: int) -> dict[str, Callable[..., Any]]:
    """Returns divisions of the persistent product by name, cuBLAS first."""
    candidates = {"cuBLAS through JAX": jax.jit(jnp.matmul)}
    candidates["upstream"] = jax.jit(matmul("upstream", m, n, k))
    divisions = [
        Product(*tile, depth, slots, strip, dynamic)
        for *tile, depth, slots in (
            (256, 128, 4, 2), (256, 128, 4, 1), (256, 128, 3, 4), (256, 128, 3, 2),
            (128, 256, 4, 2), (128, 256, 3, 4), (128, 128, 6, 2), (128, 128, 5, 4),
        )
        for strip in (4, 8, 16)
        for dynamic in (False, True)
    ]  # fmt: skip
    for how in divisions:
        candidates[str(how)] = jax.jit(matmul("pallas_gpu", m, n, k, how))
    return candidates


def measure_matmul(
    m: int, n: int, k: int, candidates: dict[str, Callable[..., Any]]
) -> list[dict[str, Any]]:
    """Times products; checks them against float32."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    inputs = [(normal(m, k), normal(k, n)) for _ in range(INPUTS)]
    a, b = inputs[0]
    reference = a[:256].astype(jnp.float32) @ b.astype(jnp.float32)
    for name, f in candidates.items():
        error = jnp.linalg.norm(f(a, b)[:256].astype(jnp.float32) - reference)
        relative = float(error / jnp.linalg.norm(reference))
        assert relative < 1e-2, f"{name}: relative error {relative}"
    return _rows(f"{m}x{n}x{k}", timing.on_device(candidates, inputs))


def copies(rows: int) -> dict[str, Callable[..., Any]]:
    """Returns the copies by name."""
    return {f"{p}, emit_pipeline": jax.jit(copy(p, rows)) for p in PACKAGES}


def swept_copies(rows: int) -> dict[str, Callable[..., Any]]:
    """Returns divisions of the copy by name, those that fit an SM."""
    divisions = (
        Copy(size, depth, per_sm)
        for size in (4, 8, 16, 32)
        for per_sm in (1, 2, 4)
        for depth in (2, 3, 4, 6, 8)
    )
    # 8 KiB are for barriers and what the system reserves in each block.
    room = arch.SM_90A.smem_bytes_per_sm - 8192
    fitting = [how for how in divisions if how.per_sm * how.smem_bytes <= room]
    found = copies(rows)
    return found | {str(how): jax.jit(copy("pallas_gpu", rows, how)) for how in fitting}


def measure_copy(
    rows: int, candidates: dict[str, Callable[..., Any]]
) -> list[dict[str, Any]]:
    """Times copies; checks that they are exact."""
    make = jax.jit(lambda key: jax.random.normal(key, (rows, COLUMNS)))
    inputs = [(make(key),) for key in jax.random.split(jax.random.key(0), INPUTS)]
    (x,) = inputs[0]
    for name, f in candidates.items():
        assert bool(jnp.all(f(x) == x)), name
    # XLA's own kernel for a copy; a negation cannot be elided.
    candidates = {"XLA, a negation": jax.jit(jnp.negative), **candidates}
    return _rows(f"copy of {rows}x{COLUMNS} f32", timing.on_device(candidates, inputs))


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
    parser.add_argument("--sweep", choices=("copy", "matmul"))
    options = parser.parse_args()
    rows = []
    if options.sweep != "copy":
        chosen = swept_products if options.sweep else products
        for shape in SHAPES:
            rows += measure_matmul(*shape, chosen(*shape))
    if options.sweep != "matmul":
        for scale in (1, 8):
            candidates = (swept_copies if options.sweep else copies)(ROWS * scale)
            rows += measure_copy(ROWS * scale, candidates)
    notes = (
        "bfloat16 products and float32 copies, random normal; device times, medians of "
        "40 rounds of one call of each in a shuffled order, 50 ms apart."
    )
    timing.report("Pipelines", rows, notes, options.json)


if __name__ == "__main__":
    main()
