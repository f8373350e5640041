# SPDX-License-Identifier: Apache-2.0
"""Kernels that multiply one block-scaled tile, with data and the expected product."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support.tensor_products import E4M3, F32, Case, start_copies, storage

E8M0, E2M1 = jnp.float8_e8m0fnu, jnp.float4_e2m1fn
ROWS = 128


def tiles(scales: np.ndarray) -> np.ndarray:
    """(rows, scales) as (rows / 128, scales / 4, 32, 16), of whole tiles."""
    rows, columns = scales.shape
    split = scales.reshape(rows // ROWS, 4, 32, columns // 4, 4)
    return split.transpose(0, 3, 2, 1, 4).reshape(rows // ROWS, columns // 4, 32, 16)


@dataclasses.dataclass(frozen=True)
class ScaledProduct(Case):
    """One product of a tile.

    Attributes:
      n, k: sizes; M is 128.
      a, b: element types.
      scale: type of the scales.
      block: elements of K that share a scale.
      swizzle: of both operands, in bytes.
      b_stored: whether b is stored transposed: (N, K).
      rounds: number of products added up.
      inferred: whether the operands are declared without transforms.
      a_in_tmem: whether the left operand is copied to TMEM first.
    """

    n: int = 64
    k: int = 128
    a: Any = E4M3
    b: Any = E4M3
    scale: Any = E8M0
    block: int = 32
    swizzle: int = 128
    b_stored: bool = True
    rounds: int = 1
    inferred: bool = False
    a_in_tmem: bool = False

    @property
    def result(self) -> tuple[tuple[int, int], Any]:
        return (ROWS, self.n), F32

    @property
    def scale_rows(self) -> int:
        """Rows of the scales of b."""
        return -(-self.n // ROWS) * ROWS

    def operands(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """a and b as they are stored, and their scales in tiles."""
        rng = np.random.default_rng(seed)
        b_shape = (self.n, self.k) if self.b_stored else (self.k, self.n)

        def scales(rows: int) -> np.ndarray:
            values = 2.0 ** rng.integers(-2, 3, (rows, self.k // self.block))
            return tiles(values.astype(jnp.dtype(self.scale)))

        return (
            rng.integers(-3, 4, (ROWS, self.k)).astype(jnp.dtype(self.a)),
            rng.integers(-3, 4, b_shape).astype(jnp.dtype(self.b)),
            scales(ROWS),
            scales(self.scale_rows),
        )

    def expected(self, a, b, a_scale, b_scale) -> np.ndarray:
        """The product, from the scale of each element."""
        b = b if self.b_stored else b.T

        def scaled(x: np.ndarray, held: np.ndarray) -> np.ndarray:
            row, k = np.indices(x.shape)
            j = k // self.block
            place = (row // 128, j // 4, row % 32, row % 128 // 32 * 4 + j % 4)
            return x.astype(np.float64) * held[place].astype(np.float64)

        product = scaled(a, a_scale) @ scaled(b, b_scale).T
        return (self.rounds * product).astype(np.float32)

    def scratch(self) -> dict[str, Any]:
        """The declarations of the kernel."""
        _, b, a_scale, b_scale = self.operands()
        columns = self.k // self.block

        def operand(shape, dtype):
            transforms = () if self.inferred else storage(dtype, self.swizzle)
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        def scales(rows):
            return plgpu.TMEM((rows, columns), self.scale, layout=TmemLayout.scales())

        left = plgpu.TMEM((ROWS, self.k), self.a, packed=True)
        return {
            **({"a_tmem": left} if self.a_in_tmem else {}),
            "a_smem": operand((ROWS, self.k), self.a),
            "b_smem": operand(b.shape, self.b),
            "sa_smem": plgpu.SMEM(a_scale.shape, self.scale),
            "sb_smem": plgpu.SMEM(b_scale.shape, self.scale),
            "acc": plgpu.TMEM((ROWS, self.n), F32),
            "sa": scales(ROWS),
            "sb": scales(self.scale_rows),
            "loaded": plgpu.Barrier(num_arrivals=4),
            "done": plgpu.Barrier(orders_tensor_core=True),
        }

    def body(
        self, a, b, sa_gmem, sb_gmem, out,
        a_smem, b_smem, sa_smem, sb_smem, acc, sa, sb, loaded, done,
        a_tmem=None,
    ) -> None:  # fmt: skip
        """Copies the operands and scales, multiplies, and stores the product."""
        pairs = (a, a_smem), (b, b_smem), (sa_gmem, sa_smem), (sb_gmem, sb_smem)
        start_copies(loaded, *pairs)
        plgpu.barrier_wait(loaded)
        right = b_smem.T if self.b_stored else b_smem
        left = a_smem
        if a_tmem is not None:
            plgpu.async_copy_smem_to_tmem(a_smem, a_tmem)
            left = a_tmem
        for i in range(self.rounds):
            plgpu.async_copy_scales_to_tmem(sa_smem, sa)
            plgpu.async_copy_scales_to_tmem(sb_smem, sb)
            plgpu.tcgen05_mma(
                acc, left, right, a_scale=sa, b_scale=sb, accumulate=i > 0
            )
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        for start in range(0, self.n, ROWS):
            part = plgpu.ds(start, min(ROWS, self.n - start))
            out[:, part] = plgpu.async_load_tmem(acc.at[:, part])
