# SPDX-License-Identifier: Apache-2.0
"""Kernels in which a pair of CTAs multiplies one tile, with data and the product."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support.tensor_products import F16, F32, Case, Product, in_tmem, storage

PAIR: dict[str, Any] = {"cluster": (2,), "cluster_names": ("c",)}
PARTITIONED = plgpu.CopyPartition.PARTITIONED


@dataclasses.dataclass(frozen=True)
class PairProduct(Case):
    """One product of a tile by two CTAs.

    Attributes:
      m: rows of the accumulator in each CTA.
      n, k: of the whole product.
      a, b, acc: element types.
      swizzle: of both operands, in bytes.
      a_stored, b_stored: whether the operand is stored transposed: (K, M) and (N, K).
      tracked: whether the leader's barrier tracks the loads of both; else each CTA
        waits for its own and tells the leader.
      a_in_tmem: whether the left operand is copied to TMEM first; needs not `tracked`.
      inferred: whether the operands are declared without transforms.
    """

    m: int = 128
    n: int = 64
    k: int = 64
    a: Any = F16
    b: Any = F16
    acc: Any = F32
    swizzle: int = 128
    a_stored: bool = False
    b_stored: bool = True
    tracked: bool = True
    a_in_tmem: bool = False
    inferred: bool = False
    mesh = PAIR

    @property
    def whole(self) -> Product:
        """The product of both CTAs."""
        return Product(
            m=2 * self.m,
            n=self.n,
            k=self.k,
            a=self.a,
            b=self.b,
            acc=self.acc,
            a_stored=self.a_stored,
            b_stored=self.b_stored,
        )

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Small operands, as they are stored."""
        return self.whole.operands(seed)

    def expected(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The product of operands as they are stored."""
        return self.whole.expected(a, b)

    @property
    def result(self) -> tuple[tuple[int, int], Any]:
        return (2 * self.m, self.n), self.acc

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the operands of one CTA, as they are stored."""
        a, b = (self.m, self.k), (self.k, self.n // 2)
        return a[::-1] if self.a_stored else a, b[::-1] if self.b_stored else b

    def scratch(self) -> dict[str, Any]:
        """The declarations of the kernel."""
        (a_shape, b_shape), narrow = self.shapes, jnp.dtype(self.acc).itemsize < 4
        stored = [
            () if self.inferred else storage(dtype, self.swizzle)
            for dtype in (self.a, self.b)
        ]
        declared = {
            "a_smem": plgpu.SMEM(a_shape, self.a, transforms=stored[0]),
            "b_smem": plgpu.SMEM(b_shape, self.b, transforms=stored[1]),
            "acc": plgpu.TMEM(
                (self.m, self.n),
                self.acc,
                packed=False if narrow else None,
                collective=True,
            ),
            "loaded": plgpu.Barrier(num_arrivals=2),
            "ready": plgpu.ClusterBarrier(
                collective_axes="c", orders_tensor_core=self.a_in_tmem
            ),
            "done": plgpu.Barrier(orders_tensor_core=True),
        }
        if self.a_in_tmem:
            packed = True if jnp.dtype(self.a).itemsize < 4 else None
            declared["a_tmem"] = plgpu.TMEM(
                (self.m, self.k), self.a, packed=packed, collective=True
            )
        return declared

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
