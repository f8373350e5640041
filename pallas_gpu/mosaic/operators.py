# SPDX-License-Identifier: Apache-2.0
"""The operators and elementwise functions of fragmented arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import elementwise, registers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.registers import Array, Splat
from pallas_gpu.layouts import WGSplatLayout
from pallas_gpu.mosaic import elements
from pallas_gpu.mosaic.held import Held, from_register


def _unary(name: str, doc: str = "", **params: Any) -> Callable[[Any], Any]:
    """A method that applies an operation of the table."""

    def apply(self: Any) -> Any:
        return self._apply(name, **params)

    apply.__doc__ = doc
    return apply


def _binary(name: str, doc: str = "") -> tuple[Callable[[Any, Any], Any], ...]:
    """A method that applies an operation of two operands, and the reflected one."""

    def apply(self: Any, other: Any) -> Any:
        return self._apply(name, other)

    def reflected(self: Any, other: Any) -> Any:
        return self._lifted(other)._apply(name, self)

    apply.__doc__ = doc
    return apply, reflected


def _function(name: str, what: str) -> Callable[..., Any]:
    """A method that applies a function, exactly or by the hardware's approximation."""

    def apply(self: Any, *, approx: bool = False) -> Any:
        return self._apply(name, approx_math=approx)

    apply.__doc__ = f"Returns {what}."
    return apply


class Operators(Held):
    """Elementwise operations; scalars and splats match any shape."""

    def _apply(self, name: str, *others: Any, **params: Any) -> Self:
        """An operation of the table of elementwise operations on this and others."""
        held = [self, *(self._lifted(x) for x in others)]
        fixed = (x.layout for x in held if not isinstance(x.layout, WGSplatLayout))
        result = elementwise.apply(name, *_matched(held), **params)
        return type(self).of(result, next(fixed, None))

    def _lifted(self, other: Any) -> Any:
        """A number, a value or an array as an array of this element type."""
        if isinstance(other, Held):
            return other
        dtype = self.array().dtype
        if isinstance(other, ir.Value):
            other = from_register(other, dtype)
        return type(self).of(elementwise.scalar(other, dtype))

    def __pos__(self) -> Self:
        return self

    __neg__ = _unary("neg")
    __invert__ = _unary("not")
    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("sub")
    __mul__, __rmul__ = _binary("mul")
    # The remainder of a division rounded towards zero: it has the dividend's sign.
    __mod__, __rmod__ = _binary("rem")
    __and__, __rand__ = _binary("and")
    __or__, __ror__ = _binary("or")
    __xor__, __rxor__ = _binary("xor")
    __lshift__, _ = _binary("shift_left")
    __lt__, __gt__ = _binary("lt")[0], _binary("gt")[0]
    __le__, __ge__ = _binary("le")[0], _binary("ge")[0]
    __eq__, __ne__ = _binary("eq")[0], _binary("ne")[0]  # type: ignore[assignment]
    __hash__ = object.__hash__  # type: ignore[assignment]

    max, _ = _binary("max", "Returns the greater elements; NaN where one is NaN.")
    min, _ = _binary("min", "Returns the lesser elements; NaN where one is NaN.")
    atan2, _ = _binary("atan2", "Returns the angles of points (other, self).")
    exp = _function("exp", "e to the power of the elements")
    exp2 = _function("exp2", "2 to the power of the elements")
    log = _function("log", "natural logarithms")
    log2 = _function("log2", "logarithms to base 2")
    sin = _function("sin", "sines")
    cos = _function("cos", "cosines")
    tanh = _function("tanh", "hyperbolic tangents")
    sqrt = _function("sqrt", "square roots")
    rsqrt = _function("rsqrt", "reciprocals of square roots")
    abs = _unary("abs", "Returns absolute values.")
    erf = _unary("erf", "Returns the error function.")
    round = _unary("round", "Rounds, halves away from zero.", rounding_method=0)
    round_even = _unary("round", "Rounds, halves to even ones.", rounding_method=1)

    def __rshift__(self, other: Any) -> Self:
        kind = "arithmetic" if self.is_signed else "logical"
        return self._apply(f"shift_right_{kind}", other)

    def __truediv__(self, other: Any) -> Self:
        return self._of_floats()._apply("div", other)

    def __rtruediv__(self, other: Any) -> Self:
        return self._of_floats()._lifted(other)._apply("div", self)

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

    def __pow__(self, other: Any) -> Self:
        if isinstance(other, int):
            return self._apply("integer_pow", y=other)
        return self._apply("pow", other)

    def __rpow__(self, other: Any) -> Self:
        return self._lifted(other)._apply("pow", self)

    def copysign(self, other: Any) -> Self:
        """Returns the elements with the signs of `other`."""
        own, theirs = self._of_floats(), self._lifted(other)
        width = elements.bitwidth(own.mlir_dtype)
        signed = np.dtype(f"int{width}")
        bits, sign = (
            x._apply("bitcast_convert_type", to=signed) for x in (own.abs(), theirs)
        )
        joined = bits | (sign & -(1 << (width - 1)))
        return joined._apply("bitcast_convert_type", to=own.array().dtype)

    def select(self, on_true: Any, on_false: Any) -> Self:
        """Returns elements of `on_true` where this array of i1 holds, else others."""
        if self.array().dtype != dtypes.BOOL:
            raise errors.DTypeError(
                "select: the array that chooses is not boolean",
                expected="i1",
                got=str(self.mlir_dtype),
            )
        like: Any = on_true if isinstance(on_true, Held) else on_false
        on_true, on_false = like._lifted(on_true), like._lifted(on_false)
        return self._apply("select_n", on_false, on_true)


def _matched(held: Sequence[Held]) -> list[Array]:
    """The arrays, splats in the shape of the others."""
    arrays = [x.array() for x in held]
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
