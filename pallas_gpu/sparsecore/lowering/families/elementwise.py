# SPDX-License-Identifier: Apache-2.0
"""lax's elementwise operations, conversions and bits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from jaxlib.mlir.dialects import arith

from pallas_gpu import _jax, errors
from pallas_gpu.arch.tpu import Feature
from pallas_gpu.sparsecore.emitters import conversions, elementwise
from pallas_gpu.sparsecore.emitters.values import (
    BF16,
    BOOL,
    F32,
    WORD_BYTES,
    Array,
    broadcast,
    constant,
    elements_of,
    known,
    same_value,
)
from pallas_gpu.sparsecore.lowering.state import emits
from pallas_gpu.sparsecore.primitives import packing

# Of an equation's parameters those that emitters take.
_PARAMS = ("y", "rounding_method")
# What scalar units compute of floats (libtpu 0.0.48); the rest needs a register.
SCALAR_FLOATS = frozenset(
    name
    for names in (
        "add add_any sub mul div neg max min abs sign square clamp floor integer_pow",
        "eq ne lt le gt ge is_finite",
        "stop_gradient copy copy_p optimization_barrier",
    )
    for name in names.split()
)


# What libtpu computes of words alone: narrow elements are widened and narrowed.
_OF_FLOAT32 = frozenset(
    ["rem", "sin", "cos", "tan", "atan", "asin", "acos", "atan2", "round"]
)
_OF_WORDS = frozenset(
    [
        *("div", "rem", "shift_left", "shift_right_logical", "shift_right_arithmetic"),
        *("population_count", "clz"),
    ]
)
# No instruction compares narrow elements without a sign.
_ORDERS = frozenset(["lt", "le", "gt", "ge"])
# These see the bits of signed integers, too.
_OF_BITS = frozenset(["shift_right_logical", "population_count", "clz"])


def _emit(name: str, ctx: Any, *args: Array) -> Array:
    out = ctx.out_aval
    dtype = np.dtype(out.dtype)
    kind = elementwise.kind_of(args[-1].dtype)
    is_narrow = kind != "b" and args[-1].dtype.itemsize < WORD_BYTES
    is_scalar = all(x.is_scalar for x in args)
    if is_scalar:
        _require_scalar(name, ctx, args[-1].dtype)
    wide_only = _OF_FLOAT32 if kind == "f" else _OF_WORDS
    words = name in wide_only or is_scalar or _becomes_shift(name, kind, args, ctx)
    words |= kind == "u" and name in _ORDERS
    if not is_narrow or not words:
        return _emitted(name, ctx, args, dtype)
    lanes = ctx.kernel.target.lanes
    if name in _OF_BITS:
        # Of the same width, without a sign.
        args = tuple(
            x.with_parts(x.parts, np.dtype(f"u{x.dtype.itemsize}")) for x in args
        )
    wide = [conversions.widened(x, lanes) for x in args]
    made = _emitted(name, ctx, wide, dtype if dtype == BOOL else wide[-1].dtype)
    if name == "clz":
        # The zeros in front of the narrow element do not count.
        more = 8 * (WORD_BYTES - dtype.itemsize)
        parts = [arith.subi(x, constant(more, x.type)) for x in made.parts]
        made = made.with_parts(parts)
    return conversions.astype(made, dtype, lanes)


def _becomes_shift(name: str, kind: str, args: Any, ctx: Any) -> bool:
    """Whether LLVM may make a shift of it, which narrow elements do not have.

    It does of a loop that adds one vector again and again to one of 16 bits.
    """
    if kind == "f" or name not in ("add", "add_any", "mul"):
        return False
    is_twice = name != "mul" and all(map(same_value, args[0].parts, args[-1].parts))
    if is_twice or any(x.is_scalar and known(x.value) is not None for x in args):
        return True
    dtype = ctx.out_aval.dtype
    carried = [op.results[i] for op, *_ in ctx.kernel.path for _, i in op.carries]
    is_sum = name != "mul" and dtype.itemsize == 2
    return is_sum and any(x.shape and x.dtype == dtype for x in carried)


def _require_scalar(name: str, ctx: Any, dtype: np.dtype) -> None:
    """Raises UnsupportedError for scalars that a subcore does not compute with."""
    kind = elementwise.kind_of(dtype)
    # libtpu ends its process at a division on a scalar subcore.
    unknown = name not in SCALAR_FLOATS or name == "div"
    unknown |= name == "integer_pow" and ctx.eqn.params["y"] < 0
    if kind == "f" and unknown and not ctx.kernel.is_vector:
        raise errors.UnsupportedError(
            f"{name} of floats on a scalar subcore",
            expected="add, sub, mul, max, min, floor, abs and comparisons of floats",
            got=name,
            hint="compute it in a kernel with a plsc.VectorSubcoreMesh",
        )


def _emitted(name: str, ctx: Any, args: Any, dtype: np.dtype) -> Array:
    shape = tuple(ctx.out_aval.shape)
    kind = elementwise.kind_of(args[-1].dtype)
    emit: Any = elementwise.ROWS[name][kind]
    params = ctx.eqn.params
    given = {key: params[key] for key in _PARAMS if key in params}
    if given:
        emit = functools.partial(emit, **given)
    if name == "round":
        known = ctx.kernel.target.has(Feature.ROUND_TO_EVEN)
        emit = functools.partial(emit, has_instruction=known)
    if name in ("erf", "erfc") and not ctx.kernel.target.has(Feature.ERF):
        emit = elementwise.WITHOUT_ERF[name]
    same = alike(ctx, args, shape)
    if kind == "b" and name in elementwise.OF_NUMBERS:
        # libtpu combines masks of words alone.
        lanes = ctx.kernel.target.lanes
        numbers = [conversions.narrow_numbers(x, lanes) for x in same]
        if numbers[0] is not None:
            emit = elementwise.OF_NUMBERS[name]
            rows = zip(*(x.parts for x in numbers if x is not None), strict=True)
            made = numbers[0].with_parts([emit(*row) for row in rows])
            return conversions.astype(made, BOOL, lanes).reshaped(shape)
    if same[0].is_scalar and kind == "f" and name not in SCALAR_FLOATS:
        parts = [_in_register(ctx, emit, [x.value for x in same])]
        return Array(shape, dtype, tuple(parts))
    rows = zip(*(x.parts for x in same), strict=True)
    return Array(shape, dtype, tuple(emit(*row) for row in rows))


def _in_register(ctx: Any, emit: Any, scalars: list[Any]) -> Any:
    return elementwise.on_register(emit, ctx.kernel.target.lanes, *scalars)


def alike(ctx: Any, args: Any, shape: tuple[int, ...]) -> list[Array]:
    """Returns operands in registers of the same sizes: scalars in every lane."""
    arrays = [x for x in args if not x.is_scalar]
    if not arrays:
        return [x.reshaped(shape) for x in args]
    numbers = [x for x in arrays if x.dtype != BOOL] or arrays
    elements = min(elements_of(x.parts[0]) for x in numbers)
    return [filled(ctx, x, shape, elements) for x in args]


def filled(ctx: Any, x: Array, shape: tuple[int, ...], elements: int) -> Array:
    """Returns a scalar in registers of a shape, or a mask in registers of a size."""
    if not x.is_scalar:
        if x.dtype == BOOL:
            return conversions.mask_of(x, elements, ctx.kernel.target.lanes)
        return x
    lanes = ctx.kernel.target.lanes
    register = broadcast(x.value, elements if x.dtype == BOOL else lanes)
    if x.dtype.itemsize < WORD_BYTES and x.dtype != BOOL:
        parts = [register] * (elements // lanes)
        register = conversions.packed(parts, x.dtype, "compressed")
    count = int(np.prod(shape)) // elements_of(register)
    return Array(shape, x.dtype, (register,) * count)


def _rule(name: str) -> Any:
    return lambda ctx, *args: _emit(name, ctx, *args)


for _name in elementwise.ROWS:
    try:
        _jax.primitive_by_name(_name)
    except KeyError:
        continue
    emits(_name)(_rule(_name))


@emits("select_n")
def _select(ctx: Any, which: Array, *cases: Array) -> Array:
    shape, dtype = tuple(ctx.out_aval.shape), np.dtype(ctx.out_aval.dtype)
    if not which.is_scalar and BOOL not in (which.dtype, dtype):
        number = np.dtype(f"i{dtype.itemsize}")  # it has as many registers
        which = conversions.astype(which, number, ctx.kernel.target.lanes)
    which, *same = alike(ctx, [which, *cases], shape)
    parts = [
        _chosen(row[0], row[1:], which.dtype)
        for row in zip(which.parts, *(x.parts for x in same), strict=True)
    ]
    return Array(shape, dtype, tuple(parts))


def _chosen(which: Any, cases: Any, dtype: np.dtype) -> Any:
    if dtype == BOOL:
        first, *second = cases
        return arith.select(which, second[0], first) if second else first
    found = cases[-1]
    for i, case in reversed(list(enumerate(cases[:-1]))):
        at_most = arith.cmpi(arith.CmpIPredicate.sle, which, constant(i, which.type))
        found = arith.select(at_most, case, found)
    return found


@emits("convert_element_type")
def _convert(ctx: Any, x: Array) -> Array:
    dtype = np.dtype(ctx.eqn.params["new_dtype"])
    return conversions.astype(x, dtype, ctx.kernel.target.lanes)


@emits("bitcast_convert_type")
def _bitcast(ctx: Any, x: Array) -> Array:
    return conversions.bitcast(x, np.dtype(ctx.out_aval.dtype), ctx.out_aval.shape)


emits(packing.bitcast_p)(lambda ctx, x: [_bitcast(ctx, x)])


@emits("reduce_precision")
def _reduce_precision(ctx: Any, x: Array) -> Array:
    params = ctx.eqn.params
    bits = params["exponent_bits"], params["mantissa_bits"]
    if bits == (8, 7) and x.dtype == F32:
        lanes = ctx.kernel.target.lanes
        narrow = conversions.astype(x, BF16, lanes)
        return conversions.astype(narrow, F32, lanes)
    if bits == (8, 23) and x.dtype == F32:
        return x
    raise ctx.kernel.no_rule(ctx.op)
