# SPDX-License-Identifier: Apache-2.0
"""The kernels of `benchmarks/copies.py`: streams through SMEM, gather, split K."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu

# Rows of the widest box of a tensor map, in elements.
WIDTH = 256
OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def stream(
    rows: int, slots: int, *, by_threads: bool = False, interpret: Any = None
) -> Callable[[jax.Array], jax.Array]:
    """Returns a copy of arrays of `WIDTH` columns: each block copies some tiles.

    All loads of a block are under way at once. Each tile is stored when it has arrived.

    Args:
      rows: of a tile; they divide the array's.
      slots: tiles of a block.
      by_threads: whether cp.async loads them, and not TMA.
      interpret: as of `plgpu.kernel`.
    """

    def body(x, o, tiles, full):
        first = lax.axis_index("block") * (rows * slots)
        parts = [plgpu.ds(first + i * rows, rows) for i in range(slots)]
        for i, part in enumerate(parts):
            if by_threads:
                plgpu.copy_gmem_to_smem(x.at[part], tiles.at[i])
            else:
                plgpu.copy_gmem_to_smem(x.at[part], tiles.at[i], full.at[i])
        for i, part in enumerate(parts):
            if by_threads:
                plgpu.wait_gmem_to_smem(slots - 1 - i)
            else:
                plgpu.barrier_wait(full.at[i])
            plgpu.copy_smem_to_gmem(tiles.at[i], o.at[part])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def run(x: jax.Array) -> jax.Array:
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.shape[0] // (rows * slots),),
            grid_names=("block",),
            scratch_types=[
                plgpu.SMEM((slots, rows, x.shape[1]), x.dtype),
                plgpu.Barrier(num_barriers=slots),
            ],
            interpret=interpret,
        )(x)

    return run


def ring(
    rows: int, slots: int, blocks: int, *, interpret: Any = None
) -> Callable[[jax.Array], jax.Array]:
    """Returns a copy as `stream`, by blocks that stay: each loops over tiles.

    A slot is loaded again when its store has read it, half of the slots later.

    Args:
      rows: of a tile.
      slots: tiles in SMEM, an even number.
      blocks: of the launch; they divide the number of tiles.
      interpret: as of `plgpu.kernel`.
    """
    behind = slots // 2

    def body(x, o, tiles, full):
        steps = x.shape[0] // (rows * blocks)
        block = lax.axis_index("block")

        def part(step):
            return plgpu.ds((step * blocks + block) * rows, rows)

        def load(step, slot):
            plgpu.copy_gmem_to_smem(x.at[part(step)], tiles.at[slot], full.at[slot])

        for step in range(min(slots - behind, steps)):
            load(step, step)

        def copy(step, carry):
            slot = lax.rem(step, slots)
            plgpu.barrier_wait(full.at[slot])
            plgpu.copy_smem_to_gmem(tiles.at[slot], o.at[part(step)])
            later = step + slots - behind

            @plgpu.when(later < steps)
            def _():
                plgpu.wait_smem_to_gmem(behind, wait_read_only=True)
                load(later, lax.rem(later, slots))

            return carry

        lax.fori_loop(0, steps, copy, 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def run(x: jax.Array) -> jax.Array:
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(blocks,),
            grid_names=("block",),
            scratch_types=[
                plgpu.SMEM((slots, rows, x.shape[1]), x.dtype),
                plgpu.Barrier(num_barriers=slots),
            ],
            interpret=interpret,
        )(x)

    return run


def gather(
    rows: int, slots: int, *, interpret: Any = None
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns `x[indices]`: each block copies some groups of rows through SMEM.

    Args:
      rows: of a group; they divide the number of indices.
      slots: groups of a block, all under way at once.
      interpret: as of `plgpu.kernel`.
    """

    def body(x, indices, o, tiles, full):
        first = lax.axis_index("block") * (rows * slots)
        parts = [plgpu.ds(first + i * rows, rows) for i in range(slots)]
        for i, part in enumerate(parts):
            chosen = x.at[indices[part]]
            plgpu.copy_gmem_to_smem(chosen, tiles.at[i], full.at[i])
        for i, part in enumerate(parts):
            plgpu.barrier_wait(full.at[i])
            plgpu.copy_smem_to_gmem(tiles.at[i], o.at[part])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def run(x: jax.Array, indices: jax.Array) -> jax.Array:
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((indices.shape[0], *x.shape[1:]), x.dtype),
            grid=(indices.shape[0] // (rows * slots),),
            grid_names=("block",),
            scratch_types=[
                plgpu.SMEM((slots, rows, *x.shape[1:]), x.dtype),
                plgpu.Barrier(num_barriers=slots),
            ],
            interpret=interpret,
        )(x, indices)

    return run


def split_product(
    splits: int, steps_in_flight: int = 6, tile_m: int = 128, *, interpret: Any = None
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns `a @ b` in float32, of bf16: blocks share K, and TMA adds their results.

    Args:
      splits: number of parts of K.
      steps_in_flight: of the pipeline of 64 columns of K each.
      tile_m: rows of a block's tile, which has 128 columns.
      interpret: as of `plgpu.kernel`.
    """
    tile_n, tile_k = 128, 64

    def body(a, b, o):
        i, j, part = (lax.axis_index(name) for name in ("i", "j", "part"))
        steps = a.shape[1] // (tile_k * splits)

        def scope(acc):
            def step(_, a_tile, b_tile):
                plgpu.wgmma(acc, a_tile, b_tile)
                plgpu.wgmma_wait(1)

            plgpu.emit_pipeline(
                step,
                grid=(steps,),
                in_specs=[
                    plgpu.BlockSpec(
                        (tile_m, tile_k),
                        lambda k: (i, part * steps + k),
                        transforms=OPERAND,
                        delay_release=1,
                    ),
                    plgpu.BlockSpec(
                        (tile_k, tile_n),
                        lambda k: (part * steps + k, j),
                        transforms=OPERAND,
                        delay_release=1,
                    ),
                ],
                max_concurrent_steps=steps_in_flight,
            )(a, b)
            return acc[...]

        total = plgpu.run_scoped(scope, plgpu.ACC((tile_m, tile_n), jnp.float32))

        def add(tile):
            tile[...] = total
            plgpu.commit_smem()
            place = plgpu.ds(i * tile_m, tile_m), plgpu.ds(j * tile_n, tile_n)
            plgpu.copy_smem_to_gmem(tile, o.at[place], reduction_op="add")
            plgpu.wait_smem_to_gmem(0)

        # In the memory of the pipeline, which has ended.
        shape = (tile_m, tile_n)
        plgpu.run_scoped(add, plgpu.SMEM(shape, jnp.float32, transforms=transforms))

    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        out = jax.new_ref(jnp.zeros((a.shape[0], b.shape[1]), jnp.float32))

        plgpu.kernel(
            body,
            out_type=(),
            grid=(a.shape[0] // tile_m, b.shape[1] // tile_n, splits),
            grid_names=("i", "j", "part"),
            interpret=interpret,
        )(a, b, out)
        return out[...]

    return run
