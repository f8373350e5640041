# SPDX-License-Identifier: Apache-2.0
"""The kernels of `benchmarks/copies.py`: streams through SMEM, and a gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu

# Rows of the widest box of a tensor map, in elements.
WIDTH = 256
# SMEM of an SM, and what a block has beside its arrays: the launch's, and mbarriers
# (CUDA programming guide, 9.0).
_SM_BYTES, _RESERVED = 228 * 1024, 1024 + 512


def stream(
    rows: int,
    slots: int,
    *,
    by_threads: bool = False,
    resident: int | None = None,
    interpret: Any = None,
) -> Callable[[jax.Array], jax.Array]:
    """Returns a copy of arrays of `WIDTH` columns: each block copies some tiles.

    All loads of a block are under way at once. Each tile is stored when it has arrived.

    Args:
      rows: of a tile; they divide the array's.
      slots: tiles of a block.
      by_threads: whether cp.async loads them, and not TMA.
      resident: blocks on an SM, which SMEM limits; None: as many as fit.
      interpret: as of `plgpu.kernel`.
    """

    def body(x, o, tiles, full, *_):
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
        tiles = plgpu.SMEM((slots, rows, x.shape[1]), x.dtype)
        unused = []
        if resident is not None:
            size = slots * rows * x.shape[1] * x.dtype.itemsize
            unused = [plgpu.SMEM((_SM_BYTES // resident - _RESERVED - size,), jnp.int8)]
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.shape[0] // (rows * slots),),
            grid_names=("block",),
            scratch_types=[tiles, plgpu.Barrier(num_barriers=slots), *unused],
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
