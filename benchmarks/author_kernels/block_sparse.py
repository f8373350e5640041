# SPDX-License-Identifier: Apache-2.0
"""A product with a matrix of which only some blocks are stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from benchmarks.author_kernels import normal

F32 = jnp.float32
BLOCK, DEPTH, PARTS = 128, 64, 2
# Rows of a block, stages, whether blocks are persistent, whether threads store to GMEM.
CONFIGS = [
    (128, 4, False, False), (128, 5, True, False), (256, 3, False, False),
    (256, 3, True, False), (256, 4, True, True),
]  # fmt: skip


def block_sparse(x, blocks, table, config=CONFIGS[0]):
    """Returns x @ w, where column j of blocks of w has those that the table names.

    Args:
      x: (m, k), bfloat16.
      blocks: (number, 128, 128), bfloat16: blocks of w, those of a column adjacent.
      table: (n // 128, blocks of a column), int32: which rows of blocks they are.
    """
    m, (columns, stored) = len(x), table.shape
    rows, stages, persistent, direct = config
    memory = plgpu.GMEM if direct else plgpu.SMEM
    steps = stored * PARTS

    def body(table_ref, x_ref, w_ref, o_ref, acc_ref):
        mine = plgpu.ds(jax.lax.axis_index("wg") * (rows // 2), rows // 2)
        acc_ref[...] += jnp.dot(x_ref[mine], w_ref[...], preferred_element_type=F32)

        @plgpu.when(plgpu.program_id(2) == steps - 1)
        def _():
            o_ref[mine] = acc_ref[...].astype(o_ref.dtype)

    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((m, columns * BLOCK), x.dtype),
        grid_spec=plgpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(m // rows, columns, steps),
            in_specs=[
                plgpu.BlockSpec(
                    (rows, DEPTH),
                    lambda i, j, s, rows: (i, rows[j, s // PARTS] * PARTS + s % PARTS),
                ),
                plgpu.BlockSpec(
                    (DEPTH, BLOCK), lambda i, j, s, table: (j * steps + s, 0)
                ),
            ],
            out_specs=plgpu.BlockSpec(
                (rows, BLOCK), lambda i, j, s, table: (i, j), memory_space=memory
            ),
            scratch_shapes=[plgpu.ACC((rows // 2, BLOCK))],
        ),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            max_concurrent_steps=stages,
            persistent=persistent,
        ),
    )(table, x, blocks.reshape(-1, BLOCK))


def reference(x, blocks, table):
    def column(blocks, rows):
        parts = x.reshape(len(x), -1, BLOCK)[:, rows]
        return jnp.einsum("msk,skn->mn", parts, blocks, preferred_element_type=F32)

    blocks = blocks.reshape(*table.shape, BLOCK, BLOCK)
    out = jax.lax.map(lambda b: column(*b), (blocks, table))
    return out.swapaxes(0, 1).reshape(len(x), -1).astype(x.dtype)


# Rows, depth, columns, blocks stored of each column.
SMALL, FULL = (256, 512, 256, 2), (8192, 4096, 14336, 8)


def arrays(m, k, n, stored):
    rng = np.random.default_rng(0)
    columns = n // BLOCK
    table = [rng.permutation(k // BLOCK)[:stored] for _ in range(columns)]
    x = normal(1, m, k)
    blocks = normal(2, columns * stored, BLOCK, BLOCK)
    return x, blocks, np.sort(np.asarray(table, np.int32), 1)


function = block_sparse
