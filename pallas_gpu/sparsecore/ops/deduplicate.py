# SPDX-License-Identifier: Apache-2.0
"""Different indices of blocks, and where each index is among them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from pallas_gpu.sparsecore.ops._rows import (
    ALIGNMENT,
    BOTH,
    ArrayLike,
    Launch,
    padded,
    require_rows,
    rounded,
)
from pallas_gpu.sparsecore.ops.sorting import network

# No index has this value: what is behind the different ones.
NONE = -1


def deduplicate(
    rows: ArrayLike,
    *,
    block: int = 512,
    target: str | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the different indices of each block, to look up each of them once.

    `unique[b, inverse]` of a block is the block: rows are looked up for `unique` alone,
    and distributed by `inverse`.

    Args:
      rows: int32 of shape (n,), 0 or more.
      block: indices of a block, a power of two of 16 or more: each block is that of a
        subcore.
      target, interpret: the chip, and as of `plsc.kernel`.

    Returns:
      `unique`, (blocks, block): the different indices in ascending order, and then -1;
      `inverse`, (n,): the position of each index in `unique` of its block; and the
      number of different indices, (blocks,).

    Raises:
      ShapeError, ArgumentError: another shape or type, a block of another size.
    """
    rows = require_rows(rows, "deduplicate")
    launch = Launch(target, interpret)
    lanes = launch.chip.lanes
    if block < 16 or block & (block - 1):
        raise errors.ArgumentError(
            "deduplicate: block is not a power of two",
            expected="16, 32, 64 and so on",
            got=block,
            hint="512 is the default",
        )
    size = rounded(max(rows.size, 1), block)
    blocks = size // block

    unroll = min(8, block // lanes)

    def find(part: Any, unique: Any, inverse: Any, count: Any, *scratch: Any) -> None:
        keys, places = scratch

        # A register in front of the keys: the one before the first key.
        keys[plsc.ds(0, lanes)] = jnp.full(lanes, NONE - 1, jnp.int32)

        @plsc.parallel_loop(0, block, step=lanes, unroll=unroll)
        def _(i: Any) -> None:
            keys[plsc.ds(lanes + i, lanes)] = part[plsc.ds(i, lanes)]
            places[plsc.ds(lanes + i, lanes)] = i + lax.iota(jnp.int32, lanes)
            unique[plsc.ds(i, lanes)] = jnp.full(lanes, NONE, jnp.int32)

        network([keys, places], lanes, block, lanes)
        none = jnp.zeros(lanes, jnp.int32)

        @plsc.parallel_loop(0, block, step=lanes, unroll=unroll, carry=none)
        def total(i: Any, before: Any) -> Any:
            key = keys[plsc.ds(lanes + i, lanes)]
            is_new = key != keys[plsc.ds(lanes + i - 1, lanes)]
            rank = before + plsc.cumsum(jnp.where(is_new, 1, 0)) - 1
            plsc.store_scatter(unique, [rank], key, mask=is_new)
            plsc.store_scatter(inverse, [places[plsc.ds(lanes + i, lanes)]], rank)
            return before + plsc.all_reduce_population_count(is_new)

        count[plsc.ds(0, lanes)] = total

    def body(rows_ref: Any, *refs: Any) -> None:
        *outs, keys, places = refs
        each = plsc.BlockSpec((block,), lambda i: (i,))
        plsc.emit_pipeline(
            find,
            grid=(blocks,),
            in_specs=[each],
            out_specs=[each, each, plsc.BlockSpec((lanes,), lambda i: (i,))],
            core_axis_name=BOTH,
            dimension_semantics=(plsc.PARALLEL,),
        )(rows_ref, *outs, scratches=(keys, places))

    longer = plsc.VMEM((block + max(lanes, ALIGNMENT),), jnp.int32)
    sizes = (size, size, blocks * lanes)
    out = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in sizes]
    # Padding repeats the last index, so that it adds none.
    last = rows[-1] if rows.size else 0
    unique, inverse, counts = launch.kernel(body, out, [longer] * 2)(
        padded(rows, size, last)
    )
    return (
        unique.reshape(blocks, block),
        inverse[: rows.size],
        counts.reshape(blocks, lanes)[:, 0],
    )
