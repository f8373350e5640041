# SPDX-License-Identifier: Apache-2.0
"""Matrix products of received bodies: `jnp.dot` of blocks and of values."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors
from pallas_gpu.bridge.evaluate import Transposed, Unread, read
from pallas_gpu.bridge.rules import Evaluation, rule
from pallas_gpu.entry.product import Matrix, product, sum_of_products

# Precisions for which the tensor core's arithmetic is exact enough, by name. DEFAULT
# and HIGH are tf32 for float32, as in JAX on GPUs.
_PRECISIONS = (
    "DEFAULT", "HIGH", "F16_F16_F32", "BF16_BF16_F32", "TF32_TF32_F32",
    "ANY_F8_ANY_F8_F32",
)  # fmt: skip


@rule("transpose", lazy=True)
def _transpose(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    """A transpose of a matrix is postponed: a product reads both orders."""
    (x,) = operands
    if tuple(eqn.params["permutation"]) == (1, 0):
        return [Transposed(x, eqn)]
    return _jax.bind_again(eqn, [read(x)])


@rule("dot_general", lazy=True)
def _dot_general(_: Evaluation, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    _require_one_sum(eqn)
    ((axis_a,), (axis_b,)), _ = eqn.params["dimension_numbers"]
    dtype = eqn.outvars[0].aval.dtype
    if any(v.aval.ndim == 1 for v in eqn.invars):
        a, b = (read(x) for x in operands)
        result = sum_of_products(a, b, axis_a, axis_b, dtype)
    else:
        _require_precision(eqn)
        left, right = _of_one_type(*(_matrix(x) for x in operands))
        result = product(
            left if axis_a == 1 else left.T, right if axis_b == 0 else right.T
        )
    return [result.astype(dtype)]


def _require_one_sum(eqn: _jax.JaxprEqn) -> None:
    """Refuses what is no product of two matrices, or with a vector."""
    contracted, batch = eqn.params["dimension_numbers"]
    if any(batch):
        raise _unsupported(
            eqn,
            "a product with batch dimensions",
            "multiply one matrix after the other, in a loop or along a grid axis",
        )
    sums = len(contracted[0])
    if sums != 1:
        raise _unsupported(
            eqn,
            f"a product that adds over {sums} dimensions",
            "multiply element by element, with axes of size one where the arrays "
            "differ, and add with jnp.sum",
        )
    if any(v.aval.ndim > 2 for v in eqn.invars):
        raise _unsupported(
            eqn,
            "a product of arrays with more than two dimensions",
            "multiply one matrix after the other, in a loop or along a grid axis",
        )


def _of_one_type(a: Matrix, b: Matrix) -> tuple[Matrix, Matrix]:
    """Converts operands of two types to the type that holds both.

    The tensor core multiplies different types only if both are 8-bit floats.
    """
    eight_bits = [_is_float8(x.dtype) for x in (a, b)]
    if a.dtype == b.dtype or all(eight_bits):
        return a, b
    # JAX does not promote 8-bit floats; all wider floats hold them.
    wide = [x.dtype for x in (a, b) if not _is_float8(x.dtype)]
    common = functools.reduce(jnp.promote_types, wide)
    return _converted(a, common), _converted(b, common)


def _is_float8(dtype: Any) -> bool:
    return bool(dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating))


def _converted(operand: Matrix, dtype: Any) -> Matrix:
    if operand.dtype == dtype:
        return operand
    stored = Matrix(operand.stored).value()
    return Matrix(stored.astype(dtype), operand.transposed)


def _matrix(x: Any) -> Matrix:
    match x:
        case Unread():
            return Matrix(x.view) if x.is_pending else Matrix(x.read())
        case Transposed():
            return _matrix(x.operand).T
        case _:
            return Matrix(jnp.asarray(x))


def _require_precision(eqn: _jax.JaxprEqn) -> None:
    given = eqn.params["precision"]
    each = given if isinstance(given, tuple) else (given,)
    names = [getattr(p, "name", str(p)) for p in each if p is not None]
    narrow = all(jnp.dtype(v.aval.dtype).itemsize <= 2 for v in eqn.invars)
    if narrow and not isinstance(given, jax.lax.DotAlgorithmPreset):
        return
    unknown = [name for name in names if name not in _PRECISIONS]
    if unknown:
        raise errors.UnsupportedError(
            "a matrix product with a precision that the tensor core does not have",
            expected="precision DEFAULT or HIGH: float32 operands are read as tf32",
            got=", ".join(unknown),
            hint="drop the precision, or split each float32 operand into the sum of "
            "bfloat16 parts and add their products",
            where=_jax.where_now(),
        )


def _unsupported(eqn: _jax.JaxprEqn, what: str, hint: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f"dot_general: {what}",
        expected="a product of two matrices, or of a vector and a matrix",
        got=" and ".join(str(v.aval) for v in eqn.invars),
        hint=hint,
        where=_jax.where_now(),
    )
