# SPDX-License-Identifier: Apache-2.0
"""Counts of values: in each subcore by indexed adds, then in shared memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import sparsecore as plsc
from pallas_gpu.sparsecore.ops._rows import (
    ALIGNMENT,
    BOTH,
    CORE,
    SUBCORE,
    ArrayLike,
    Launch,
    count_values,
    padded,
    require_rows,
    rounded,
)

# Values of a block.
_MOST = 1024


def histogram(
    x: ArrayLike, bins: int, *, target: str | None = None, interpret: Any = None
) -> jax.Array:
    """Returns how often each of 0 to bins - 1 occurs.

    Each subcore counts in its own VMEM, adding lane by lane; the counts of a core are
    added in VMEM_SHARED by one stream a subcore, those of the cores by XLA.

    Args:
      x: int32 of shape (n,); values outside of the bins are left out.
      bins: number of bins, static; their counts fit a third of VMEM.
      target, interpret: the chip, and as of `plsc.kernel`.

    Returns:
      int32 of shape (bins,).

    Raises:
      ShapeError: another shape or type.
      OutOfResources: too many bins.
    """
    x = require_rows(x, "histogram", "x")
    launch = Launch(target, interpret)
    chip = launch.chip
    lanes = chip.lanes
    each = rounded(-(-bins // chip.subcores), max(lanes, ALIGNMENT))
    total = each * chip.subcores
    block = min(_MOST, rounded(-(-max(x.size, 1) // launch.workers), lanes))
    size = rounded(max(x.size, 1), block)

    def body(x_ref: Any, out: Any, counts: Any, index: Any, sums: Any) -> None:
        core, subcore = lax.axis_index(CORE), lax.axis_index(SUBCORE)

        @plsc.parallel_loop(0, total, step=lanes, unroll=8)
        def _(i: Any) -> None:
            counts[plsc.ds(i, lanes)] = jnp.zeros(lanes, jnp.int32)
            index[plsc.ds(i, lanes)] = i + lax.iota(jnp.int32, lanes)

        mine = plsc.ds(subcore * each, each)
        plsc.sync_copy(counts.at[mine], sums.at[mine])
        plsc.subcore_barrier()

        def count(part: Any) -> None:
            count_values(part, block, counts, bins, lanes)

        plsc.emit_pipeline(
            count,
            grid=(size // block,),
            in_specs=[plsc.BlockSpec((block,), lambda i: (i,))],
            core_axis_name=BOTH,
            dimension_semantics=(plsc.PARALLEL,),
        )(x_ref)
        plsc.sync_copy(counts, sums.at[index], add=True)
        plsc.subcore_barrier()
        plsc.sync_copy(
            sums.at[mine], out.at[plsc.ds(core * total + subcore * each, each)]
        )

    vector = plsc.VMEM((total,), jnp.int32)
    scratch = [vector, vector, plsc.VMEM_SHARED((total,), jnp.int32)]
    out = jax.ShapeDtypeStruct((chip.cores * total,), jnp.int32)
    counts = launch.kernel(body, out, scratch)(padded(x, size, -1))
    return counts.reshape(chip.cores, total).sum(0, dtype=jnp.int32)[:bins]
