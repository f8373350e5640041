# SPDX-License-Identifier: Apache-2.0
"""Kernels that copy rows which an array of indices names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.host import counted

Case = tuple[Callable[[Any], Callable[..., Any]], list[np.ndarray], np.ndarray]


def some(count: int, of: int) -> np.ndarray:
    return np.random.default_rng(count).permutation(of)[:count].astype(np.int32)


def gather(
    count: int,
    shape: Sequence[int],
    dtype: Any = jnp.bfloat16,
    columns: slice | None = None,
    transforms: Sequence[Any] = (),
    *,
    barrier: bool = True,
    part: Any = ...,
    layout: Any = None,
    target: str | None = None,
) -> Case:
    """Returns `make`, its arguments and its result: rows in the order of the indices.

    Args:
      count: number of indices.
      shape, dtype: of the array.
      columns: of each row; None for all.
      transforms: of the tile in SMEM.
      barrier: whether the copy has one; else it is in a group.
      part: index of the part of the array whose rows the indices name.
      layout: of the indices; None for that of a load.
      target: of the kernel.
    """
    x = counted(shape, dtype)
    rows = some(count, len(x[part]))
    at = () if columns is None else (columns,)

    def body(x, rows, o, tile, full):
        if layout is None:
            chosen = rows[...]
        else:
            chosen = plgpu.load(rows, layout=layout, optimized=False)
        source = (x if part is ... else x.at[part]).at[(chosen, *at)]
        if barrier:
            plgpu.copy_gmem_to_smem(source, tile, full)
            plgpu.barrier_wait(full)
        else:
            plgpu.copy_gmem_to_smem(source, tile)
            plgpu.wait_gmem_to_smem(0)
        o[...] = tile[...]

    expected = x[part][rows][(slice(None), *at)]
    tile = plgpu.SMEM(expected.shape, dtype, transforms=transforms)
    make = everywhere.kernel(body, expected, tile, plgpu.Barrier(), target=target)
    return make, [x, rows], expected


def scatter(
    shape: Sequence[int],
    dtype: Any = jnp.bfloat16,
    transforms: Sequence[Any] = (),
    target: str | None = None,
) -> Case:
    """As `gather`: all rows go to the rows of a result that the indices name."""
    x, rows = counted(shape, dtype), some(shape[0], shape[0])
    expected = np.empty_like(x)
    expected[rows] = x

    def body(x, rows, o, tile, full):
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile, o.at[rows[...]])
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM(shape, dtype, transforms=transforms)
    make = everywhere.kernel(body, x, tile, plgpu.Barrier(), target=target)
    return make, [x, rows], expected


def skipped(wanted: bool, target: str | None = None) -> Case:
    """As `gather`, in reverse order, unless a predicate skips it."""
    x = counted((8, 16), jnp.float32)

    def body(x, n, o, tile, full):
        tile[...] = jnp.zeros(x.shape, jnp.float32)
        plgpu.commit_smem()
        rows = 7 - jnp.arange(8)
        plgpu.copy_gmem_to_smem(x.at[rows], tile, full, predicate=n[0] > 0)
        plgpu.barrier_wait(full)
        o[...] = tile[...]

    tile = plgpu.SMEM(x.shape, jnp.float32)
    make = everywhere.kernel(body, x, tile, plgpu.Barrier(), target=target)
    return make, [x, np.array([wanted], np.int32)], x[::-1] if wanted else 0 * x
