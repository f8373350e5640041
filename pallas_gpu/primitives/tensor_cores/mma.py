# SPDX-License-Identifier: Apache-2.0
"""mma: the tensor core's synchronous instruction, on values in registers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect, types
from pallas_gpu.layouts.registers.fragments import MmaShape
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import products
from pallas_gpu.types import values

__all__ = ["mma"]

mma_p = registry.define(
    "mma",
    "mma",
    result=lambda operands, **_: jax.core.ShapedArray(
        operands["acc"].shape, operands["acc"].dtype
    ),
    by_warp=False,
)

# PTX ISA, mma: element types of A and B; integers are added in s32, floats in f32.
_FLOAT8 = tuple(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)))
_INT8 = tuple(map(jnp.dtype, (jnp.int8, jnp.uint8)))
_INT4 = tuple(map(jnp.dtype, (jnp.int4, jnp.uint4)))
_FLOATS = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32)))
TYPES = (*_FLOATS, *_FLOAT8, *_INT8, *_INT4)


@dataclasses.dataclass(frozen=True)
class InsteadOfWgmma:
    """Why mma.sync multiplies what wgmma could.

    Attributes:
      why: what keeps wgmma from it.
      hint: what to do.
    """

    why: str
    hint: str

    @property
    def what(self) -> str:
        """The warning, and what `explain` finds, in one sentence."""
        return f"a product is multiplied by mma.sync instead of wgmma: {self.why}"


@expect.arguments()
def mma(acc: values.Array, a: values.Array, b: values.Array) -> jax.Array:
    """Returns `acc + a @ b`, computed on the tensor core by each warp.

    PTX: mma.sync.aligned.m16n8kK. Since: sm_90.

    Issued by a warpgroup; complete when it returns. Each warp multiplies its part of
    the rows and columns. float32 operands are read as tf32 (10 bits of mantissa).

    Args:
      acc: (M, N) values, float32, or int32 for integers; in `Layout.MMA_ACC(dtype, w)`.
      a: (M, K) values: float16, bfloat16, float32, int8, uint8, int4, uint4,
        float8_e4m3fn or float8_e5m2; in `Layout.MMA_LHS(dtype, w)`.
      b: (K, N) values of the same type (integers of one width may differ in sign, and
        8-bit floats in kind); in `Layout.MMA_RHS(dtype, w)`. With w = 1, 2 or 4 warps
        along the rows, M is a multiple of 16 w, N of 32 / w, and K of 32 bytes.
        Warpgroup semantics chooses w and moves the operands to these layouts.

    Returns:
      (M, N) values in the type and layout of `acc`.

    Raises:
      ShapeError, DTypeError: mma has no instruction for the shapes or types.
      LayoutError: under Lane semantics, an operand in another layout.
    """
    _check_types(acc, a, b)
    _check_shapes(acc, a, b)
    return multiplied(acc, a, b)


def multiplied(
    acc: Any, a: Any, b: Any, reason: InsteadOfWgmma | None = None
) -> jax.Array:
    """`mma` of checked operands, which has the place of a wgmma for a reason."""
    params = {} if reason is None else {"reason": reason}
    return ops.bind(mma_p, {"acc": acc, "a": a, "b": b}, **params)


def _check_types(acc: Any, a: Any, b: Any) -> None:
    pair = {jnp.dtype(a.dtype), jnp.dtype(b.dtype)}
    integers = any(pair <= set(kinds) for kinds in (_INT8, _INT4))
    mixed = integers or pair <= set(_FLOAT8)
    if not (pair <= set(TYPES) and (mixed or len(pair) == 1)):
        raise errors.DTypeError(
            "mma: the tensor core does not multiply these element types",
            expected="one of "
            + ", ".join(t.name for t in TYPES)
            + " for both, or two of 8 or 4 bits of one kind",
            got=f"{a.dtype.name} and {b.dtype.name}",
            hint="convert an operand with astype",
        )
    wanted = jnp.dtype(jnp.int32 if integers else jnp.float32)
    if acc.dtype != wanted:
        raise errors.DTypeError(
            f"mma: products of {a.dtype.name} are not added in this type",
            expected=wanted.name,
            got=acc.dtype.name,
            hint=f"convert it: acc.astype(jnp.{wanted.name})",
        )


def _check_shapes(acc: Any, a: Any, b: Any) -> None:
    products.require_shapes(acc, a, b, "mma", "transpose an operand: b.T")
    (m, n), (_, k) = acc.shape, a.shape
    if MmaShape.best(m, n, k, types.itemsize_bits(a.dtype)) is None:
        raise errors.ShapeError(
            "mma: the shape does not consist of whole instructions of four warps",
            expected="M and N multiples of 64 and 8, 32 and 16, or 16 and 32, and K of "
            "32 bytes",
            got=f"M = {m}, N = {n}, K = {k} of {a.dtype.name}",
            hint="use jnp.dot, which pads with zeros",
        )
