# SPDX-License-Identifier: Apache-2.0
"""Kernels in which a pair of CTAs multiplies one tile, with data and the product."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support.tensor_products import Product, in_tmem

PAIR: dict[str, Any] = {"cluster": (2,), "cluster_names": ("c",)}
PARTITIONED = plgpu.CopyPartition.PARTITIONED


@dataclasses.dataclass(frozen=True)
class PairProduct(Product):
    """One product of a tile by two CTAs.

    Its `m` is the rows of the accumulator in each CTA, `n` and `k` are of the whole
    product, of which there is one round; a left operand in TMEM needs not `tracked`.

    Attributes:
      tracked: whether the leader's barrier tracks the loads of both; else each CTA
        waits for its own and tells the leader.
    """

    b_stored: bool = True
    tracked: bool = True
    mesh = PAIR
    collective = True

    @property
    def whole(self) -> Product:
        """The product of both CTAs."""
        names = (field.name for field in dataclasses.fields(Product))
        fields = {name: getattr(self, name) for name in names}
        return Product(**{**fields, "m": 2 * self.m})

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Small operands, as they are stored."""
        return self.whole.operands(seed)

    @property
    def result(self) -> tuple[tuple[int, int], Any]:
        return (2 * self.m, self.n), self.acc

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the operands of one CTA, as they are stored."""
        return dataclasses.replace(self.whole, m=self.m, n=self.n // 2).shapes

    def scratch(self) -> dict[str, Any]:
        """The declarations of the kernel."""
        declared = super().scratch()
        last = {x: declared.pop(x) for x in ("done", "a_tmem") if x in declared}
        ready = plgpu.ClusterBarrier(
            collective_axes="c", orders_tensor_core=self.a_in_tmem
        )
        return {**declared, "ready": ready, **last}

    def load(self, a, b, a_smem, b_smem, loaded, ready) -> None:
        """Loads the CTA's parts; the leader knows then that all have arrived."""
        axes = int(self.a_stored), int(not self.b_stored)
        leads = lax.axis_index("c") == 0
        for src, dst, axis in zip((a, b), (a_smem, b_smem), axes, strict=True):
            if self.tracked:
                plgpu.copy_gmem_to_smem(
                    src,
                    dst,
                    loaded,
                    collective_axes="c",
                    leader_tracked=PARTITIONED(axis),
                )
                continue
            size = dst.shape[axis]
            part = plgpu.ds(lax.axis_index("c") * size, size)
            place = (slice(None), part) if axis else (part,)
            plgpu.copy_gmem_to_smem(src.at[place], dst, loaded)
        if self.tracked:
            plgpu.when(leads)(lambda: plgpu.barrier_wait(loaded))
        else:
            plgpu.barrier_wait(loaded)

    def body(
        self, a, b, out, a_smem, b_smem, acc, loaded, ready, done, a_tmem=None
    ) -> None:
        """Loads the operands, multiplies them, and stores the product."""
        self.load(a, b, a_smem, b_smem, loaded, ready)
        left = in_tmem(a_smem.T if self.a_stored else a_smem, a_tmem)
        if not self.tracked:
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)
        right = b_smem.T if self.b_stored else b_smem
        plgpu.tcgen05_mma(acc, left, right, done, accumulate=False, collective_axis="c")
        plgpu.barrier_wait(done)
        rows = plgpu.ds(lax.axis_index("c") * self.m, self.m)
        # As many columns as fit the registers.
        step = min(self.n, 128 * 128 // self.m)
        for start in range(0, self.n, step):
            columns = plgpu.ds(start, step)
            out[rows, columns] = plgpu.async_load_tmem(acc.at[:, columns])
