# SPDX-License-Identifier: Apache-2.0
"""Kernels in which a pair of CTAs multiplies one block-scaled tile."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support.scaled_products import ROWS, ScaledProduct
from tests.support.tensor_pairs import PAIR
from tests.support.tensor_products import F32, Case, start_copies, storage


@dataclasses.dataclass(frozen=True)
class ScaledPair(Case):
    """One product of a tile of 256 rows by two CTAs.

    Attributes:
      whole: types, N, K, and the scales; its rows are those of one CTA.
      m: rows in each CTA; of 64 the second half of those of `whole` is not there.
    """

    whole: ScaledProduct
    m: int = ROWS
    mesh = PAIR

    @property
    def result(self) -> tuple[tuple[int, int], Any]:
        return (2 * self.m, self.whole.n), F32

    def operands(self) -> tuple[np.ndarray, ...]:
        """a, b (N, K), and their scales in tiles."""
        lower, upper = self.whole.operands(0), self.whole.operands(1)
        a = np.concatenate([lower[0][: self.m], upper[0][: self.m]])
        a_scale = np.concatenate([lower[2], upper[2]])
        return a, lower[1], a_scale, self.stored(lower[3])

    def stored(self, b_scale: np.ndarray) -> np.ndarray:
        """Tiles of the scales of b as a pair copies them: of 64 rows, in halves."""
        if self.m == ROWS:
            return b_scale
        half = self.whole.n // 2
        groups = b_scale.shape[1]
        # (columns, blocks), and each half of the columns in 128 rows.
        split = b_scale.reshape(-1, groups, 32, 4, 4).transpose(0, 3, 2, 1, 4)
        columns = split.reshape(-1, 4 * groups)[: self.whole.n]
        halves = np.zeros((2, ROWS, 4 * groups), columns.dtype)
        halves[:, :half] = columns.reshape(2, half, -1)
        apart = halves.reshape(2, 4, 32, groups, 4).transpose(3, 0, 2, 1, 4)
        return apart.reshape(1, groups, 64, 16)

    def expected(self, a, b, a_scale, _) -> np.ndarray:
        """The product."""
        m, b_scale = self.m, self.whole.operands(0)[3]
        halves = (
            self.whole.expected(a[m * i :][:m], b, a_scale[i : i + 1], b_scale)
            for i in (0, 1)
        )
        return np.concatenate(list(halves))

    def scratch(self) -> dict[str, Any]:
        """The declarations of the kernel."""
        w = self.whole
        *_, a_scale, b_scale = w.operands()
        halved = self.m < ROWS

        def operand(shape, dtype):
            transforms = () if w.inferred else storage(dtype, w.swizzle)
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        def scales(rows, layout):
            return plgpu.TMEM(
                (rows, w.k // w.block), w.scale, layout=layout, collective=True
            )

        whole, apart = TmemLayout.scales(), TmemLayout.scales_m64_collective()

        return {
            "a_smem": operand((self.m, w.k), w.a),
            "b_smem": operand((w.n // 2, w.k), w.b),
            "sa_smem": plgpu.SMEM(a_scale.shape, w.scale),
            "sb_smem": plgpu.SMEM(self.stored(b_scale).shape, w.scale),
            "acc": plgpu.TMEM((self.m, w.n), F32, collective=True),
            "sa": scales(ROWS, whole),
            "sb": scales(2 * ROWS, apart) if halved else scales(w.scale_rows, whole),
            "loaded": plgpu.Barrier(num_arrivals=4),
            "ready": plgpu.ClusterBarrier(collective_axes="c"),
            "done": plgpu.Barrier(orders_tensor_core=True),
        }

    def body(
        self, a, b, sa_gmem, sb_gmem, out,
        a_smem, b_smem, sa_smem, sb_smem, acc, sa, sb, loaded, ready, done,
    ) -> None:  # fmt: skip
        """Each CTA copies its parts, and all scales of b; the pair multiplies."""
        w, c = self.whole, lax.axis_index("c")
        rows = plgpu.ds(c * self.m, self.m)
        start_copies(
            loaded,
            (a.at[rows], a_smem),
            (b.at[plgpu.ds(c * (w.n // 2), w.n // 2)], b_smem),
            (sa_gmem.at[plgpu.ds(c, 1)], sa_smem),
            (sb_gmem, sb_smem),
        )
        plgpu.barrier_wait(loaded)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        for i in range(w.rounds):
            plgpu.async_copy_scales_to_tmem(sa_smem, sa, collective_axis="c")
            plgpu.async_copy_scales_to_tmem(sb_smem, sb, collective_axis="c")
            plgpu.tcgen05_mma(
                acc, a_smem, b_smem.T, a_scale=sa, b_scale=sb, accumulate=i > 0,
                collective_axis="c",
            )  # fmt: skip
        plgpu.tcgen05_commit_arrive(done, collective_axis="c")
        plgpu.barrier_wait(done)
        step = ROWS if self.m == ROWS else w.n
        for start in range(0, w.n, step):
            part = plgpu.ds(start, min(step, w.n - start))
            out[rows, part] = plgpu.async_load_tmem(acc.at[:, part])
