# SPDX-License-Identifier: Apache-2.0
"""A matrix product as the kernels see it: sizes, types, transposed operands."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu.ops.gemm.epilogue import PLAIN, Epilogue


@dataclasses.dataclass(frozen=True)
class Problem:
    """One or several products of the same sizes; hashable, static.

    A kernel's operands are A, B and those of the epilogue, in this order:

        a          (batch, M, K), or (batch, K, M) if transposed; (1, ...) if shared
        b, gate    (batch, K, N), or (batch, N, K) if transposed; (1, ...) if shared
        bias       (N and zeros,)
        residual   (batch, M, N)
        result     (batch, M, N)

    Rows of all of them are multiples of 16 bytes: N is rounded up, and where M or K is
    not such a multiple, the operand's row is longer and ends with zeros.

    Attributes:
      m, n, k: sizes of one product.
      dtype: of A and B.
      out_dtype: of the result.
      batch: number of products.
      shared_a, shared_b: whether all products have the same A, or B and gate.
      transpose_a, transpose_b: whether A is stored as (K, M), B and gate as (N, K).
      epilogue: what becomes of a tile before it is stored.
      residual_dtype: of the array that the epilogue adds; None without one.
      right: type of B, if it is another one than that of A.
      scales: names of the operands with scales, which precede those of the epilogue.
      scale_dtype: of scales that the tensor core multiplies by.
      group: elements of K that share a scale; None if all do.
      promoted: whether sums of the tensor core are added in float32 for each step.
      config: of the kernel; None: it is to be chosen.
      compiler_params, interpret: see `kernel`.
    """

    m: int
    n: int
    k: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    batch: int = 1
    shared_a: bool = False
    shared_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    epilogue: Epilogue = PLAIN
    residual_dtype: jnp.dtype | None = None
    right: jnp.dtype | None = None
    scales: tuple[str, ...] = ()
    scale_dtype: jnp.dtype | None = None
    group: int | None = None
    promoted: bool = False
    config: Any = None
    compiler_params: plgpu.CompilerParams | None = None
    interpret: Any = None

    def but(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def tiles(self, m: int, n: int) -> int:
        """Tiles of all products, of so many rows and columns."""
        return self.batch * plgpu.cdiv(self.m, m) * plgpu.cdiv(self.n, n)

    @property
    def types(self) -> tuple[jnp.dtype, jnp.dtype]:
        return self.dtype, self.dtype if self.right is None else self.right

    @property
    def factors(self) -> int:
        """Products of a tile: with B, and with the gate."""
        return 2 if self.epilogue.gated else 1

    @property
    def accumulator(self) -> Any:
        """The type of the tensor core's sums: integers are added as integers."""
        return jnp.int32 if set(self.types) == {jnp.dtype(jnp.int8)} else jnp.float32

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of a kernel's operands after A and B, in order."""
        return self.scales + self.epilogue.operands

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return self.batch, self.m, self.n

    @property
    def transposed(self) -> Problem:
        """The problem whose result is the transposed one: B^T A^T."""
        left, right = self.types
        return dataclasses.replace(
            self,
            dtype=right,
            right=None if left == right else left,
            m=self.n,
            n=self.m,
            shared_a=self.shared_b,
            shared_b=self.shared_a,
            transpose_a=not self.transpose_b,
            transpose_b=not self.transpose_a,
        )

    @property
    def turns_a(self) -> bool:
        """Whether A is transposed on its way to the tensor core, float32 alone."""
        return self.transpose_a and self.dtype == jnp.float32

    @property
    def bytes(self) -> int:
        """Bytes that are read and written at least once."""
        a = self.m * self.k * (1 if self.shared_a else self.batch)
        b = self.n * self.k * (1 if self.shared_b else self.batch)
        b *= self.factors
        out = math.prod(self.out_shape) * (2 if self.epilogue.residual else 1)
        return (a + b) * self.dtype.itemsize + out * self.out_dtype.itemsize
