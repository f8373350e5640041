# SPDX-License-Identifier: Apache-2.0
"""Accesses to the memory of all devices at once, through multimem addresses.

PTX ISA, multimem.ld_reduce, multimem.st, multimem.red: only these instructions access
such addresses.
"""

from __future__ import annotations

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu import errors
from pallas_gpu.emitters import addressing
from pallas_gpu.emitters.elements import dtypes, predication

_WORD_BITS = 32
# The element types of floats in a word.
_IN_WORDS = {
    "float32": "f32",
    "float16": "f16x2",
    "bfloat16": "bf16x2",
    "float8_e5m2": "e5m2x4",
    "float8_e4m3fn": "e4m3x4",
}


def store(value: ir.Value, pointer: ir.Value, condition: ir.Value | None) -> None:
    """Stores a vector of 4, 8 or 16 bytes to the memory of all devices.

    PTX: `multimem.st.relaxed.sys.global{.v2,.v4}.f32`. Since: sm_90.
    """
    words = _words(value)
    count = len(words)
    sources = predication.braced([f"${1 + i}" for i in range(count)])
    guarded = [] if condition is None else [condition]
    guard = f"@${count + 1} " if guarded else ""
    # Vectors are of floats alone; the bits are the same.
    predication.assembly(
        [],
        [pointer, *words, *guarded],
        f"{guard}multimem.st.relaxed.sys.global{_vector(count)}.f32 [$0], {sources};",
        ["l", *["r"] * count, *["b"] * len(guarded)],
        "",
    )


def load_reduce(
    type_: ir.VectorType, pointer: ir.Value, reduction: str, dtype: np.dtype
) -> ir.Value:
    """Loads a vector of 4, 8 or 16 bytes, reduced over all devices.

    PTX: `multimem.ld_reduce.relaxed.sys.global`, one of a vector of floats, or one for
    each integer. Since: sm_90, of float8 sm_100a.

    Args:
      type_: of the vector.
      pointer: multimem address, aligned to the vector's size.
      reduction: "add", "min", "max", "and", "or" or "xor".
      dtype: of the elements.
    """
    bits = _bits_of(type_)
    if dtype.kind in "iu":
        step = dtype.itemsize
        loaded = [
            _integer(addressing.offset_pointer(pointer, i * step), reduction, dtype)
            for i in range(bits // (8 * step))
        ]
    else:
        count = bits // _WORD_BITS
        i32 = ir.IntegerType.get_signless(32)
        made = predication.braced([f"${i}" for i in range(count)])
        loaded = predication.assembly(
            [i32] * count,
            [pointer],
            f"multimem.ld_reduce.relaxed.sys.global.{reduction}{_vector(count)}."
            f"{_IN_WORDS[dtype.name]} {made}, [${count}];",
            ["l"],
            "r",
        )
    packed = dtypes.pack(loaded)
    return packed if packed.type == type_ else llvm.bitcast(type_, packed)


def _integer(pointer: ir.Value, reduction: str, dtype: np.dtype) -> ir.Value:
    bits = 8 * dtype.itemsize
    kind = "b" if reduction in ("and", "or", "xor") else "us"[dtype.kind == "i"]
    if (reduction, kind, bits) == ("add", "s", 64):
        kind = "u"  # There is no sum of signed ones; it has the same bits.
    (value,) = predication.assembly(
        [ir.IntegerType.get_signless(bits)],
        [pointer],
        f"multimem.ld_reduce.relaxed.sys.global.{reduction}.{kind}{bits} $0, [$1];",
        ["l"],
        "r" if bits == 32 else "l",
    )
    return value


def add(pointer: ir.Value, inc: ir.Value, order: str) -> None:
    """Adds to a counter of all devices. PTX: `multimem.red.{release,relaxed}.sys`."""
    text = f"multimem.red.{order}.sys.global.add.u32 [$0], $1;"
    predication.assembly([], [pointer, inc], text, ["l", "r"], "")


def fence_alias() -> None:
    """Orders accesses through multimem addresses with those through others.

    PTX: `fence.proxy.alias`. Since: sm_90.
    """
    predication.assembly([], [], "fence.proxy.alias;", [], "")


def _bits_of(type_: ir.VectorType) -> int:
    bits = type_.element_type.width * type_.shape[0]
    if bits not in (32, 64, 128):
        raise errors.LayoutError(
            "adjacent elements of a register layout do not fill words",
            expected="accesses of 4, 8 or 16 bytes",
            got=f"{bits} bits",
            hint="choose a layout with more adjacent elements, such as "
            "plgpu.Layout.WG_STRIDED(shape, vec_size=n)",
        )
    return bits


def _words(value: ir.Value) -> list[ir.Value]:
    _bits_of(value.type)
    whole = dtypes.bitcast(value, np.dtype("int32"))
    return [dtypes.extract(whole, i) for i in range(dtypes.length(whole) or 1)]


def _vector(count: int) -> str:
    return "" if count == 1 else f".v{count}"
