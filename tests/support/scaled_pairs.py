# SPDX-License-Identifier: Apache-2.0
"""Kernels in which a pair of CTAs multiplies one block-scaled tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support.scaled_products import ROWS, ScaledProduct, storage
from tests.support.tensor_pairs import PAIR
from tests.support.tensor_products import BLACKWELL, F32, start_copies


@dataclasses.dataclass(frozen=True)
class ScaledPair:
    """One product of a tile of 256 rows by two CTAs.

    Attributes:
      whole: types, N, K, and the scales; its rows are those of one CTA.
    """

    whole: ScaledProduct

    def operands(self) -> tuple[np.ndarray, ...]:
        """a, b (N, K), and their scales in tiles."""
        lower, upper = self.whole.operands(0), self.whole.operands(1)
        a, a_scale = (np.concatenate([lower[i], upper[i]]) for i in (0, 2))
        return a, lower[1], a_scale, lower[3]

    def expected(self, a, b, a_scale, b_scale) -> np.ndarray:
        """The product."""
        halves = (
            self.whole.expected(a[ROWS * i :][:ROWS], b, a_scale[i : i + 1], b_scale)
            for i in (0, 1)
        )
        return np.concatenate(list(halves))

    def scratch(self) -> dict[str, Any]:
        """The declarations of the kernel."""
        w = self.whole
        *_, a_scale, b_scale = w.operands()

        def operand(shape, dtype):
            transforms = () if w.inferred else storage(dtype, w.swizzle)
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        def scales(rows):
            return plgpu.TMEM(
                (rows, w.k // w.block),
                w.scale,
                layout=TmemLayout.scales(),
                collective=True,
            )

        return {
            "a_smem": operand((ROWS, w.k), w.a),
            "b_smem": operand((w.n // 2, w.k), w.b),
            "sa_smem": plgpu.SMEM(a_scale.shape, w.scale),
            "sb_smem": plgpu.SMEM(b_scale.shape, w.scale),
            "acc": plgpu.TMEM((ROWS, w.n), F32, collective=True),
            "sa": scales(ROWS),
            "sb": scales(w.scale_rows),
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
        rows = plgpu.ds(c * ROWS, ROWS)
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
        for start in range(0, w.n, ROWS):
            part = plgpu.ds(start, min(ROWS, w.n - start))
            out[rows, part] = plgpu.async_load_tmem(acc.at[:, part])

    def make(self, interpret: Any = None, **scratch: Any) -> Callable[..., Any]:
        """The kernel, or one with other scratch."""
        return plgpu.kernel(
            self.body,
            out_type=jax.ShapeDtypeStruct((2 * ROWS, self.whole.n), F32),
            scratch_types={**self.scratch(), **scratch},
            compiler_params=BLACKWELL,
            interpret=interpret,
            **PAIR,
        )
