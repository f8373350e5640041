# SPDX-License-Identifier: Apache-2.0
"""What operations on values compute, over NumPy: arith, math, vector, and tpu's.

Written from the facts of the hardware and of MLIR's dialects, not from the emitters.
Integers are signless: NumPy's signed ones of their width hold their bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

BF16 = np.dtype(ml_dtypes.bfloat16)
_DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": BF16,
    "i1": np.dtype(bool),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "index": np.dtype(np.int64),
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# Operation's name -> f(operation, operands) -> results.
VALUES: dict[str, Callable[[Any, list[Any]], list[Any]]] = {}


def dtype_of(t: ir.Type) -> np.dtype:
    """The NumPy type of a scalar, or of a vector's elements."""
    if isinstance(t, ir.VectorType):
        t = ir.VectorType(t).element_type
    return _DTYPES[str(t)]


def shape_of(t: ir.Type) -> tuple[int, ...]:
    """A vector's shape; () for a scalar."""
    return tuple(ir.VectorType(t).shape) if isinstance(t, ir.VectorType) else ()


def poison(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """What is in memory that nobody has written: values that show in any result."""
    is_float = dtype == BF16 or np.issubdtype(dtype, np.floating)
    return np.full(shape, np.nan if is_float else -77, dtype)


def _value(*names: str) -> Callable[[Callable], Callable]:
    def enter(f: Callable) -> Callable:
        for name in names:
            assert name not in VALUES
            VALUES[name] = f
        return f

    return enter


def _unsigned(x: Any) -> Any:
    x = np.asarray(x)
    return x.view(_UNSIGNED[x.dtype.itemsize])


def _wide(f: Callable[..., Any]) -> Callable[..., Any]:
    """Computes bf16 as f32."""

    def apply(*args: Any) -> Any:
        if np.asarray(args[0]).dtype == BF16:
            return f(*(np.asarray(a).astype(np.float32) for a in args))
        return f(*args)

    return apply


def _quotient(a: Any, b: Any) -> Any:
    """Division of integers that rounds to zero; by zero: unspecified."""
    a, b = np.broadcast_arrays(np.asarray(a, np.int64), np.asarray(b, np.int64))
    q = np.abs(a) // np.where(b == 0, 1, np.abs(b))
    return np.where(b == 0, -1, np.where((a < 0) ^ (b < 0), -q, q))


def _remainder(a: Any, b: Any) -> Any:
    wide = np.asarray(a, np.int64), np.asarray(b, np.int64)
    return wide[0] - wide[1] * _quotient(*wide)


def _natural(f: Callable[..., Any]) -> Callable[..., Any]:
    """Of integers as unsigned ones."""
    return lambda *args: f(*(_unsigned(a).astype(np.int64) for a in args))


def _shift(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A shift by as many bits as there are, or more, is poison."""

    def apply(a: Any, b: Any) -> Any:
        bits = 8 * np.asarray(a).dtype.itemsize
        by = _unsigned(b).astype(np.int64)
        return np.where(by >= bits, -77, f(a, np.minimum(by, bits - 1)))

    return apply


def _leading_zeros(x: Any) -> Any:
    bits = 8 * np.asarray(x).dtype.itemsize
    natural = _unsigned(x).astype(np.float64)
    return bits - np.where(
        natural == 0, 0, np.floor(np.log2(np.maximum(natural, 1))) + 1
    )


_erf = np.vectorize(math.erf, otypes=[np.float64])
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.divsi": _quotient,
    "arith.remsi": _remainder,
    "arith.divui": _natural(_quotient),
    "arith.remui": _natural(_remainder),
    "arith.ceildivsi": lambda a, b: -(-np.asarray(a, np.int64) // b),
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": _shift(lambda a, b: np.asarray(a, np.int64) << b),
    "arith.shrsi": _shift(lambda a, b: np.asarray(a, np.int64) >> b),
    "arith.shrui": _shift(lambda a, b: _unsigned(a).astype(np.int64) >> b),
    "arith.minsi": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.minui": _natural(np.minimum),
    "arith.maxui": _natural(np.maximum),
    "math.absi": np.abs,
    "math.ctpop": lambda x: np.bitwise_count(_unsigned(x)),
    "math.ctlz": _leading_zeros,
    "arith.addf": _wide(np.add),
    "arith.subf": _wide(np.subtract),
    "arith.mulf": _wide(np.multiply),
    "arith.divf": _wide(np.divide),
    "arith.remf": _wide(np.fmod),
    "arith.negf": _wide(np.negative),
    "arith.maximumf": _wide(np.maximum),
    "arith.minimumf": _wide(np.minimum),
    "math.absf": _wide(np.abs),
    "math.ceil": _wide(np.ceil),
    "math.floor": _wide(np.floor),
    "math.trunc": _wide(np.trunc),
    "math.round": _wide(lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x)),
    "math.roundeven": _wide(np.rint),
    "math.sqrt": _wide(np.sqrt),
    "math.rsqrt": _wide(lambda x: 1 / np.sqrt(x)),
    "math.cbrt": _wide(np.cbrt),
    "math.exp": _wide(np.exp),
    "math.expm1": _wide(np.expm1),
    "math.log": _wide(np.log),
    "math.log1p": _wide(np.log1p),
    "math.log2": _wide(np.log2),
    "math.sin": _wide(np.sin),
    "math.cos": _wide(np.cos),
    "math.tan": _wide(np.tan),
    "math.tanh": _wide(np.tanh),
    "math.erf": _wide(_erf),
    "math.powf": _wide(np.power),
    "math.atan2": _wide(np.arctan2),
    "math.copysign": _wide(np.copysign),
}


def _elementwise(f: Callable[..., Any]) -> Callable[[Any, list[Any]], list[Any]]:
    def apply(op: Any, args: list[Any]) -> list[Any]:
        with np.errstate(all="ignore"):
            made = np.asarray(f(*args))
        return [made.astype(dtype_of(op.results[0].type))]

    return apply


VALUES.update((name, _elementwise(f)) for name, f in _ELEMENTWISE.items())


# --- constants, comparisons, conversions ----------------------------------------------


@_value("arith.constant")
def _constant(op: Any, args: list[Any]) -> list[Any]:
    t, value = op.results[0].type, op.attributes["value"]
    if not isinstance(t, ir.VectorType):
        return [_number(value, dtype_of(t))]
    dense = ir.DenseElementsAttr(value)
    if dense.is_splat:
        return [np.full(shape_of(t), _number(dense.get_splat_value(), dtype_of(t)))]
    return [np.array(dense).astype(dtype_of(t)).reshape(shape_of(t))]


def _number(attribute: Any, dtype: np.dtype) -> Any:
    # An attribute of i1 is -1 or a bool, one of other integers may be unsigned.
    value = attribute.value
    if dtype.kind == "b":
        return np.asarray(bool(value))
    if np.issubdtype(dtype, np.integer):
        bits = 8 * dtype.itemsize
        value = (int(value) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
    return np.asarray(value).astype(dtype)


_INTEGER_TESTS = ["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"]
_FLOAT_TESTS = [
    "false",
    "oeq",
    "ogt",
    "oge",
    "olt",
    "ole",
    "one",
    "ord",
    "ueq",
    "ugt",
    "uge",
    "ult",
    "ule",
    "une",
    "uno",
    "true",
]
_TESTS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@_value("arith.cmpi")
def _cmpi(op: Any, args: list[Any]) -> list[Any]:
    name = _INTEGER_TESTS[ir.IntegerAttr(op.attributes["predicate"]).value]
    if name.startswith("u") and np.asarray(args[0]).dtype != bool:
        args = [_unsigned(a) for a in args]
    return [_TESTS[name.removeprefix("u").removeprefix("s")](*args)]


@_value("arith.cmpf")
def _cmpf(op: Any, args: list[Any]) -> list[Any]:
    name = _FLOAT_TESTS[ir.IntegerAttr(op.attributes["predicate"]).value]
    a, b = (np.asarray(x).astype(np.float32) for x in args)
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("ord", "uno"):
        return [unordered if name == "uno" else ~unordered]
    made = _TESTS[name[1:]](a, b)
    return [made | unordered if name[0] == "u" else made & ~unordered]


@_value("arith.select")
def _select(op: Any, args: list[Any]) -> list[Any]:
    return [np.where(*args).astype(np.asarray(args[1]).dtype)]


@_value("arith.index_cast", "arith.extsi", "arith.trunci", "arith.extf", "arith.truncf")
def _converted(op: Any, args: list[Any]) -> list[Any]:
    dtype = dtype_of(op.results[0].type)
    if op.operation.name == "arith.trunci" and dtype.kind == "b":
        return [np.asarray(args[0]) % 2 == 1]
    if np.asarray(args[0]).dtype == bool:
        return [-np.asarray(args[0]).astype(dtype)]
    return [np.asarray(args[0]).astype(dtype)]


@_value("arith.extui", "arith.index_castui", "arith.uitofp")
def _unsigned_converted(op: Any, args: list[Any]) -> list[Any]:
    x = np.asarray(args[0])
    x = x if x.dtype == bool else _unsigned(x)
    return [x.astype(dtype_of(op.results[0].type))]


@_value("arith.sitofp")
def _sitofp(op: Any, args: list[Any]) -> list[Any]:
    x = np.asarray(args[0])
    x = -x.astype(np.int32) if x.dtype == bool else x
    return [x.astype(np.float32).astype(dtype_of(op.results[0].type))]


@_value("arith.fptosi", "arith.fptoui")
def _to_integer(op: Any, args: list[Any]) -> list[Any]:
    dtype = dtype_of(op.results[0].type)
    x = np.trunc(np.asarray(args[0]).astype(np.float64))
    info = np.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    if op.operation.name == "arith.fptoui":
        low, high = 0, 2 * high + 1
    # Out of range is undefined in MLIR: what shows in any result.
    outside = ~((x >= low) & (x <= high))
    whole = np.where(outside, 0, x).astype(np.int64)
    return [np.where(outside, -77, whole).astype(dtype)]


@_value("arith.bitcast", "tpu.bitcast", "vector.bitcast")
def _bitcast(op: Any, args: list[Any]) -> list[Any]:
    t = op.results[0].type
    x = np.ascontiguousarray(args[0])
    return [x.reshape(-1).view(dtype_of(t)).reshape(shape_of(t))]


# --- lanes of a vector ----------------------------------------------------------------


@_value("vector.broadcast")
def _broadcast(op: Any, args: list[Any]) -> list[Any]:
    t = op.results[0].type
    return [np.broadcast_to(np.asarray(args[0], dtype_of(t)), shape_of(t)).copy()]


@_value("vector.shape_cast")
def _shape_cast(op: Any, args: list[Any]) -> list[Any]:
    return [args[0].reshape(shape_of(op.results[0].type))]


@_value("vector.extract")
def _extract(op: Any, args: list[Any]) -> list[Any]:
    at, dynamic = list(ir.DenseI64ArrayAttr(op.attributes["static_position"])), args[1:]
    where = tuple(int(dynamic.pop(0)) if i < -(2**62) else i for i in at)
    return [args[0][where]]


@_value("vector.insert")
def _insert(op: Any, args: list[Any]) -> list[Any]:
    value, into, *dynamic = args
    at = ir.DenseI64ArrayAttr(op.attributes["static_position"])
    where = tuple(int(dynamic.pop(0)) if i < -(2**62) else i for i in at)
    made = into.copy()
    made[where] = value
    return [made]


@_value("vector.shuffle")
def _shuffle(op: Any, args: list[Any]) -> list[Any]:
    return [np.concatenate(args)[list(ir.DenseI64ArrayAttr(op.attributes["mask"]))]]


@_value("vector.extract_strided_slice")
def _strided_slice(op: Any, args: list[Any]) -> list[Any]:
    starts, sizes, strides = (
        [ir.IntegerAttr(i).value for i in ir.ArrayAttr(op.attributes[name])]
        for name in ("offsets", "sizes", "strides")
    )
    ranges = zip(starts, sizes, strides, strict=True)
    return [args[0][tuple(slice(s, s + n * k, k) for s, n, k in ranges)]]


@_value("tpu.iota")
def _iota(op: Any, args: list[Any]) -> list[Any]:
    return [np.arange(shape_of(op.results[0].type)[0], dtype=np.int32)]


@_value("tpu.assume_multiple")
def _assume_multiple(op: Any, args: list[Any]) -> list[Any]:
    multiple = ir.IntegerAttr(op.attributes["multiple"]).value
    assert int(args[0]) % multiple == 0, f"{args[0]} is not a multiple of {multiple}"
    return args


@_value("tpu.dynamic_gather")
def _dynamic_gather(op: Any, args: list[Any]) -> list[Any]:
    source, indices = args
    # Only the low bits of an index count; an index outside is not to be relied on.
    assert indices.min() >= 0 and indices.max() < len(source), "an index is outside"
    return [source[indices]]


@_value("tpu.dynamic_rotate")
def _dynamic_rotate(op: Any, args: list[Any]) -> list[Any]:
    return [np.roll(args[0], int(args[1]))]


@_value("tpu.pack_subelements")
def _pack(op: Any, args: list[Any]) -> list[Any]:
    dtype = dtype_of(op.results[0].type)
    narrow = [_narrow(a, dtype) for a in args]
    if "interleaved" in str(op.attributes["pack_format"]):
        return [np.stack(narrow, -1).reshape(-1)]
    return [np.concatenate(narrow)]


def _flag(op: Any, name: str) -> bool:
    return name in op.attributes and ir.BoolAttr(op.attributes[name]).value


def _narrow(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x.astype(dtype)


@_value("tpu.unpack_subelements")
def _unpack(op: Any, args: list[Any]) -> list[Any]:
    t = op.results[0].type
    index, n = ir.IntegerAttr(op.attributes["index"]).value, shape_of(t)[0]
    parts = len(args[0]) // n
    x = args[0]
    if "interleaved" in str(op.attributes["pack_format"]):
        part = x.reshape(n, parts)[:, index]
    else:
        part = x.reshape(parts, n)[index]
    if _flag(op, "unsigned_integers"):
        part = _unsigned(part)
    return [part.astype(dtype_of(t))]


# --- across lanes ---------------------------------------------------------------------


@_value("tpu.scan")
def _scan(op: Any, args: list[Any]) -> list[Any]:
    """Of the lanes that the mask has; integers are compared unsigned."""
    x, mask = (*args, None)[:2]
    kind = str(op.attributes["kind"])
    if x.dtype == bool:
        return [np.cumsum(x, dtype=np.int32)]
    mask = np.ones(len(x), bool) if mask is None else mask
    made, total = poison(x.shape, x.dtype), None
    comparable = x if x.dtype == np.float32 else _unsigned(x)
    for i in range(len(x)):
        if mask[i]:
            if total is None:
                total = comparable[i]
            elif "sum" in kind:
                total = np.add(total, comparable[i])
            else:
                total = (np.maximum if "max" in kind else np.minimum)(
                    total, comparable[i]
                )
        if total is not None:
            made[i] = np.asarray(total).view(x.dtype)
    return [made]


@_value("tpu.sort")
def _sort(op: Any, args: list[Any]) -> list[Any]:
    """The lanes that the mask has come first, in the order of their unsigned keys."""
    keys, values, mask = (*args, None)[:3]
    mask = np.ones(len(keys), bool) if mask is None else mask
    comparable = keys if keys.dtype == np.float32 else _unsigned(keys)
    descending = _flag(op, "descending")
    valid = [i for i in range(len(keys)) if mask[i]]
    valid.sort(key=lambda i: comparable[i], reverse=descending)
    order = [*valid, *(i for i in range(len(keys)) if not mask[i])]
    # What is in the lanes behind them is not known.
    found = [keys[order], values[order]]
    for x in found:
        x[len(valid) :] = poison((len(x) - len(valid),), x.dtype)
    return [mask[order], *found]


@_value("tpu.scan_count")
def _scan_count(op: Any, args: list[Any]) -> list[Any]:
    """For each lane how often its value has occurred; whether it is its last one."""
    mask, values = args
    counts, last = np.zeros(len(values), np.int32), np.zeros(len(values), bool)
    bits = values.view(np.int32)
    for i, value in enumerate(bits):
        counts[i] = np.sum(mask[: i + 1] & (bits[: i + 1] == value))
        last[i] = mask[i] and not np.any(mask[i + 1 :] & (bits[i + 1 :] == value))
    return [last, np.where(mask, counts, -77).astype(np.int32)]


@_value("tpu.all_reduce")
def _all_reduce(op: Any, args: list[Any]) -> list[Any]:
    (mask,) = args
    if "find_first_set" in str(op.attributes["kind"]):
        value = int(np.argmax(mask)) if mask.any() else len(mask)
    else:
        value = int(mask.sum())
    return [np.full(shape_of(op.results[0].type), value, np.int32)]
