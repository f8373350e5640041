# SPDX-License-Identifier: Apache-2.0
"""The table of elementwise operations: lax's name to the operations of a register.

Every row works on one element and on a vector alike. Semantics are lax's: integer
division truncates and never traps, shifts by the width or more shift everything out,
max and min hand NaN on, `exp` and its like compute f16 and bf16 in f32. A product that
is added may be contracted to one fma, as in XLA's own kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import math as pymath
from collections.abc import Callable

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from pallas_gpu import errors
from pallas_gpu.mosaic.elements import dtypes

Emitter = Callable[..., ir.Value]  # (dtype, *values, **params) -> value
_CmpF = arith.CmpFPredicate
_CmpI = arith.CmpIPredicate


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation, by the kind of its operands' dtype; None where it has none.

    Attributes:
      float, signed, unsigned, boolean: the emitter for that kind.
      widen: f16 and bf16 are computed in f32 and rounded once.
      approx: what f32 uses instead under `approx_math`.
      predicate: the result is bool.
    """

    float: Emitter | None = None
    signed: Emitter | None = None
    unsigned: Emitter | None = None
    boolean: Emitter | None = None
    widen: bool = False
    approx: Emitter | None = None
    predicate: bool = False

    def emitter(self, kind: dtypes.Kind) -> Emitter | None:
        """The emitter for a kind of dtype, None where there is none."""
        emitters = {
            "float": self.float,
            "signed": self.signed,
            "unsigned": self.unsigned,
            "bool": self.boolean,
        }
        return emitters.get(kind)


def emit(
    name: str, dtype: np.dtype, *values: ir.Value, approx_math: bool = False, **params
) -> ir.Value:
    """Emits an operation of the table.

    Args:
      name: lax's name of the primitive.
      dtype: of the operands (of the cases, for `select_n`).
      values: single elements, or vectors of one length.
      approx_math: allow the hardware's approximations of f32.
      params: lax's parameters that matter (`y` of `integer_pow`, `rounding_method`).

    Raises:
      UnsupportedError: no such operation.
      DTypeError: it does not exist for the dtype.
    """
    return emitter(name, dtype, approx_math=approx_math, **params)(*values)


def emitter(
    name: str, dtype: np.dtype, *, approx_math: bool = False, **params
) -> Callable[..., ir.Value]:
    """The function from values to value that `emit` applies, resolved once."""
    row = lookup(name, dtype)
    chosen = row.emitter(dtypes.kind(dtype))
    assert chosen is not None  # lookup has checked
    narrow = row.widen and dtype in (dtypes.F16, dtypes.BF16)
    if approx_math and row.approx and (narrow or dtype == dtypes.F32):
        chosen = row.approx
    if not narrow:
        return lambda *values: chosen(dtype, *values, **params)

    def widened(*values: ir.Value) -> ir.Value:
        wide = [resize_float(arith.extf, dtypes.F32, value) for value in values]
        result = chosen(dtypes.F32, *wide, **params)
        return resize_float(arith.truncf, dtype, result)

    return widened


def lookup(name: str, dtype: np.dtype) -> Row:
    """The row of an operation, checked for a dtype."""
    row = TABLE.get(name)
    if row is None:
        raise errors.UnsupportedError(
            f"No elementwise operation {name!r} in GPU kernels", expected=sorted(TABLE)
        )
    dtype_kind = dtypes.kind(dtype)
    if row.emitter(dtype_kind) is None:
        kinds: tuple[dtypes.Kind, ...] = ("float", "signed", "unsigned", "bool")
        raise errors.DTypeError(
            f"{name} does not take {dtype} operands",
            expected=[k for k in kinds if row.emitter(k) is not None],
            got=dtype,
            hint="convert the operands with astype first",
        )
    return row


def result_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """The dtype that an operation on `dtype` operands gives."""
    return dtypes.BOOL if TABLE[name].predicate else dtype


# --- pieces ---------------------------------------------------------------------------


def resize_float(op: Callable, dtype: np.dtype, value: ir.Value) -> ir.Value:
    """Applies a conversion operation to a value of any length."""
    lanes = dtypes.length(value)
    target = dtypes.mlir_type(dtype)
    return op(target if lanes is None else ir.VectorType.get([lanes], target), value)


def _plain(op: Callable[..., ir.Value]) -> Emitter:
    return lambda dtype, *values, **_: op(*values)


def _compare(op: Callable, predicate: object) -> Emitter:
    return lambda dtype, a, b: op(predicate, a, b)


def _approx(instruction: str) -> Callable[[ir.Value], ir.Value]:
    """One f32 instruction of the special function unit (PTX ISA, Floating Point)."""

    def one(element: ir.Value) -> ir.Value:
        text = f"{instruction} $0, $1;"
        return llvm.inline_asm(
            element.type, [element], text, "=f,f", has_side_effects=False
        )

    return lambda value: dtypes.per_lane(one, value)


_ex2 = _approx("ex2.approx.ftz.f32")
_lg2 = _approx("lg2.approx.ftz.f32")
_rcp = _approx("rcp.approx.ftz.f32")


def _scaled_input(function: Callable, factor: float) -> Emitter:
    def scaled(dtype, x):
        return function(arith.mulf(x, dtypes.constant(factor, dtype, x)))

    return scaled


def _scaled_output(function: Callable, factor: float) -> Emitter:
    def scaled(dtype, x):
        return arith.mulf(function(x), dtypes.constant(factor, dtype, x))

    return scaled


def _identity(dtype, x, **_):
    return x


def _zero(dtype, x):
    return dtypes.constant(0, dtype, x)


def _negate_int(dtype, x):
    return arith.subi(_zero(dtype, x), x)


def _not(dtype, x):
    ones = True if dtype == dtypes.BOOL else -1
    pattern = dtype if dtype == dtypes.BOOL else np.dtype(f"int{dtypes.bits(dtype)}")
    return arith.xori(x, dtypes.constant(ones, pattern, x))


# Integer division by zero and INT_MIN / -1 are undefined in LLVM; lax gives -1 and
# INT_MIN for the quotient, the dividend and 0 for the remainder. Only divisors that
# the compiler cannot see need the guard.
def _guarded(op: Callable, if_zero: Callable, if_minus_one: Callable | None) -> Emitter:
    def guarded(dtype, x, y):
        if _is_safe_divisor(y):
            return op(x, y)
        one = dtypes.constant(1, dtype, y)
        is_zero = arith.cmpi(_CmpI.eq, y, _zero(dtype, y))
        if if_minus_one is None:
            quotient = op(x, arith.select(is_zero, one, y))
            return arith.select(is_zero, if_zero(dtype, x), quotient)
        is_minus = arith.cmpi(_CmpI.eq, y, dtypes.constant(-1, dtype, y))
        special = arith.ori(is_zero, is_minus)
        quotient = op(x, arith.select(special, one, y))
        quotient = arith.select(is_minus, if_minus_one(dtype, x), quotient)
        return arith.select(is_zero, if_zero(dtype, x), quotient)

    return guarded


def _is_safe_divisor(y: ir.Value) -> bool:
    owner = y.owner
    if isinstance(owner, ir.Operation | ir.OpView) and owner.name == "vector.broadcast":
        y = owner.operands[0]
    if not dtypes.is_constant(y):
        return False
    attribute = y.owner.attributes["value"]
    if isinstance(attribute, ir.IntegerAttr):
        return attribute.value not in (0, -1)
    if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
        return ir.IntegerAttr(attribute.get_splat_value()).value not in (0, -1)
    return False


def _all_ones(dtype, x):
    signed = np.dtype(f"int{dtypes.bits(dtype)}")
    return dtypes.constant(-1, signed, x)


def _shift(op: Callable, *, keeps_sign: bool = False) -> Emitter:
    def shift(dtype, x, y):
        width = dtypes.bits(dtype)
        last = dtypes.constant(width - 1, dtype, y)
        if keeps_sign:
            return op(x, arith.minui(y, last))
        inside = arith.cmpi(_CmpI.ule, y, last)
        shifted = op(x, arith.select(inside, y, last))
        return arith.select(inside, shifted, _zero(dtype, x))

    return shift


def _sign_float(dtype, x):
    zero, one = _zero(dtype, x), dtypes.constant(1, dtype, x)
    positive = arith.select(arith.cmpf(_CmpF.OGT, x, zero), one, x)
    negative = arith.cmpf(_CmpF.OLT, x, zero)
    return arith.select(negative, dtypes.constant(-1, dtype, x), positive)


def _sign_signed(dtype, x):
    one, minus = dtypes.constant(1, dtype, x), dtypes.constant(-1, dtype, x)
    return arith.maxsi(arith.minsi(x, one), minus)


def _sign_unsigned(dtype, x):
    return arith.minui(x, dtypes.constant(1, dtype, x))


def _is_finite(dtype, x):
    infinity = dtypes.constant(np.inf, dtype, x)
    return arith.cmpf(_CmpF.OLT, _abs_float(dtype, x), infinity)


def _abs_float(dtype, x):
    if dtypes.bits(dtype) != 16:
        return math.absf(x)
    # libdevice has no 16-bit form and would go through f32; the sign is one bit.
    mask = dtypes.constant(0x7FFF, dtypes.I16, x)
    return dtypes.bitcast(arith.andi(dtypes.bitcast(x, dtypes.I16), mask), dtype)


def _rem_float(dtype, x, y):
    """C's fmod, exact while the quotient is below 2**24.

    The pipeline has no legal form of LLVM's frem. The rounded quotient may be off by
    one, which one correction of the remainder mends.
    """
    quotient = math.trunc(arith.divf(x, y))
    rest = math.fma(arith.negf(quotient), y, x)
    size = _abs_float(dtype, y)
    signed_size = math.copysign(size, x)
    wrong_sign = arith.cmpf(_CmpF.OLT, arith.mulf(rest, x), _zero(dtype, x))
    rest = arith.select(wrong_sign, arith.addf(rest, signed_size), rest)
    too_big = arith.cmpf(_CmpF.OGE, _abs_float(dtype, rest), size)
    rest = arith.select(too_big, arith.subf(rest, signed_size), rest)
    infinity = dtypes.constant(np.inf, dtype, y)
    endless = arith.cmpf(_CmpF.OEQ, size, infinity)
    keeps = arith.andi(endless, _is_finite(dtype, x))
    return math.copysign(arith.select(keeps, x, rest), x)


def _round(dtype, x, *, rounding_method=0):
    # lax.RoundingMethod: 0 rounds halves away from zero, 1 to the nearest even.
    return math.roundeven(x) if int(rounding_method) == 1 else math.round(x)


def _logistic(dtype, x):
    one = dtypes.constant(1, dtype, x)
    return arith.divf(one, arith.addf(one, math.exp(arith.negf(x))))


def _logistic_approx(dtype, x):
    one = dtypes.constant(1, dtype, x)
    scaled = arith.mulf(x, dtypes.constant(-pymath.log2(pymath.e), dtype, x))
    return _rcp(arith.addf(one, _ex2(scaled)))


def _integer_pow(multiply: Callable) -> Emitter:
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


def _clamp(maximum: Callable, minimum: Callable) -> Emitter:
    return lambda dtype, low, x, high: minimum(maximum(x, low), high)


def _select_n(dtype, which, *cases):
    if len(cases) == 1:
        return cases[0]
    lanes = dtypes.length(which)
    element = which.type if lanes is None else which.type.element_type
    if element.width == 1:
        return arith.select(which, cases[1], cases[0])
    result = cases[-1]
    for index in range(len(cases) - 2, -1, -1):
        chosen = arith.cmpi(_CmpI.sle, which, dtypes.constant(index, dtypes.I32, which))
        result = arith.select(chosen, cases[index], result)
    return result


def _square(multiply: Callable) -> Emitter:
    return lambda dtype, x: multiply(x, x)


# --- the table ------------------------------------------------------------------------


def _row(float_=None, signed=None, unsigned=None, boolean=None) -> Row:
    """Rows of plain operations; one integer operation serves both signs."""
    unsigned = unsigned if unsigned is not None else signed
    ops = (float_, signed, unsigned, boolean)
    emitters = [None if op is None else _plain(op) for op in ops]
    return Row(emitters[0], emitters[1], emitters[2], emitters[3])


def _comparison(float_, signed, unsigned) -> Row:
    return Row(
        _compare(arith.cmpf, float_),
        _compare(arith.cmpi, signed),
        _compare(arith.cmpi, unsigned),
        _compare(arith.cmpi, unsigned),
        predicate=True,
    )


def _function(op: Callable, approx: Emitter | None = None) -> Row:
    return Row(float=_plain(op), widen=True, approx=approx)


def _contracting(op: Callable) -> Callable:
    """A sum or product as the author wrote it, which may join others in one fma.

    The emitters above that rely on a rounded product or sum use the plain operations.
    """
    return functools.partial(op, fastmath=arith.FastMathFlags.contract)


_E = pymath.e
_addf, _subf, _mulf = map(_contracting, (arith.addf, arith.subf, arith.mulf))
TABLE: dict[str, Row] = {
    "add": _row(_addf, arith.addi, boolean=arith.ori),
    "sub": _row(_subf, arith.subi),
    "mul": _row(_mulf, arith.muli, boolean=arith.andi),
    "div": Row(
        float=_plain(arith.divf),
        signed=_guarded(arith.divsi, _all_ones, _negate_int),
        unsigned=_guarded(arith.divui, _all_ones, None),
        widen=True,
    ),
    "rem": Row(
        float=_rem_float,
        signed=_guarded(arith.remsi, _identity, _zero),
        unsigned=_guarded(arith.remui, _identity, None),
        widen=True,
    ),
    "max": _row(arith.maximumf, arith.maxsi, arith.maxui, arith.ori),
    "min": _row(arith.minimumf, arith.minsi, arith.minui, arith.andi),
    "neg": Row(_plain(arith.negf), _negate_int, _negate_int),
    "abs": Row(_abs_float, _plain(math.absi), _identity),
    "sign": Row(_sign_float, _sign_signed, _sign_unsigned),
    "and": _row(None, arith.andi, boolean=arith.andi),
    "or": _row(None, arith.ori, boolean=arith.ori),
    "xor": _row(None, arith.xori, boolean=arith.xori),
    "not": Row(signed=_not, unsigned=_not, boolean=_not),
    "shift_left": Row(signed=_shift(arith.shli), unsigned=_shift(arith.shli)),
    "shift_right_logical": Row(
        signed=_shift(arith.shrui), unsigned=_shift(arith.shrui)
    ),
    "shift_right_arithmetic": Row(
        signed=_shift(arith.shrsi, keeps_sign=True),
        unsigned=_shift(arith.shrsi, keeps_sign=True),
    ),
    "eq": _comparison(_CmpF.OEQ, _CmpI.eq, _CmpI.eq),
    "ne": _comparison(_CmpF.UNE, _CmpI.ne, _CmpI.ne),
    "lt": _comparison(_CmpF.OLT, _CmpI.slt, _CmpI.ult),
    "le": _comparison(_CmpF.OLE, _CmpI.sle, _CmpI.ule),
    "gt": _comparison(_CmpF.OGT, _CmpI.sgt, _CmpI.ugt),
    "ge": _comparison(_CmpF.OGE, _CmpI.sge, _CmpI.uge),
    "select_n": Row(_select_n, _select_n, _select_n, _select_n),
    "clamp": Row(
        _clamp(arith.maximumf, arith.minimumf),
        _clamp(arith.maxsi, arith.minsi),
        _clamp(arith.maxui, arith.minui),
    ),
    "square": Row(_square(_mulf), _square(arith.muli), _square(arith.muli)),
    "integer_pow": Row(
        _integer_pow(_mulf), _integer_pow(arith.muli), _integer_pow(arith.muli)
    ),
    "pow": _function(math.powf),
    "exp": _function(math.exp, _scaled_input(_ex2, pymath.log2(_E))),
    "exp2": _function(math.exp2, _plain(_ex2)),
    "expm1": _function(math.expm1),
    "log": _function(math.log, _scaled_output(_lg2, pymath.log(2))),
    "log2": _function(math.log2, _plain(_lg2)),
    "log1p": _function(math.log1p),
    "sqrt": _function(math.sqrt, _plain(_approx("sqrt.approx.ftz.f32"))),
    "rsqrt": _function(math.rsqrt, _plain(_approx("rsqrt.approx.ftz.f32"))),
    "cbrt": _function(math.cbrt),
    "tanh": _function(math.tanh, _plain(_approx("tanh.approx.f32"))),
    "logistic": Row(float=_logistic, widen=True, approx=_logistic_approx),
    "sin": _function(math.sin, _plain(_approx("sin.approx.ftz.f32"))),
    "cos": _function(math.cos, _plain(_approx("cos.approx.ftz.f32"))),
    "tan": _function(math.tan),
    "atan2": _function(math.atan2),
    "erf": _function(math.erf),
    "floor": _function(math.floor),
    "ceil": _function(math.ceil),
    "round": Row(float=_round, widen=True),
    "is_finite": Row(float=_is_finite, predicate=True),
    "population_count": _row(None, math.ctpop),
    "clz": _row(None, math.ctlz),
    "stop_gradient": Row(_identity, _identity, _identity, _identity),
    "copy": Row(_identity, _identity, _identity, _identity),
}
