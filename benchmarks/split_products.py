# SPDX-License-Identifier: Apache-2.0
"""A product of few elements and a long K: CTAs share K, and TMA adds their results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu

_SWIZZLED = plgpu.SwizzleTransform(128)
_OPERAND = (plgpu.TilingTransform((8, 64)), _SWIZZLED)
_SUMS = (plgpu.TilingTransform((8, 32)), _SWIZZLED)
_TILE_K, _ROWS, _COLUMNS = 64, 64, 32


@dataclasses.dataclass(frozen=True)
class SplitProduct:
    """How CTAs share a product.

    Attributes:
      parts: of K, each of other CTAs.
      tile_m, tile_n: rows and columns of a CTA's tile.
      stages: buffers of 64 columns of K each.
    """

    parts: int
    tile_m: int = 128
    tile_n: int = 128
    stages: int = 5

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply, each for 64 rows."""
        return self.tile_m // _ROWS


@dataclasses.dataclass(frozen=True)
class _Memory:
    a: Any
    b: Any
    out: Any
    a_smem: Any
    b_smem: Any
    sums: Any
    full: Any
    empty: Any
    drained: Any


def split_product(
    config: SplitProduct, *, interpret: Any = None
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns `a @ b` in float32, of bf16."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        c, shape = config, (a.shape[0], b.shape[1])
        total = jax.new_ref(jnp.zeros(shape, jnp.float32))
        plgpu.kernel(
            functools.partial(_body, c),
            out_type=(),
            # The CTAs of a part read the same operands: they start together.
            grid=(c.parts, shape[0] // c.tile_m, shape[1] // c.tile_n),
            grid_names=("part", "i", "j"),
            num_threads=c.consumers + 1,
            thread_name="wg",
            scratch_types=_scratch(c),
            kernel_name="split_product",
            interpret=interpret,
        )(a, b, total)
        return total[...]

    return run


def _scratch(c: SplitProduct) -> dict[str, Any]:
    ring = [
        plgpu.SMEM((c.stages, *shape), jnp.bfloat16, transforms=_OPERAND)
        for shape in ((c.tile_m, _TILE_K), (_TILE_K, c.tile_n))
    ]
    shape = c.consumers, c.tile_n // _COLUMNS, _ROWS, _COLUMNS
    sums = plgpu.SMEM(shape, jnp.float32, transforms=_SUMS)
    return {
        "memory": plgpu.RefUnion(ring, sums),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
        "empty": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
        "drained": plgpu.Barrier(num_arrivals=c.consumers),
    }


def _body(c: SplitProduct, a, b, out, **scratch) -> None:
    (a_smem, b_smem), sums = scratch.pop("memory")
    i, j, part = (lax.axis_index(name) for name in ("i", "j", "part"))
    mem = _Memory(a=a, b=b, out=out, a_smem=a_smem, b_smem=b_smem, sums=sums, **scratch)
    wg = lax.axis_index("wg")
    steps = a.shape[1] // (_TILE_K * c.parts)
    row, column = i * c.tile_m, j * c.tile_n

    @plgpu.when(wg == c.consumers)
    def _():
        _produce(c, mem, part * steps, steps, row, column)

    @plgpu.when(wg < c.consumers)
    def _():
        _add(c, mem, part, wg, _multiply(c, mem, steps, wg), row, column)


def _produce(c: SplitProduct, mem: _Memory, first, steps, row, column) -> None:
    rows, columns = plgpu.ds(row, c.tile_m), plgpu.ds(column, c.tile_n)

    @plgpu.loop(0, steps)
    def _(step):
        slot = lax.rem(step, np.int32(c.stages))

        @plgpu.when(step >= c.stages)
        def _():
            plgpu.barrier_wait(mem.empty.at[slot])

        depth = plgpu.ds((first + step) * _TILE_K, _TILE_K)
        for source, buffers in (
            (mem.a.at[rows, depth], mem.a_smem),
            (mem.b.at[depth, columns], mem.b_smem),
        ):
            plgpu.copy_gmem_to_smem(source, buffers.at[slot], mem.full.at[slot])


def _multiply(c: SplitProduct, mem: _Memory, steps, wg) -> Any:
    """Returns 64 rows of the product, when nobody needs the ring any more."""

    def scope(acc):
        own = plgpu.ds(wg * _ROWS, _ROWS)

        @plgpu.loop(0, steps)
        def _(step):
            slot = lax.rem(step, np.int32(c.stages))
            plgpu.barrier_wait(mem.full.at[slot])
            plgpu.wgmma(acc, mem.a_smem.at[slot, own], mem.b_smem.at[slot])
            plgpu.wgmma_wait(1)

            @plgpu.when(step > 0)
            def _():
                plgpu.barrier_arrive(
                    mem.empty.at[lax.rem(step - 1, np.int32(c.stages))]
                )

        return acc[...]

    product = plgpu.run_scoped(scope, plgpu.ACC((_ROWS, c.tile_n), jnp.float32))
    plgpu.barrier_arrive(mem.drained)
    plgpu.barrier_wait(mem.drained)
    return product


def _add(c: SplitProduct, mem: _Memory, part, wg, product, row, column) -> None:
    """Adds 64 rows to the result, from other columns in CTAs of other parts."""
    parts = c.tile_n // _COLUMNS
    for k in range(parts):
        mem.sums[wg, k] = product[:, k * _COLUMNS : (k + 1) * _COLUMNS]
    plgpu.commit_smem()
    rows = plgpu.ds(row + wg * _ROWS, _ROWS)
    for k in range(parts):
        at = lax.rem(part + k, np.int32(parts))
        place = rows, plgpu.ds(column + at * _COLUMNS, _COLUMNS)
        plgpu.copy_smem_to_gmem(
            mem.sums.at[wg, at], mem.out.at[place], reduction_op="add"
        )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
