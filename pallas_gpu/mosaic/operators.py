# SPDX-License-Identifier: Apache-2.0
"""The operators and elementwise functions of fragmented arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import elementwise, registers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.registers import Array, Splat
from pallas_gpu.layouts import WGSplatLayout
from pallas_gpu.mosaic.held import Held, from_register
from pallas_gpu.mosaic.layouts import FragmentedLayout


class Operators(Held):
    """Elementwise operations; scalars and splats match any shape."""

    def _apply(self, name: str, *others: Any, **params: Any) -> Self:
        """An operation of the table of elementwise operations on this and others."""
        arrays = matched([self, *others])
        chosen = layout_of([self, *others])
        return type(self).of(elementwise.apply(name, *arrays, **params), chosen)

    def _reversed(self, name: str, other: Any) -> Self:
        return self._lifted(other)._apply(name, self)

    def _lifted(self, other: Any) -> Self:
        """A number, a value or an array as an array of this element type."""
        if isinstance(other, Held):
            return other
        dtype = self.array().dtype
        if isinstance(other, ir.Value):
            other = from_register(other, dtype)
        return type(self).of(elementwise.scalar(other, dtype))

    def __pos__(self) -> Self:
        return self

    def __neg__(self) -> Self:
        return self._apply("neg")

    def __add__(self, other: Any) -> Self:
        return self._apply("add", other)

    def __radd__(self, other: Any) -> Self:
        return self._reversed("add", other)

    def __sub__(self, other: Any) -> Self:
        return self._apply("sub", other)

    def __rsub__(self, other: Any) -> Self:
        return self._reversed("sub", other)

    def __mul__(self, other: Any) -> Self:
        return self._apply("mul", other)

    def __rmul__(self, other: Any) -> Self:
        return self._reversed("mul", other)

    def __truediv__(self, other: Any) -> Self:
        return self._of_floats()._apply("div", other)

    def __rtruediv__(self, other: Any) -> Self:
        return self._of_floats()._reversed("div", other)

    def _of_floats(self) -> Self:
        if not isinstance(self.mlir_dtype, ir.FloatType):
            raise errors.DTypeError(
                "A true division of integers",
                expected="floats",
                got=str(self.mlir_dtype),
                hint="use // or trunc_div, or convert the array with astype",
            )
        return self

    def __floordiv__(self, other: Any) -> Self:
        other = self._lifted(other)
        quotient = self._apply("div", other)
        if isinstance(self.mlir_dtype, ir.FloatType):
            return quotient._apply("floor")
        if not self.is_signed:
            return quotient
        # The quotient is rounded towards zero: too large where signs differ.
        rest = self._apply("rem", other)
        below = ((rest < 0) ^ (other < 0)) & (rest != 0)
        return below.select(quotient - 1, quotient)

    def __rfloordiv__(self, other: Any) -> Self:
        return self._lifted(other) // self

    def trunc_div(self, other: Any) -> Self:
        """Returns the quotient of integers, rounded towards zero."""
        if not isinstance(self.mlir_dtype, ir.IntegerType):
            raise errors.DTypeError(
                "trunc_div: not an integer type", got=str(self.mlir_dtype)
            )
        return self._apply("div", other)

    def __mod__(self, other: Any) -> Self:
        """The remainder of a division rounded towards zero, with the dividend's sign."""
        return self._apply("rem", other)

    def __rmod__(self, other: Any) -> Self:
        return self._reversed("rem", other)

    def __pow__(self, other: Any) -> Self:
        if isinstance(other, int):
            return self._apply("integer_pow", y=other)
        return self._apply("pow", other)

    def __rpow__(self, other: Any) -> Self:
        return self._reversed("pow", other)

    def __invert__(self) -> Self:
        return self._apply("not")

    def __and__(self, other: Any) -> Self:
        return self._apply("and", other)

    def __or__(self, other: Any) -> Self:
        return self._apply("or", other)

    def __xor__(self, other: Any) -> Self:
        return self._apply("xor", other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __lshift__(self, other: Any) -> Self:
        return self._apply("shift_left", other)

    def __rshift__(self, other: Any) -> Self:
        kind = "arithmetic" if self.is_signed else "logical"
        return self._apply(f"shift_right_{kind}", other)

    def __eq__(self, other: Any) -> Self:  # type: ignore[override]
        return self._apply("eq", other)

    def __ne__(self, other: Any) -> Self:  # type: ignore[override]
        return self._apply("ne", other)

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> Self:
        return self._apply("lt", other)

    def __le__(self, other: Any) -> Self:
        return self._apply("le", other)

    def __gt__(self, other: Any) -> Self:
        return self._apply("gt", other)

    def __ge__(self, other: Any) -> Self:
        return self._apply("ge", other)

    def max(self, other: Any) -> Self:
        """Returns the greater elements; NaN where one is NaN."""
        return self._apply("max", other)

    def min(self, other: Any) -> Self:
        """Returns the lesser elements; NaN where one is NaN."""
        return self._apply("min", other)

    def exp(self, *, approx: bool = False) -> Self:
        """Returns e to the power of the elements."""
        return self._apply("exp", approx_math=approx)

    def exp2(self, *, approx: bool = False) -> Self:
        """Returns 2 to the power of the elements."""
        return self._apply("exp2", approx_math=approx)

    def log(self, *, approx: bool = False) -> Self:
        """Returns natural logarithms."""
        return self._apply("log", approx_math=approx)

    def log2(self, *, approx: bool = False) -> Self:
        """Returns logarithms to base 2."""
        return self._apply("log2", approx_math=approx)

    def sin(self, *, approx: bool = False) -> Self:
        """Returns sines."""
        return self._apply("sin", approx_math=approx)

    def cos(self, *, approx: bool = False) -> Self:
        """Returns cosines."""
        return self._apply("cos", approx_math=approx)

    def tanh(self, *, approx: bool = False) -> Self:
        """Returns hyperbolic tangents."""
        return self._apply("tanh", approx_math=approx)

    def rsqrt(self, *, approx: bool = False) -> Self:
        """Returns reciprocals of square roots."""
        return self._apply("rsqrt", approx_math=approx)

    def sqrt(self, *, approx: bool = False) -> Self:
        """Returns square roots."""
        return self._apply("sqrt", approx_math=approx)

    def abs(self) -> Self:
        """Returns absolute values."""
        return self._apply("abs")

    def round(self) -> Self:
        """Rounds to integers, halves away from zero."""
        return self._apply("round", rounding_method=0)

    def round_even(self) -> Self:
        """Rounds to integers, halves to even ones."""
        return self._apply("round", rounding_method=1)

    def erf(self) -> Self:
        """Returns the error function."""
        return self._apply("erf")

    def atan2(self, other: Any) -> Self:
        """Returns the angles of points (other, self)."""
        return self._apply("atan2", other)

    def select(self, on_true: Any, on_false: Any) -> Self:
        """Returns elements of `on_true` where this array of i1 holds, else the other's."""
        if self.array().dtype != dtypes.BOOL:
            raise errors.DTypeError(
                "select: the array that chooses is not boolean",
                expected="i1",
                got=str(self.mlir_dtype),
            )
        like = on_true if isinstance(on_true, Held) else on_false
        on_true, on_false = like._lifted(on_true), like._lifted(on_false)
        return self._apply("select_n", on_false, on_true)


def matched(operands: Sequence[Any]) -> list[Array]:
    """Arrays of one shape: numbers and values take the first one's element type."""
    first = operands[0]
    lifted = [first._lifted(x) for x in operands]
    arrays = [x.array() for x in lifted]
    fixed = [x.shape for x in arrays if not isinstance(x, Splat)]
    shape = fixed[0] if fixed else np.broadcast_shapes(*(x.shape for x in arrays))
    return [_broadcast(x, shape) if isinstance(x, Splat) else x for x in arrays]


def _broadcast(x: Splat, shape: tuple[int, ...]) -> Splat:
    pairs = zip(x.shape[::-1], shape[::-1], strict=False)
    if len(x.shape) > len(shape) or any(n not in (1, m) for n, m in pairs):
        raise errors.ShapeError(
            "A splat does not have the shape of the other operand",
            expected=f"{shape}, or an array that broadcasts to it",
            got=x.shape,
        )
    return registers.splat(x.value, x.dtype, shape)


def layout_of(operands: Sequence[Any]) -> FragmentedLayout | None:
    """The layout of the first array that is not a splat; None if there is none."""
    held = [x.layout for x in operands if isinstance(x, Held)]
    return next((x for x in held if not isinstance(x, WGSplatLayout)), None)
