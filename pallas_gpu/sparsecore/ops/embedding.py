# SPDX-License-Identifier: Apache-2.0
"""Lookups in a table, with their derivative, and sums of bags of rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import sparsecore as plsc
from pallas_gpu.sparsecore.ops import segments
from pallas_gpu.sparsecore.ops._rows import (
    BOTH,
    ArrayLike,
    Launch,
    padded,
    require_matrix,
    require_rows,
    rounded,
)

_TYPES = (jnp.float32, jnp.bfloat16, jnp.int32)
# No row is looked up for this index.
MISSING = -1


def embedding_lookup(
    table: ArrayLike,
    rows: ArrayLike,
    *,
    missing: bool = False,
    target: str | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Returns rows of a table: `table[rows]`.

    Each subcore gathers blocks of rows by one stream each, while the indices of the
    next block arrive and the last one leaves. Its derivative with respect to the table
    adds the rows of the cotangent, by `segment_sum`.

    Args:
      table: (n, width) of float32, bfloat16 or int32, of any width. Rows of multiples
        of 128 words are gathered in place; for others XLA copies the table at each
        call.
      rows: int32 of shape (m,), within the table.
      missing: whether rows may be -1, for which the result is zero.
      target, interpret: the chip, and as of `plsc.kernel`.

    Returns:
      (m, width), of the type of the table.

    Raises:
      ShapeError: other shapes or types.
      UnsupportedError: 16 rows (8 on v5p and v6e) do not fit VMEM.
    """
    who = "embedding_lookup"
    table = require_matrix(table, who, "the table", _TYPES)
    rows = require_rows(rows, who)
    if rows.size == 0:
        return jnp.zeros((0, table.shape[1]), table.dtype)
    return _lookup(table, rows, missing, Launch(target, interpret))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: Any, rows: Any, missing: bool, launch: Launch) -> jax.Array:
    count, width = rows.shape[0], table.shape[1]
    launch = launch.of_rows(width, table.dtype)
    block = launch.rows_of_block(width, table.dtype, 3, -(-count // launch.workers))
    size = rounded(count, block)
    # Zeros come from HBM: rows that are narrower than a register have no vectors.
    zeros = [jnp.zeros((block, width), table.dtype)] if missing else []
    out = jax.ShapeDtypeStruct((size, width), table.dtype)

    def body(table_ref: Any, rows_ref: Any, *refs: Any) -> None:
        *zeros_ref, out_ref = refs

        def gather(index: Any, part: Any) -> None:
            for empty in zeros_ref:
                plsc.sync_copy(empty, part)
            named = plsc.Indices(index, MISSING if missing else None)
            plsc.sync_copy(table_ref.at[named], part)

        plsc.emit_pipeline(
            gather,
            grid=(size // block,),
            in_specs=[plsc.BlockSpec((block,), lambda i: (i,))],
            out_specs=[plsc.BlockSpec((block, width), lambda i: (i, 0))],
            core_axis_name=BOTH,
            dimension_semantics=(plsc.PARALLEL,),
        )(rows_ref, out_ref)

    found = launch.kernel(body, out, ())(table, padded(rows, size, 0), *zeros)
    return found[:count]


def _lookup_forward(table: Any, rows: Any, missing: bool, launch: Launch) -> Any:
    empty = jnp.zeros((0,), table.dtype)
    return _lookup(table, rows, missing, launch), (rows, table.shape[0], empty)


def _lookup_backward(_: bool, launch: Launch, saved: Any, cotangent: Any) -> Any:
    rows, count, empty = saved
    sums = segments.segment_sum(
        cotangent.astype(jnp.float32), rows, count,
        target=launch.target, interpret=launch.interpret,
    )  # fmt: skip
    return sums.astype(empty.dtype), np.zeros(rows.shape, jax.dtypes.float0)


_lookup.defvjp(_lookup_forward, _lookup_backward)


def embedding_bag(
    table: ArrayLike,
    rows: ArrayLike,
    offsets: ArrayLike,
    *,
    target: str | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Returns the sum of the rows of each bag: a ragged gather-reduce.

    Bag b consists of `rows[offsets[b]:offsets[b + 1]]`. Streams do all of the work: one
    gathers a block of rows to VMEM while another adds the last one to the sums in
    VMEM_SHARED.

    Args:
      table: (n, width) of float32 or int32.
      rows: int32 of shape (m,), within the table.
      offsets: int32 of shape (bags + 1,), not decreasing, from 0 to m.
      target, interpret: the chip, and as of `plsc.kernel`.

    Returns:
      (bags, width), of the type of the table; zero for a bag without rows.

    Raises:
      ShapeError: other shapes or types.
      UnsupportedError: 16 rows (8 on v5p and v6e), or the indices of a subcore, do not
        fit VMEM.
    """
    who = "embedding_bag"
    table = require_matrix(table, who, "the table", segments.TYPES)
    rows = require_rows(rows, who)
    offsets = require_rows(offsets, who, "offsets")
    bags = offsets.shape[0] - 1
    positions = jnp.arange(rows.shape[0], dtype=jnp.int32)
    bag = jnp.searchsorted(offsets, positions, side="right").astype(jnp.int32) - 1
    launch = Launch(target, interpret)
    return segments.summed(table, rows, bag, bags, launch)
