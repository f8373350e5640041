# SPDX-License-Identifier: Apache-2.0
"""Kernels that multiply a sparse tile in a pair of CTAs, or with scales of blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support.scaled_products import E8M0
from tests.support.scaled_products import tiles as tiles_of_scales
from tests.support.sparse_products import M, SparseProduct, compressed, indices
from tests.support.tensor_pairs import PAIR
from tests.support.tensor_products import Case, start_copies, storage


@dataclasses.dataclass(frozen=True)
class SparseTile(Case):
    """One product of 128 rows in each CTA.

    Attributes:
      one: types, N, K; its rows are those of one CTA, and `b` is along K.
      ctas: 1, or 2 for a pair.
      scaled: whether blocks have scales; scale: their type; block: the elements of K
        that share one, of which half are stored.
    """

    one: SparseProduct
    ctas: int = 1
    scaled: bool = False
    scale: Any = E8M0
    block: int = 64

    @property
    def mesh(self) -> dict[str, Any]:
        return PAIR if self.ctas == 2 else {}

    @property
    def result(self) -> tuple[tuple[int, int], Any]:
        return (self.ctas * M, self.one.n), self.one.acc

    def dense(self) -> tuple[np.ndarray, np.ndarray]:
        """a, of all CTAs, and b as it is stored."""
        a, b = self.one.dense()
        return np.concatenate([a, a[::-1]][: self.ctas]), b

    def scales(self) -> tuple[np.ndarray, np.ndarray]:
        """Of a and of b: (rows, K / block)."""
        rng = np.random.default_rng(3)
        counts = M * self.ctas, -(-self.one.n // M) * M
        a, b = (2.0 ** rng.integers(-2, 3, (n, self.columns)) for n in counts)
        return a.astype(self.scale), b.astype(self.scale)

    @property
    def columns(self) -> int:
        """Scales of a row."""
        return self.one.k // self.block

    @property
    def axis(self) -> dict[str, Any]:
        """The arguments that say whose product it is."""
        return {"collective_axis": "c"} if self.ctas == 2 else {}

    def operands(self) -> tuple[Any, ...]:
        """The stored elements of a, b, the metadata, and the scales, if any."""
        a, b = self.dense()
        stored, meta = compressed(a)
        operands = stored, b, meta
        if not self.scaled:
            return operands
        return *operands, *(tiles_of_scales(x) for x in self.scales())

    def expected(self, *_: Any) -> np.ndarray:
        """The product of the dense operands."""
        a, b = (np.asarray(x, np.float64) for x in self.dense())
        if self.scaled:
            held = (x.astype(np.float64) for x in self.scales())
            across = [np.repeat(x, self.block, axis=1) for x in held]
            a, b = a * across[0], b * across[1][: self.one.n]
        return (self.one.rounds * (a @ b.T)).astype(jnp.dtype(self.one.acc))

    def scratch(self) -> dict[str, Any]:
        """The declarations of the kernel."""
        w, collective = self.one, self.ctas == 2

        def tmem(shape, dtype, **options):
            return plgpu.TMEM(shape, dtype, collective=collective, **options)

        wide, width = jnp.dtype(w.acc).itemsize == 4, indices(w.k, w.a)
        declared = {
            "a_smem": plgpu.SMEM(
                (M, w.k // 2), w.a, transforms=storage(w.a, w.a_swizzle)
            ),
            "b_smem": plgpu.SMEM(
                (w.n // self.ctas, w.k), w.b, transforms=storage(w.b, w.b_swizzle)
            ),
            "m_smem": plgpu.SMEM((1, width // 64, 128, 64), jnp.uint2),
            "acc": tmem((M, w.n), w.acc, **({} if wide else {"packed": False})),
            "metadata": tmem(
                (M, width), jnp.uint2, layout=TmemLayout.sparse_metadata()
            ),
            "loaded": plgpu.Barrier(num_arrivals=5 if self.scaled else 3),
            "done": plgpu.Barrier(orders_tensor_core=True),
        }
        if self.ctas == 2:
            declared["ready"] = plgpu.ClusterBarrier(collective_axes="c")
        if self.scaled:
            rows = -(-w.n // M) * M
            for name, count in (("sa", M), ("sb", rows)):
                shape = count // M, -(-self.columns // 4), 32, 16
                declared[f"{name}_smem"] = plgpu.SMEM(shape, self.scale)
                declared[name] = tmem(
                    (count, self.columns), self.scale, layout=TmemLayout.scales()
                )
        return declared

    def body(
        self, a, b, meta, *rest,
        a_smem, b_smem, m_smem, acc, metadata, loaded, done,
        ready=None, sa=None, sb=None, sa_smem=None, sb_smem=None,
    ) -> None:  # fmt: skip
        """Each CTA copies its parts; one CTA, or the leader of a pair, multiplies."""
        *scales, out = rest
        w, c = self.one, lax.axis_index("c") if self.ctas == 2 else 0
        rows, columns = plgpu.ds(c * M, M), w.n // self.ctas
        copies = [
            (a.at[rows], a_smem),
            (b.at[plgpu.ds(c * columns, columns)], b_smem),
            (meta.at[plgpu.ds(c, 1)], m_smem),
        ]
        options = {"a_sparse_metadata": metadata, **self.axis}
        if self.scaled:
            copies += [(scales[0].at[plgpu.ds(c, 1)], sa_smem), (scales[1], sb_smem)]
            options |= {"a_scale": sa, "b_scale": sb}
        start_copies(loaded, *copies)
        plgpu.barrier_wait(loaded)
        if ready is not None:
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)
        for i in range(w.rounds):
            plgpu.async_copy_sparse_metadata_to_tmem(m_smem, metadata, **self.axis)
            if self.scaled:
                plgpu.async_copy_scales_to_tmem(sa_smem, sa, **self.axis)
                plgpu.async_copy_scales_to_tmem(sb_smem, sb, **self.axis)
            plgpu.tcgen05_mma(acc, a_smem, b_smem.T, accumulate=i > 0, **options)
        plgpu.tcgen05_commit_arrive(done, **self.axis)
        plgpu.barrier_wait(done)
        for start in range(0, w.n, 128):
            part = plgpu.ds(start, min(128, w.n - start))
            out[rows, part] = plgpu.async_load_tmem(acc.at[:, part])
