# SPDX-License-Identifier: Apache-2.0
"""Matrix products of values and of arrays in SMEM, by wgmma."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry.scoped import run_scoped
from pallas_gpu.primitives import tma
from pallas_gpu.primitives.wgmma import wgmma

# PTX ISA, wgmma.mma_async: N is at most 256 an instruction.
_MAX_COLUMNS = 256
# Bits of the narrowest swizzle that `wgmma` reads.
_SWIZZLE_BITS = 256


@dataclasses.dataclass(frozen=True)
class Matrix:
    """An operand of a product.

    Attributes:
      stored: a value, or a part of an array in SMEM that is not about to be written.
      transposed: whether the operand is its transpose.
    """

    stored: Any
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the operand."""
        rows, columns = self.stored.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def dtype(self) -> Any:
        """The element type."""
        return jnp.dtype(self.stored.dtype)

    @property
    def is_ref(self) -> bool:
        """Whether it is in SMEM."""
        return types.base_aval(self.stored) is not None

    @property
    def T(self) -> Matrix:  # noqa: N802 - numpy's name
        """The transpose."""
        return Matrix(self.stored, not self.transposed)

    def value(self) -> Any:
        """Returns the operand as a value in registers."""
        return self.view().get() if self.is_ref else self.view()

    def view(self) -> Any:
        """Returns the operand where it is: a value, or a reference."""
        return self.stored.T if self.transposed else self.stored


def product(a: Matrix, b: Matrix) -> jax.Array:
    """Multiplies two matrices on the tensor core.

    What wgmma does not read where it is, is stored to scratch memory in SMEM first. The
    tensor core adds in float32 or int32, and reads float32 as tf32.

    PTX: st.shared, wgmma.mma_async. Since: sm_90a. Issued by a warpgroup; complete when
    it returns.

    Args:
      a: (M, K).
      b: (K, N).

    Returns:
      (M, N) in float32, or in int32 for int8.

    Raises:
      ShapeError, DTypeError: the tensor core does not support the shapes or types.
    """
    (m, _), (_, n) = a.shape, b.shape
    _require_rows(m, n)
    dtype = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
    kept = a.dtype.itemsize <= 2 and not a.is_ref
    moved = {
        name: operand
        for name, operand in (("a", a), ("b", b))
        if not (name == "a" and kept) and not _is_readable(operand, name)
    }
    scratch = {name: _tiles(_to_store(x, name)) for name, x in moved.items()}

    def multiply(acc: Any, **buffers: Any) -> jax.Array:
        for name, operand in moved.items():
            buffers[name][...] = _to_store(operand, name).value()
        # Also the author may have stored to an operand.
        tma.commit_smem()
        left = _operand(a, "a", buffers, a.value() if kept else None)
        right = _operand(b, "b", buffers, None)
        for start in range(0, n, _MAX_COLUMNS):
            part = slice(start, min(start + _MAX_COLUMNS, n))
            if n <= _MAX_COLUMNS:
                wgmma(acc, left, right)
            else:
                wgmma(acc.at[:, part], left, right.at[:, part])
        return acc[...]

    return run_scoped(multiply, types.ACC((m, n), dtype), **scratch)


def _require_rows(m: int, n: int) -> None:
    if m % types.WGMMA_ROWS == 0 and n % types.WGMMA_COLUMNS == 0:
        return
    raise errors.ShapeError(
        "a matrix product: the tensor core has no instruction of this shape",
        expected=f"M a multiple of {types.WGMMA_ROWS} and N of {types.WGMMA_COLUMNS}",
        got=f"M = {m}, N = {n}",
        hint="use larger blocks, or pad them with zeros",
        where=_jax.where_now(),
    )


def _is_readable(operand: Matrix, name: str) -> bool:
    """Whether wgmma reads the operand where it is."""
    if not operand.is_ref:
        return False
    steps = operand.stored.transforms
    turned = [s for s in steps if isinstance(s, _jax.TransposeTransform)]
    k_is_minor = (operand.transposed + len(turned)) % 2 == (name == "b")
    return k_is_minor or _is_readable_k_major(operand, name)


def _is_readable_k_major(operand: Matrix, name: str) -> bool:
    """Whether wgmma reads the operand with M or N in the minor dimension.

    The hardware transposes 16-bit types only.
    """
    minor = operand.shape[name == "b"]
    return operand.dtype.itemsize == 2 and minor * 16 % _SWIZZLE_BITS == 0


def _to_store(operand: Matrix, name: str) -> Matrix:
    """Returns the matrix to store: as it is if wgmma reads both, or with K minor."""
    if _is_readable_k_major(operand, name):
        return operand.T if operand.transposed else operand
    return operand.T if name == "b" else operand


def _operand(operand: Matrix, name: str, buffers: dict[str, Any], value: Any) -> Any:
    """Returns what wgmma gets as an operand."""
    if value is not None:
        return value
    if name not in buffers:
        return operand.view()
    stored = _to_store(operand, name)
    turned = stored.transposed != operand.transposed
    return buffers[name].T if turned else buffers[name]


def _tiles(matrix: Matrix) -> Any:
    """Declares SMEM for a matrix, as the tensor core reads it."""
    bits = matrix.dtype.itemsize * 8
    swizzle = types.find_swizzle(matrix.shape[-1] * bits, "of an operand of a product")
    transforms = (
        types.TilingTransform((8, swizzle * 8 // bits)),
        types.SwizzleTransform(swizzle),
    )
    return types.SMEM(matrix.shape, matrix.dtype, transforms=transforms)


def sum_of_products(
    a: Any, b: Any, axis_a: int, axis_b: int, result_type: Any
) -> jax.Array:
    """Returns the product of a vector with a vector or a matrix.

    It is added in the widest of the types, at least in float32 or int32.

    PTX: fma and the instructions of reductions. Since: sm_90.

    Args:
      a, b: values with at most two dimensions, of which one has one.
      axis_a, axis_b: the dimensions over which to add.
      result_type: the type in which the caller wants the sums.
    """
    wide = jnp.result_type(*map(_summed_in, (a.dtype, b.dtype, result_type)))
    a, b = a.astype(wide), b.astype(wide)
    if a.ndim == b.ndim:
        return jnp.sum(a * b)
    if a.ndim == 1:
        return jnp.sum(_along(a, axis_b) * b, axis=axis_b)
    return jnp.sum(a * _along(b, axis_a), axis=axis_a)


def _summed_in(dtype: Any) -> Any:
    if jnp.dtype(dtype).itemsize >= 4:
        return dtype
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


def _along(vector: Any, axis: int) -> Any:
    return vector[None, :] if axis == 1 else vector[:, None]
