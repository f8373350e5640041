# SPDX-License-Identifier: Apache-2.0
"""Combines what all lanes of a warp hold. PTX: `redux.sync`, `vote.sync`.

On an H200 a `redux` takes 47 cycles, five shuffles and additions 150; an SM starts one
in 2 cycles, those in 5. A maximum of float32 by the order of integers takes 69 and 2.7.
"""

from __future__ import annotations

import functools

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from pallas_gpu.emitters import module
from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.moves import shuffle

_Kind = nvvm.ReductionKind
VOTES = {"and": nvvm.VoteSyncKind.all, "or": nvvm.VoteSyncKind.any}
_BITWISE = {"and": _Kind.AND, "or": _Kind.OR, "xor": _Kind.XOR}
_WIDE = {"signed": dtypes.I32, "unsigned": dtypes.U32, "float": dtypes.F32}
_KINDS = {
    ("add", dtypes.I32): _Kind.ADD,
    ("add", dtypes.U32): _Kind.ADD,
    ("max", dtypes.I32): _Kind.MAX,
    ("min", dtypes.I32): _Kind.MIN,
    ("max", dtypes.U32): _Kind.UMAX,
    ("min", dtypes.U32): _Kind.UMIN,
    ("max", dtypes.F32): _Kind.FMAX,
    ("min", dtypes.F32): _Kind.FMIN,
}
# PTX ISA, redux.sync: .f32 is for sm_100a and its family.
_FLOATS_MAJOR = 10
# Floats without a sign are in the order of their bits, NaN last.
_MAGNITUDE = 0x7FFFFFFF
# -inf, if the bits of floats with a sign are reversed, and what follows +inf.
_LEAST, _BEYOND = 0x807FFFFF - (1 << 32), 0x7F800001


def combines(kind: str, dtype: np.dtype, length: int) -> bool:
    """Whether the instructions have the operation on vectors of the type.

    Pairs of 16-bit floats share the words of shuffles; in the order of integers each of
    them takes a `redux` and its conversions, which are more instructions.
    """
    if kind in _BITWISE:
        return True
    bits, wide = dtypes.bits(dtype), _WIDE.get(dtypes.kind(dtype))
    if wide == dtypes.F32 and bits < 32 and length > 1 and not _has_floats():
        return False
    return (kind, wide) in _KINDS and bits <= 32


def _has_floats() -> bool:
    return module.current().spec.arch[0] == _FLOATS_MAJOR


def voted(kind: str, value: ir.Value, dtype: np.dtype) -> ir.Value:
    """As `combined`, for one element that is 0 or 1 and an operation of `VOTES`.

    PTX: `vote.sync`. Since: sm_70. All threads of the warp issue it.
    """
    predicate = dtypes.extract(convert_value(value, dtype, dtypes.BOOL), 0)
    result = nvvm.vote_sync(
        shuffle.full_mask(), predicate, VOTES[kind], results=[predicate.type]
    )
    return convert_value(dtypes.splat(result, 1), dtypes.BOOL, dtype)


def combined(kind: str, value: ir.Value, dtype: np.dtype) -> ir.Value:
    """The elements combined over the lanes of the warp, the same in all of them.

    PTX: `redux.sync`. Since: sm_80. All threads of the warp issue it.

    Args:
      kind: an operation that `combines` has; `max` and `min` propagate NaN.
      value: a vector.
      dtype: of its elements.
    """
    if kind in _BITWISE:
        return shuffle.by_words(value, dtype, functools.partial(_redux, _BITWISE[kind]))
    wide = _WIDE[dtypes.kind(dtype)]
    emit = functools.partial(_redux, _KINDS[kind, wide])
    value = convert_value(value, dtype, wide)
    if wide == dtypes.F32 and not _has_floats():
        value = _in_order_of_integers(kind, value)
    else:
        value = dtypes.per_lane(emit, value)
    return convert_value(value, wide, dtype)


def _in_order_of_integers(kind: str, value: ir.Value) -> ir.Value:
    """The largest or the least float32, or a NaN.

    The bits of floats with a sign are reversed: as signed integers they are then in the
    order -NaN, -inf to +inf, NaN. Counted from -inf, as unsigned integers, any NaN is
    beyond +inf; counted from what follows +inf, any is below -inf.
    """
    unsigned, start = (_Kind.UMAX, _LEAST) if kind == "max" else (_Kind.UMIN, _BEYOND)
    bits = dtypes.bitcast(value, dtypes.I32)
    first = dtypes.constant(start, dtypes.I32, bits)
    key = arith.subi(_reversed(bits), first)
    key = dtypes.per_lane(functools.partial(_redux, unsigned), key)
    return dtypes.bitcast(_reversed(arith.addi(key, first)), dtypes.F32)


def _reversed(bits: ir.Value) -> ir.Value:
    """Reverses the order of numbers with a sign; its own inverse."""
    shift = dtypes.constant(31, dtypes.I32, bits)
    magnitude = dtypes.constant(_MAGNITUDE, dtypes.I32, bits)
    return arith.xori(bits, arith.andi(arith.shrsi(bits, shift), magnitude))


def _redux(kind: nvvm.ReductionKind, word: ir.Value) -> ir.Value:
    nan = kind in (_Kind.FMAX, _Kind.FMIN)
    return nvvm.redux_sync(word, kind, shuffle.full_mask(), nan=nan or None)
