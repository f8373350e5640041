# SPDX-License-Identifier: Apache-2.0
"""Kernels that multiply a sparse tile, with data and the expected product."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu.layouts import TmemLayout
from tests.support.tensor_products import F16, F32, Case, in_tmem, start_copies, storage

M = 128  # the rows of metadata as products read it, and the most of a tile


# Of types of other widths: elements of K that two indices describe, elements that are
# stored together, and what compresses them.
FORMS = {
    jnp.dtype(jnp.float32): (2, 1, plgpu.compress_1_of_2),
    jnp.dtype(jnp.float4_e2m1fn): (8, 2, plgpu.compress_4_of_8),
}


def form(dtype: Any) -> tuple[int, int, Any]:
    """What FORMS has of a type."""
    return FORMS.get(jnp.dtype(dtype), (4, 1, plgpu.compress_2_of_4))


def sparse(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """A sparse matrix whose groups have all that can be stored, less, or nothing."""
    group, size, _ = form(dtype)
    units = (shape[0], shape[1] // group, group // size)
    order = rng.permuted(np.broadcast_to(np.arange(units[-1]), units), axis=-1)
    kept = order < rng.integers(0, units[-1] // 2 + 1, (*units[:2], 1))
    dense = np.where(kept[..., None], rng.integers(1, 4, (*units, size)), 0)
    return dense.reshape(shape).astype(jnp.dtype(dtype))


def compressed(a: np.ndarray) -> tuple[np.ndarray, Any]:
    """The stored elements of a matrix, and its metadata as products read it."""
    stored, meta = form(a.dtype)[2](a)
    return stored, plgpu.format_tcgen05_sparse_metadata(meta, a.dtype)


def indices(k: int, dtype: Any) -> int:
    """The number of indices of a row."""
    return 2 * k // form(dtype)[0]


@dataclasses.dataclass(frozen=True)
class SparseProduct(Case):
    """One product of a tile.

    Attributes:
      m, n, k: sizes.
      a, b, acc: element types.
      a_swizzle, b_swizzle: of the operands, in bytes.
      b_stored: whether b is stored transposed: (N, K).
      a_in_tmem: whether the left operand is copied to TMEM first.
      rounds: number of products added up.
      inferred: whether the operands are declared without transforms.
    """

    n: int = 32
    k: int = 128
    m: int = M
    a: Any = F16
    b: Any = F16
    acc: Any = F32
    a_swizzle: int = 128
    b_swizzle: int = 128
    b_stored: bool = True
    a_in_tmem: bool = False
    rounds: int = 1
    inferred: bool = False

    @property
    def result(self) -> tuple[tuple[int, int], Any]:
        return (self.m, self.n), self.acc

    @property
    def b_shape(self) -> tuple[int, int]:
        """Of b as it is stored."""
        return (self.n, self.k) if self.b_stored else (self.k, self.n)

    def dense(self) -> tuple[np.ndarray, np.ndarray]:
        """a, which is sparse, and b as it is stored."""
        rng = np.random.default_rng(0)
        low = 0 if jnp.dtype(self.b) == jnp.uint8 else -3
        b = rng.integers(low, 4, self.b_shape).astype(jnp.dtype(self.b))
        return sparse(rng, (self.m, self.k), self.a), b

    def operands(self) -> tuple[Any, ...]:
        """The stored elements of a, b, and the metadata."""
        a, b = self.dense()
        stored, meta = compressed(a)
        return stored, b, meta

    def expected(self, *_: Any) -> np.ndarray:
        """The product of the dense operands."""
        a, b = (np.asarray(x, np.float64) for x in self.dense())
        product = self.rounds * (a @ (b.T if self.b_stored else b))
        return product.astype(jnp.dtype(self.acc))

    def scratch(self) -> dict[str, Any]:
        """The declarations of the kernel."""
        a, b = (
            () if self.inferred else storage(dtype, swizzle)
            for dtype, swizzle in ((self.a, self.a_swizzle), (self.b, self.b_swizzle))
        )
        narrow, width = jnp.dtype(self.acc).itemsize < 4, indices(self.k, self.a)
        declared = {
            "a_smem": plgpu.SMEM((self.m, self.k // 2), self.a, transforms=a),
            "b_smem": plgpu.SMEM(self.b_shape, self.b, transforms=b),
            "m_smem": plgpu.SMEM((1, width // 64, 128, 64), jnp.uint2),
            "acc": plgpu.TMEM(
                (self.m, self.n), self.acc, packed=False if narrow else None
            ),
            "metadata": plgpu.TMEM(
                (M, width), jnp.uint2, layout=TmemLayout.sparse_metadata()
            ),
            "loaded": plgpu.Barrier(num_arrivals=3),
            "done": plgpu.Barrier(orders_tensor_core=True),
        }
        if self.a_in_tmem:
            declared["a_tmem"] = plgpu.TMEM((M, self.k // 2), self.a, packed=True)
        return declared

    def body(
        self, a, b, meta, out,
        a_smem, b_smem, m_smem, acc, metadata, loaded, done, a_tmem=None,
    ) -> None:  # fmt: skip
        """Copies the operands and metadata, multiplies, and stores the product."""
        start_copies(loaded, (a, a_smem), (b, b_smem), (meta, m_smem))
        plgpu.barrier_wait(loaded)
        left = in_tmem(a_smem, a_tmem)
        right = b_smem.T if self.b_stored else b_smem
        for i in range(self.rounds):
            plgpu.async_copy_sparse_metadata_to_tmem(m_smem, metadata)
            plgpu.tcgen05_mma(
                acc, left, right, a_sparse_metadata=metadata, accumulate=i > 0
            )
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        # Of 64 rows half of the columns are in other lanes: a part is not contiguous.
        width = self.n if self.m < M else 128
        for start in range(0, self.n, width):
            part = plgpu.ds(start, min(width, self.n - start))
            out[:, part] = plgpu.async_load_tmem(acc.at[:, part])
