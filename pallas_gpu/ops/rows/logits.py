# SPDX-License-Identifier: Apache-2.0
"""Kernels on logits that are never stored: tiles of a product, reduced in registers.

They are `ops.gemm.hopper`'s product with another end. `statistics` reduces each row of
a tile to its maximum, the sum of its exponentials, and the logit of the row's label.
`derivative` turns a tile into the derivative of the loss with respect to its logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.gemm import hopper
from pallas_gpu.ops.gemm.config import MatmulConfig
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import cached

# A consumer's tile and its exponentials fit in the registers.
CONFIG = MatmulConfig(tile_m=64, tile_n=128, stages=5, cluster=None)
_ROW = plgpu.Layout.WGMMA_ROW
# Below all logits, and finite: the difference of two of them is a number.
LOWEST = float(jnp.finfo(jnp.float32).min)
# Results of `statistics`, and operands of `derivative`.
_FOUND, _FACTORS = ("tops", "totals", "picked"), ("d_top", "d_label", "logsumexp")


@dataclasses.dataclass(frozen=True)
class _Reduced(hopper.Consumer):
    """A consumer that stores what its tiles' rows are reduced to."""

    def inputs(self, row: Any, column: Any) -> tuple[Any, Any, Any]:
        """Returns the labels of the rows, each element's column, and what is inside."""
        c, p = self.schedule.config, self.schedule.problem
        labels = self.of_rows(self.mem.labels, row)
        columns = plgpu.broadcasted_iota(jnp.int32, (c.tile_m, c.tile_n), 1) + column
        inside = columns < p.n if p.n % c.tile_n else None
        return labels, columns, inside

    def of_rows(self, ref: Any, row: Any) -> Any:
        window = ref.at[plgpu.ds(row, self.schedule.config.tile_m)]
        return plgpu.load(window, layout=_ROW, optimized=False)

    def to_columns(self, rows: Any) -> Any:
        c = self.schedule.config
        return lax.broadcast_in_dim(rows, (c.tile_m, c.tile_n), (0,))


class _Statistics(_Reduced):
    def store(self, products: Sequence[Any], batch: Any, row: Any, column: Any) -> None:
        del batch
        c, (x,) = self.schedule.config, products
        labels, columns, inside = self.inputs(row, column)
        if inside is not None:
            x = jnp.where(inside, x, LOWEST)
        is_label = columns == self.to_columns(labels)
        picked = jnp.sum(jnp.where(is_label, x, 0.0), axis=1)
        top = jnp.max(x, axis=1)
        total = jnp.sum(jnp.exp(x - self.to_columns(top)), axis=1)
        at = lax.div(column, jnp.int32(c.tile_n)), plgpu.ds(row, c.tile_m)
        for name, rows in zip(_FOUND, (top, total, picked), strict=True):
            self.mem.get(name)[at] = rows


class _Derivative(_Reduced):
    def store(self, products: Sequence[Any], batch: Any, row: Any, column: Any) -> None:
        (x,) = products
        labels, columns, inside = self.inputs(row, column)
        d_top, d_label, logsumexp = (
            self.of_rows(self.mem.get(name), row) for name in _FACTORS
        )
        d = jnp.exp(x - self.to_columns(logsumexp)) * self.to_columns(d_top)
        is_label = columns == self.to_columns(labels)
        d = d - jnp.where(is_label, self.to_columns(d_label), 0.0)
        if inside is not None:
            d = jnp.where(inside, d, 0.0)
        super().store([d], batch, row, column)


def _call(p: Problem, name: str, consumer: Any, results: Any, *factors: str) -> Any:
    schedule, inputs = hopper.Schedule(p, CONFIG), ("a", "b", "labels", *factors)
    return hopper.launch(schedule, name, consumer, results, inputs=inputs)


def padded_rows(m: int) -> int:
    return plgpu.cdiv(m, CONFIG.block_m) * CONFIG.block_m


@cached
def statistics(p: Problem, name: str) -> Any:
    """Returns a function of x, w and labels.

    Its results are, for each tile of columns and each row, the largest logit, the sum
    of the exponentials of all less that one, and the logit of the label, or 0 where it
    is of another tile: float32 (column tiles, padded rows).
    """
    shape = plgpu.cdiv(p.n, CONFIG.tile_n), padded_rows(p.m)
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _call(p, name, _Statistics, dict.fromkeys(_FOUND, out))


@cached
def derivative(p: Problem, name: str) -> Any:
    """Returns a function of x, w, labels and three factors of each row.

    Its result, (1, M, N), is exp(logits - logsumexp) * d_top, less d_label in the
    column of the label.
    """
    out = jax.ShapeDtypeStruct(p.out_shape, p.out_dtype)
    return _call(p, name, _Derivative, out, *_FACTORS)
