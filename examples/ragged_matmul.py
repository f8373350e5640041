# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows, each with a matrix of its own: a mixture of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from examples import Case, normal

ROWS, COLUMNS, DEPTH = 64, 128, 64


def ragged_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns, for each group, its rows of x times its matrix.

    Args:
      x: (rows, k): the groups one after the other.
      w: (groups, k, n).
      sizes: (groups,), int32: rows of each group; together all rows.
    """
    (rows, k), (groups, _, n) = x.shape, w.shape
    tiles = plgpu.cdiv(rows, ROWS) + groups - 1
    group, start, end = _tiles(sizes, tiles)

    def body(group_ref, start_ref, end_ref, x_ref, w_ref, o_ref):
        tile, columns = (
            plgpu.program_id(0),
            plgpu.ds(plgpu.program_id(1) * COLUMNS, COLUMNS),
        )
        row = start_ref[tile] + jnp.arange(ROWS)
        inside = row < end_ref[tile]

        def step(i, acc):
            depth = plgpu.ds(i * DEPTH, DEPTH)
            a = plgpu.load(x_ref, (row, depth), mask=inside[:, None], other=0)
            b = w_ref[group_ref[tile], depth, columns]
            return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)

        acc = jax.lax.fori_loop(
            0, k // DEPTH, step, jnp.zeros((ROWS, COLUMNS), jnp.float32)
        )
        plgpu.store(
            o_ref, (row, columns), acc.astype(o_ref.dtype), mask=inside[:, None]
        )

    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows, n), x.dtype),
        grid=(tiles, n // COLUMNS),
        in_specs=[whole] * 5,
        out_specs=whole,
    )(group, start, end, x, w)


def _tiles(sizes: jax.Array, tiles: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each tile's group, first row, and the end of its group's rows.

    Tiles that no group needs have no rows.
    """
    ends, counts = jnp.cumsum(sizes), (sizes + ROWS - 1) // ROWS
    tile = jnp.arange(tiles)
    group = jnp.searchsorted(jnp.cumsum(counts), tile, side="right")
    group = jnp.minimum(group, sizes.size - 1).astype(jnp.int32)
    number = tile - (jnp.cumsum(counts) - counts)[group]
    start = (ends - sizes)[group] + number * ROWS
    return group, start.astype(jnp.int32), ends[group].astype(jnp.int32)


_BF16 = jnp.bfloat16
CASES = [
    Case(
        ragged_matmul,
        jax.lax.ragged_dot,
        (
            normal(0, 200, 128, dtype=_BF16),
            normal(1, 3, 128, 128, dtype=_BF16),
            np.array([70, 0, 130], np.int32),
        ),
        2e-1,
    )
]
