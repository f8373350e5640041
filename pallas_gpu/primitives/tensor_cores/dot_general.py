# SPDX-License-Identifier: Apache-2.0
"""What a `dot_general` asks for: sizes, types, precision, and the way to compute it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import _jax, errors

FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
INT8 = (jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8))
# Precisions of float32 operands in which they are read as tf32: 10 bits of mantissa.
_AS_TF32 = ("DEFAULT", "HIGH", "TF32_TF32_F32")
# The number of products of bfloat16 parts that give float32's precision, by name. Three
# parts of 8 bits are the 24 bits of a float32; products of small parts are left out.
_SPLIT = {
    "HIGHEST": 6,
    "F32_F32_F32": 6,
    "TF32_TF32_F32_X3": 6,
    "BF16_BF16_F32_X3": 3,
    "BF16_BF16_F32_X6": 6,
    "BF16_BF16_F32_X9": 9,
}
# Precisions that say what the operands are converted to.
_CONVERTED: dict[str, Any] = {
    "F16_F16_F32": jnp.float16,
    "BF16_BF16_F32": jnp.bfloat16,
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """The product that an equation asks for.

    Attributes:
      contracted, batch: the dimensions of both operands over which it adds, and those
        that it keeps once.
      shapes, dtypes: of both operands.
      out: the type of the result.
      precision: its name.
    """

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[Any, Any]
    out: Any
    precision: str

    @classmethod
    def of(cls, eqn: _jax.JaxprEqn) -> Problem:
        """Returns the problem of an equation of `dot_general` as JAX made it."""
        avals = [v.aval for v in eqn.invars]
        return cls.make(eqn.params, avals, eqn.outvars[0].aval.dtype)

    @classmethod
    def make(cls, params: Mapping[str, Any], operands: Sequence[Any], out: Any) -> Any:
        """Returns the problem of an equation's parameters and operands."""
        contracted, batch = params["dimension_numbers"]
        a, b = operands
        return cls(
            (tuple(contracted[0]), tuple(contracted[1])),
            (tuple(batch[0]), tuple(batch[1])),
            (tuple(a.shape), tuple(b.shape)),
            (jnp.dtype(a.dtype), jnp.dtype(b.dtype)),
            jnp.dtype(out),
            _name(params["precision"]),
        )

    def of_type(self, dtype: Any) -> Problem:
        """Returns the problem for operands of another type."""
        types = (jnp.dtype(dtype), jnp.dtype(dtype))
        return dataclasses.replace(self, dtypes=types, precision="DEFAULT")

    def free(self, i: int) -> tuple[int, ...]:
        """Returns the dimensions that only one operand has."""
        taken = (*self.contracted[i], *self.batch[i])
        return tuple(d for d in range(len(self.shapes[i])) if d not in taken)

    def size(self, i: int, dimensions: Sequence[int]) -> int:
        """Returns the product of the sizes of dimensions of an operand."""
        return math.prod(self.shapes[i][d] for d in dimensions)

    @property
    def batches(self) -> int:
        """The number of matrices of either operand."""
        return self.size(0, self.batch[0])

    @property
    def mnk(self) -> tuple[int, int, int]:
        """Rows and columns of the result, and the number of terms of each element."""
        m, n = (self.size(i, self.free(i)) for i in (0, 1))
        return m, n, self.size(0, self.contracted[0])

    @property
    def is_of_matrices(self) -> bool:
        """Whether both operands are matrices: a sum along one dimension of each."""
        sums = len(self.contracted[0]) == 1 and not self.batch[0]
        return sums and all(len(shape) == 2 for shape in self.shapes)

    @property
    def is_of_stacks(self) -> bool:
        """Whether both operands are matrices along their first dimension."""
        sums = len(self.contracted[0]) == 1 and self.batch == ((0,), (0,))
        return sums and all(len(shape) == 3 for shape in self.shapes)

    @property
    def is_with_vector(self) -> bool:
        """Whether the tensor core has nothing to do: one operand is a vector."""
        return not self.free(0) or not self.free(1) or not self.contracted[0]

    @property
    def is_float8(self) -> bool:
        """Whether the operands have 8-bit floats."""
        return any(d in FLOAT8 for d in self.dtypes)

    @property
    def is_split(self) -> bool:
        """Whether float32 operands are split into parts of bfloat16."""
        return self.precision in _SPLIT and self.operand_type == jnp.float32

    @property
    def parts(self) -> int:
        """The number of products of parts; see `is_split`."""
        return _SPLIT[self.precision]

    @functools.cached_property
    def operand_type(self) -> Any:
        """The type that both operands are converted to.

        None for two 8-bit types that the tensor core multiplies as they are. JAX does
        not promote 8-bit floats; all wider floats hold them.
        """
        if self.precision in _CONVERTED:
            return jnp.dtype(_CONVERTED[self.precision])
        first, second = self.dtypes
        if first == second:
            return first
        if first in INT8 and second in INT8:
            return None
        wide = [d for d in self.dtypes if d not in FLOAT8]
        return functools.reduce(jnp.promote_types, wide) if wide else None

    @property
    def sum_type(self) -> Any:
        """The type in which the tensor core adds."""
        integer = all(jnp.issubdtype(d, jnp.integer) for d in self.dtypes)
        return jnp.dtype(jnp.int32 if integer else jnp.float32)

    @property
    def adds_in_result_type(self) -> bool:
        """Whether a sum with the result is a sum in the accumulator."""
        return (
            self.is_of_matrices
            and not self.is_with_vector
            and self.out == self.sum_type
            and not self.is_split
        )

    def shown(self) -> str:
        """Returns both operands, for messages."""
        return " and ".join(
            f"{dtype.name}{list(shape)}"
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )


def _name(precision: Any) -> str:
    """Returns the name of a precision, the higher one of two."""
    if isinstance(precision, tuple):
        order = ("DEFAULT", "HIGH", "HIGHEST")
        names = [_name(p) for p in precision]
        return max(names, key=lambda n: order.index(n) if n in order else 0)
    if precision is None:
        return "DEFAULT"
    return str(getattr(precision, "name", precision))


def require_known(problem: Problem) -> None:
    """Raises UnsupportedError for a precision without an implementation."""
    known = (*_AS_TF32, *_SPLIT, *_CONVERTED, "ANY_F8_ANY_F8_F32", "DEFAULT")
    if problem.precision in known:
        return
    raise errors.UnsupportedError(
        "a matrix product with a precision that kernels do not have",
        expected=", ".join(dict.fromkeys(known)),
        got=problem.precision,
        hint="drop the precision: float32 operands are then read as tf32; HIGHEST "
        "computes in float32",
    )
