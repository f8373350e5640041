# SPDX-License-Identifier: Apache-2.0
"""Loads and stores under a predicate: no branch, and no access where it is false.

PTX ISA, section 9.3 "Predicated Execution". LLVM has no such loads and stores: it turns
a condition into a branch around each access.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu import errors
from pallas_gpu.emitters.elements import arith, dtypes

# The constraint of inline assembly for a register of some bits; none has 8.
_CONSTRAINTS = {8: "h", 16: "h", 32: "r", 64: "l"}


def load(
    type_: ir.Type, pointer: ir.Value, condition: ir.Value | None, other: ir.Value
) -> ir.Value:
    """A vector from memory; `other` without an access where an i1 is false.

    PTX: `@p ld.global`, `@p ld.shared`, of a register that has `other` before.

    Args:
      type_: the vector's type, of 1, 2, 4, 8 or 16 bytes.
      pointer: aligned to its size; it may be any address where the i1 is false.
      condition: i1, None is true.
      other: of the vector's type.
    """
    if condition is None:
        return llvm.load(type_, pointer)
    space, register, address = _address(pointer)
    word = _word_bits(type_)
    held = _words(other, word)
    count = len(held)
    results = [f"${i}" for i in range(count)]
    loaded = assembly(
        [held[0].type] * count,
        [address, condition, *held],
        f"@${count + 1} ld.{space}{_suffix(count, word)} {braced(results)}, "
        f"[${count}];",
        [register, "b", *map(str, range(count))],
        _CONSTRAINTS[word],
    )
    if word == 8:
        loaded = [arith.trunci(ir.IntegerType.get_signless(8), loaded[0])]
    return _vector(loaded, type_)


def store(value: ir.Value, pointer: ir.Value, condition: ir.Value | None) -> None:
    """Stores a vector where an i1 is true; None is true.

    PTX: `@p st.global`, `@p st.shared`.
    """
    if condition is None:
        llvm.store(value, pointer)
        return
    space, register, address = _address(pointer)
    word = _word_bits(value.type)
    held = _words(value, word)
    sources = [f"${2 + i}" for i in range(len(held))]
    assembly(
        [],
        [address, condition, *held],
        f"@$1 st.{space}{_suffix(len(held), word)} [$0], {braced(sources)};",
        [register, "b", *[_CONSTRAINTS[word]] * len(held)],
        "",
    )


def _address(pointer: ir.Value) -> tuple[str, str, ir.Value]:
    """State space, constraint and register of a pointer."""
    match str(pointer.type):
        case "!llvm.ptr<3>":
            i32 = ir.IntegerType.get_signless(32)
            return "shared::cta", "r", llvm.ptrtoint(i32, pointer)
        case "!llvm.ptr<7>":
            i32 = ir.IntegerType.get_signless(32)
            return "shared::cluster", "r", llvm.ptrtoint(i32, pointer)
        case "!llvm.ptr":
            window = ir.Type.parse("!llvm.ptr<1>")
            return "global", "l", llvm.addrspacecast(window, pointer)
        case "!llvm.ptr<1>":
            return "global", "l", pointer
        case other:
            raise errors.InternalError(f"a predicated access through {other}")


def assembly(
    results: Sequence[ir.Type],
    operands: Sequence[ir.Value],
    text: str,
    inputs: Sequence[str],
    output: str,
) -> list[ir.Value]:
    """One instruction that is ordered with all other accesses."""
    type_ = None
    if len(results) == 1:
        (type_,) = results
    elif results:
        type_ = ir.Type.parse(f"!llvm.struct<({', '.join(map(str, results))})>")
    outputs = [f"={output}"] * len(results)
    made = llvm.inline_asm(
        type_,
        list(operands),
        text,
        ",".join([*outputs, *inputs, "~{memory}"]),
        has_side_effects=True,
    )
    if len(results) < 2:
        return [made] if results else []
    return [llvm.extractvalue(t, made, [i]) for i, t in enumerate(results)]


def _word_bits(type_: ir.VectorType) -> int:
    """The width of the registers that a vector is transferred in."""
    item = type_.element_type.width
    return max(item, min(32, item * type_.shape[0]))


def _words(value: ir.Value, word: int) -> list[ir.Value]:
    whole = dtypes.bitcast(value, np.dtype(f"int{word}"))
    words = [dtypes.extract(whole, i) for i in range(dtypes.length(whole) or 1)]
    if word == 8:
        return [arith.extui(ir.IntegerType.get_signless(16), x) for x in words]
    return words


def _vector(words: Sequence[ir.Value], type_: ir.VectorType) -> ir.Value:
    packed = dtypes.pack(words)
    return packed if packed.type == type_ else llvm.bitcast(type_, packed)


def _suffix(count: int, word: int) -> str:
    return f".b{word}" if count == 1 else f".v{count}.b{word}"


def braced(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"
