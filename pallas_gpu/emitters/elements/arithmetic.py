# SPDX-License-Identifier: Apache-2.0
"""The instructions of elementwise operations: the emitters of the table's rows.

Every emitter accepts single elements and vectors; its first argument is the operands'
dtype. Semantics are lax's: integer division truncates and never traps, shifts by the
width or more shift out all bits. A product and a sum may be contracted to one fma, as
in XLA's own kernels.
"""

from __future__ import annotations

import math as pymath
from collections.abc import Callable

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math

from pallas_gpu.emitters import module, operations
from pallas_gpu.emitters.elements import dtypes

Emitter = Callable[..., ir.Value]  # (dtype, *values, **params) -> value
_CmpF = arith.CmpFPredicate
_CmpI = arith.CmpIPredicate


def resize_float(operation: str, dtype: np.dtype, value: ir.Value) -> ir.Value:
    """Applies a conversion operation to a value of any length."""
    lanes = dtypes.length(value)
    target = dtypes.mlir_type(dtype)
    if lanes is not None:
        target = ir.VectorType.get([lanes], target)
    return operations.create(operation, target, [value])


def plain(op: Callable[..., ir.Value]) -> Emitter:
    """A single MLIR operation, for any dtype."""
    return lambda dtype, *values, **_: op(*values)


def compare(op: Callable, predicate: object) -> Emitter:
    """`arith.cmpf` or `arith.cmpi`."""
    return lambda dtype, a, b: op(predicate, a, b)


def approx(instruction: str) -> Callable[[ir.Value], ir.Value]:
    """One f32 instruction of the special function unit (PTX ISA, Floating Point)."""
    return asm(f"{instruction} $0, $1;")


def asm(text: str) -> Callable[[ir.Value], ir.Value]:
    """One f32 instruction of one operand."""

    def emit(value: ir.Value) -> ir.Value:
        attributes = module.current().attributes(
            text, lambda: operations.assembly_attributes(text, "=f,f")
        )

        def one(element: ir.Value) -> ir.Value:
            return operations.create(
                "llvm.inline_asm", element.type, [element], attributes
            )

        return dtypes.per_lane(one, value)

    return emit


ex2 = approx("ex2.approx.ftz.f32")
lg2 = approx("lg2.approx.ftz.f32")
rcp = approx("rcp.approx.ftz.f32")


def scaled_input(function: Callable, factor: float) -> Emitter:
    """function(factor * x)."""

    def scaled(dtype, x):
        return function(arith.mulf(x, dtypes.constant(factor, dtype, x)))

    return scaled


def scaled_output(function: Callable, factor: float) -> Emitter:
    """factor * function(x)."""

    def scaled(dtype, x):
        return arith.mulf(function(x), dtypes.constant(factor, dtype, x))

    return scaled


def identity(dtype, x, **_):
    return x


def zero(dtype, x):
    return dtypes.constant(0, dtype, x)


def negate_int(dtype, x):
    return arith.subi(zero(dtype, x), x)


def bitwise_not(dtype, x):
    ones = True if dtype == dtypes.BOOL else -1
    pattern = dtype if dtype == dtypes.BOOL else np.dtype(f"int{dtypes.bits(dtype)}")
    return arith.xori(x, dtypes.constant(ones, pattern, x))


def guarded(op: Callable, if_zero: Callable, if_minus_one: Callable | None) -> Emitter:
    """An integer division whose divisor may be zero or -1.

    Division by zero and INT_MIN / -1 are undefined in LLVM. lax defines the quotient as
    -1 and INT_MIN, the remainder as the dividend and 0. Only dynamic divisors need the
    guard.
    """

    def divide(dtype, x, y):
        if _is_safe_divisor(y):
            return op(x, y)
        one = dtypes.constant(1, dtype, y)
        is_zero = arith.cmpi(_CmpI.eq, y, zero(dtype, y))
        if if_minus_one is None:
            quotient = op(x, arith.select(is_zero, one, y))
            return arith.select(is_zero, if_zero(dtype, x), quotient)
        is_minus = arith.cmpi(_CmpI.eq, y, dtypes.constant(-1, dtype, y))
        special = arith.ori(is_zero, is_minus)
        quotient = op(x, arith.select(special, one, y))
        quotient = arith.select(is_minus, if_minus_one(dtype, x), quotient)
        return arith.select(is_zero, if_zero(dtype, x), quotient)

    return divide


def _is_safe_divisor(y: ir.Value) -> bool:
    y = before_broadcast(y)
    if not dtypes.is_constant(y):
        return False
    attribute = y.owner.attributes["value"]
    if isinstance(attribute, ir.IntegerAttr):
        return attribute.value not in (0, -1)
    if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
        return ir.IntegerAttr(attribute.get_splat_value()).value not in (0, -1)
    return False


def before_broadcast(value: ir.Value) -> ir.Value:
    """The element that is in every lane of a broadcast; otherwise the value itself."""
    owner = value.owner
    if isinstance(owner, ir.Operation | ir.OpView) and owner.name == "vector.broadcast":
        return owner.operands[0]
    return value


def all_ones(dtype, x):
    signed = np.dtype(f"int{dtypes.bits(dtype)}")
    return dtypes.constant(-1, signed, x)


def shift(op: Callable, *, keeps_sign: bool = False) -> Emitter:
    """A shift by any distance; LLVM's are undefined at the width and above."""

    def emit(dtype, x, y):
        width = dtypes.bits(dtype)
        last = dtypes.constant(width - 1, dtype, y)
        if keeps_sign:
            return op(x, arith.minui(y, last))
        inside = arith.cmpi(_CmpI.ule, y, last)
        shifted = op(x, arith.select(inside, y, last))
        return arith.select(inside, shifted, zero(dtype, x))

    return emit


def sign_float(dtype, x):
    nothing, one = zero(dtype, x), dtypes.constant(1, dtype, x)
    positive = arith.select(arith.cmpf(_CmpF.OGT, x, nothing), one, x)
    negative = arith.cmpf(_CmpF.OLT, x, nothing)
    return arith.select(negative, dtypes.constant(-1, dtype, x), positive)


def sign_signed(dtype, x):
    one, minus = dtypes.constant(1, dtype, x), dtypes.constant(-1, dtype, x)
    return arith.maxsi(arith.minsi(x, one), minus)


def sign_unsigned(dtype, x):
    return arith.minui(x, dtypes.constant(1, dtype, x))


def is_finite(dtype, x):
    infinity = dtypes.constant(np.inf, dtype, x)
    return arith.cmpf(_CmpF.OLT, abs_float(dtype, x), infinity)


def abs_float(dtype, x):
    if dtypes.bits(dtype) != 16:
        return math.absf(x)
    # libdevice has no 16-bit form and would convert to f32; clear the sign bit instead.
    mask = dtypes.constant(0x7FFF, dtypes.I16, x)
    return dtypes.bitcast(arith.andi(dtypes.bitcast(x, dtypes.I16), mask), dtype)


def rem_float(dtype, x, y):
    """C's fmod, exact: libdevice's, as for XLA. LLVM cannot legalize frem for PTX."""
    name = "__nv_fmodf" if dtypes.bits(dtype) == 32 else "__nv_fmod"
    type_ = dtypes.mlir_type(dtype)
    module.current().declare(name, type_)
    return dtypes.per_lane(lambda *lane: operations.call(name, type_, lane), x, y)


def round_float(dtype, x, *, rounding_method=0):
    # lax.RoundingMethod: 0 rounds ties away from zero, 1 to nearest even.
    return math.roundeven(x) if int(rounding_method) == 1 else math.round(x)


def logistic(dtype, x):
    one = dtypes.constant(1, dtype, x)
    return arith.divf(one, arith.addf(one, math.exp(arith.negf(x))))


def logistic_approx(dtype, x):
    one = dtypes.constant(1, dtype, x)
    scaled = arith.mulf(x, dtypes.constant(-pymath.log2(pymath.e), dtype, x))
    return rcp(arith.addf(one, ex2(scaled)))


def integer_pow(multiply: Callable) -> Emitter:
    """x to the power y, a constant, by repeated squaring."""

    def power(dtype, x, *, y):
        if y == 0:
            return dtypes.constant(1, dtype, x)
        result, base, rest = None, x, abs(y)
        while rest:
            if rest & 1:
                result = base if result is None else multiply(result, base)
            rest >>= 1
            if rest:
                base = multiply(base, base)
        if y < 0:
            result = arith.divf(dtypes.constant(1, dtype, x), result)
        return result

    return power


def clamp(maximum: Callable, minimum: Callable) -> Emitter:
    return lambda dtype, low, x, high: minimum(maximum(x, low), high)


def select_n(dtype, which, *cases):
    if len(cases) == 1:
        return cases[0]
    lanes = dtypes.length(which)
    element = which.type if lanes is None else which.type.element_type
    if element.width == 1:
        return arith.select(which, cases[1], cases[0])
    result, integer = cases[-1], np.dtype(f"int{element.width}")
    for index in range(len(cases) - 2, -1, -1):
        chosen = arith.cmpi(_CmpI.sle, which, dtypes.constant(index, integer, which))
        result = arith.select(chosen, cases[index], result)
    return result


def square(multiply: Callable) -> Emitter:
    return lambda dtype, x: multiply(x, x)


def one_minus_square(dtype, x):
    """1 - x * x in factors, which are exact where x is close to one."""
    one = dtypes.constant(1, dtype, x)
    return arith.mulf(arith.addf(one, x), arith.subf(one, x))


def logaddexp(dtype, x, y):
    """log(exp(x) + exp(y)); the difference of equal infinities is zero."""
    high, low = arith.maximumf(x, y), arith.minimumf(x, y)
    same = arith.cmpf(_CmpF.OEQ, high, low)
    difference = arith.select(same, zero(dtype, x), arith.subf(low, high))
    return arith.addf(high, math.log1p(math.exp(difference)))


def divide_float(dtype, x, y):
    """x / y; what depends on a divisor of all lanes only is computed once.

    div.full.f32 scales both operands where the divisor or its reciprocal is denormal,
    and multiplies by the reciprocal. ptxas shares the reciprocal of equal divisors, but
    scales each dividend by two predicated products; here one product by 1 does that,
    and the result is bitwise the same.
    """
    lanes = dtypes.length(y)
    if dtype != dtypes.F32 or lanes in (None, 1) or not dtypes.is_uniform(y):
        return arith.divf(x, y)
    divisor = before_broadcast(y)
    if dtypes.is_constant(divisor):
        return arith.divf(x, y)
    if dtypes.length(divisor) is not None:
        divisor = dtypes.extract(divisor, 0)
    size = math.absf(divisor)
    one, quarter, large, least, most = (
        dtypes.constant(c, dtypes.F32) for c in (1, 0.25, 2.0**24, 2.0**-126, 2.0**126)
    )
    scale = arith.select(arith.cmpf(_CmpF.OLT, size, least), large, one)
    scale = arith.select(arith.cmpf(_CmpF.OGT, size, most), quarter, scale)
    inverse = rcp(arith.mulf(divisor, scale))
    scaled = arith.mulf(x, dtypes.splat(scale, lanes))
    return arith.mulf(scaled, dtypes.splat(inverse, lanes))


def _contracted() -> dict[str, ir.Attribute]:
    return {"fastmath": ir.Attribute.parse("#arith.fastmath<contract>")}


def contracting(name: str) -> Callable[..., ir.Value]:
    """A sum or product of the kernel, which may be contracted to an fma.

    The emitters above that require a rounded product or sum use the plain operations.
    """

    def emit(a: ir.Value, b: ir.Value) -> ir.Value:
        flags = module.current().attributes("contract", _contracted)
        return operations.create(name, a.type, [a, b], flags)

    return emit


addf, subf, mulf = map(contracting, ("arith.addf", "arith.subf", "arith.mulf"))


def exp_float(dtype, x, *, summed=False):
    """exp, by libdevice's function.

    Where only a sum uses it, the same instructions are emitted here, with a last
    product that may be contracted: 2**n times 2**r is exact unless it is denormal.
    """
    if not summed or dtype != dtypes.F32:
        return math.exp(x)
    whole = _WHOLE(_CLAMPED(x))
    n = arith.addf(whole, dtypes.constant(-_WHOLE_ZERO, dtype, x))
    low, high = (dtypes.constant(c, dtype, x) for c in (_LOG2_E_LOW, _LOG2_E_HIGH))
    rest = math.fma(x, low, math.fma(x, high, arith.negf(n)))
    bits = dtypes.bitcast(whole, dtypes.I32)
    exponent = arith.shli(bits, dtypes.constant(23, dtypes.I32, bits))
    return mulf(ex2(rest), dtypes.bitcast(exponent, dtypes.F32))


# x log2(e) / 252 + 1/2 in [0, 1], and n + 12583039, whose low bits are n + 127.
_CLAMPED = asm("fma.rn.sat.f32 $0, $1, 0f3BBB989D, 0f3F000000;")
_WHOLE = asm("fma.rm.f32 $0, $1, 0f437C0000, 0f4B400001;")
_WHOLE_ZERO = 12583039.0
_LOG2_E_HIGH = float(np.uint32(0x3FB8AA3B).view(np.float32))
_LOG2_E_LOW = float(np.uint32(0x32A57060).view(np.float32))
