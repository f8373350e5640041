# SPDX-License-Identifier: Apache-2.0
"""Rows times the matrix of their group, in float8 with scales of blocks, on a ring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from examples import Case, normal

# Rows, columns and depth of a block; a block of rows is of one group.
BLOCK = 128
_TILES = plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)


def scaled_groups(
    x: jax.Array,
    weights: jax.Array,
    x_scales: jax.Array,
    w_scales: jax.Array,
    groups: jax.Array,
) -> jax.Array:
    """Returns x[row] weights[group of the row]^T, with the scales of their blocks.

    Args:
      x: (rows, k), float8_e4m3fn.
      weights: (groups, n, k), float8_e4m3fn.
      x_scales: (k / 128, rows), float32, of 1 x 128 elements each.
      w_scales: (groups, n / 128, k / 128), float32, of 128 x 128 elements each.
      groups: (rows / 128,), int32: the group of each block of rows.
    """
    (rows, k), n = x.shape, weights.shape[1]
    steps = k // BLOCK
    roles = plgpu.Roles(consumers=2, registers=(40, 232))
    tile = plgpu.SMEM((4, BLOCK, BLOCK), x.dtype, transforms=_TILES)
    ring = plgpu.Ring.of((tile, tile), consumers=2)
    parts = plgpu.SMEM(
        (2, 1, 64, 64), jnp.bfloat16,
        transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
    )  # fmt: skip

    def body(x, weights, x_scales, w_scales, groups, o, ring, parts):
        i, j, wg = (lax.axis_index(a) for a in ("i", "j", "wg"))
        group = groups[i]

        def produce():
            left, right = plgpu.ds(i * BLOCK, BLOCK), plgpu.ds(j * BLOCK, BLOCK)

            @plgpu.loop(0, steps)
            def _(step):
                slot, depth = ring.fill(step), plgpu.ds(step * BLOCK, BLOCK)
                a, b = slot.buffers
                plgpu.copy_gmem_to_smem(x.at[left, depth], a, slot.full)
                plgpu.copy_gmem_to_smem(weights.at[group, right, depth], b, slot.full)

        def consume():
            own = plgpu.ds(wg * 64, 64)
            mine = plgpu.ds(i * BLOCK + wg * 64, 64)

            def add(step, total):
                scale = x_scales[step, mine] * w_scales[group, j, step]

                def multiply(acc):
                    a, b = ring.take(step).buffers
                    plgpu.wgmma(acc, a.at[own], plgpu.transpose_ref(b, (1, 0)))
                    return acc[...]

                block = plgpu.run_scoped(multiply, plgpu.ACC((64, BLOCK)))
                ring.release(step)
                return total + block * scale[:, None]

            start = jnp.zeros((64, BLOCK), jnp.float32)
            total = lax.fori_loop(0, steps, add, start)
            store = plgpu.TileStore(parts.at[wg], BLOCK // 64)
            store.store_all(total, o.at[mine, plgpu.ds(j * BLOCK, BLOCK)])
            plgpu.wait_smem_to_gmem(0)

        roles.run(wg, produce, consume)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, n), jnp.bfloat16),
        scratch_types=[ring, parts],
        grid=(rows // BLOCK, n // BLOCK),
        grid_names=("i", "j"),
        num_threads=roles.num_threads,
        thread_name="wg",
    )(x, weights, x_scales, w_scales, groups)


def reference(x, weights, x_scales, w_scales, groups):
    x = x.astype(jnp.float32) * jnp.repeat(x_scales.T, BLOCK, 1)
    scales = jnp.repeat(jnp.repeat(w_scales, BLOCK, 1), BLOCK, 2)
    weights = weights.astype(jnp.float32) * scales
    by_row = weights[jnp.repeat(groups, BLOCK)]
    return jnp.einsum("mk,mnk->mn", x, by_row).astype(jnp.bfloat16)


_FP8 = jnp.float8_e4m3fn
CASES = [
    Case(
        scaled_groups,
        reference,
        (
            normal(0, 384, 256, dtype=_FP8),
            normal(1, 2, 256, 256, dtype=_FP8),
            np.abs(normal(2, 2, 384)) + 0.5,
            np.abs(normal(3, 2, 2, 2)) + 0.5,
            np.array([1, 0, 1], np.int32),
        ),
        2e-2,
    )
]
