# SPDX-License-Identifier: Apache-2.0
"""mma.sync: matrix products of warps, from registers to registers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu import errors
from pallas_gpu.emitters.elements import dtypes, packed, words
from pallas_gpu.emitters.registers import RegisterArray
from pallas_gpu.layouts.registers.descriptions import TiledLayout
from pallas_gpu.layouts.registers.fragments import MmaShape
from pallas_gpu.layouts.registers.placement import describe, place

# PTX ISA, mma: the names of element types.
_NAMES: dict[np.dtype, str] = {
    dtypes.F16: "f16",
    dtypes.BF16: "bf16",
    dtypes.F32: "tf32",
    dtypes.F8_E4M3: "e4m3",
    dtypes.F8_E5M2: "e5m2",
    dtypes.I8: "s8",
    dtypes.U8: "u8",
    dtypes.I4: "s4",
    dtypes.U4: "u4",
}
_ACCUMULATORS = {dtypes.F32: "f32", dtypes.I32: "s32"}
# Registers of an instruction: of A, B and the accumulator.
_COUNTS = (4, 2, 4)


def mma(acc: RegisterArray, a: RegisterArray, b: RegisterArray) -> RegisterArray:
    """Returns `acc + a @ b`.

    PTX: `mma.sync.aligned.m16n8kK.row.col`. Since: sm_80 (8-bit floats: sm_89). All
    threads of the warpgroup issue it.

    Args:
      acc: (M, N) in MMA_ACC; float32 or int32.
      a: (M, K) in MMA_LHS of the same number of warps along the rows.
      b: (K, N) in MMA_RHS.

    Raises:
      LayoutError: an operand is in another layout.
    """
    shape = _shape_of(acc, a, b)
    m, n, k = shape.tile
    half = k // 2
    # PTX ISA, "Matrix Fragments for mma.m16n8k16": the registers of an instruction, in
    # order, move by 8 rows first, then by half of K.
    left = _fragments(a, lambda i, j: ((i // m, j // k), (j % k // half, i % m)))
    right = _fragments(b, lambda i, j: ((i // k, j // n), (i % k // half, 0)))
    sums = _fragments(acc, lambda i, j: ((i // m, j // n), (i % m, 0)))
    text = _instruction(k, acc.dtype, a.dtype, b.dtype)
    results: dict[tuple[int, int], list[ir.Value]] = {}
    for (row, column), given in sums.items():
        total = [word for _, word in given]
        for step in range(shape.k // k):
            operands = [
                *(_bits(word) for _, word in left[row, step]),
                *(_bits(word) for _, word in right[step, column]),
            ]
            total = _emit(text, total, operands)
        results[row, column] = total
    return acc.with_values(_joined(acc, sums, results))


def _shape_of(acc: RegisterArray, a: RegisterArray, b: RegisterArray) -> MmaShape:
    """Returns the division among the warps in whose layouts the operands are."""
    bits = dtypes.stored_bits(a.dtype)
    (m, n), k = acc.shape, b.shape[0]
    for shape in MmaShape.divisions(m, n, k, bits):
        wanted = (shape.acc, acc), (shape.lhs, a), (shape.rhs, b)
        if shape == shape.padded and all(_is_in(layout, x) for layout, x in wanted):
            return shape
    raise errors.LayoutError(
        "The operands of mma are not in the layouts of its fragments",
        expected="acc in Layout.MMA_ACC(dtype, w), a in Layout.MMA_LHS(dtype, w) and "
        "b in Layout.MMA_RHS(dtype, w)",
        got=", ".join(describe(x.layout) for x in (acc, a, b)),
        hint="layout_cast them; w is the number of warps along the rows",
    )


def _is_in(layout: TiledLayout, x: RegisterArray) -> bool:
    try:
        return x.layout == place(layout, x.shape)
    except errors.LayoutError:
        return False


_Pieces = dict[tuple[int, int], list[tuple[tuple[int, int], ir.Value]]]


def _fragments(x: RegisterArray, locate) -> _Pieces:
    """Returns the words of each instruction, with the register and word of each.

    Args:
      locate: maps the coordinates of a register's first element to the instruction's
        tile, and to the register's order in it.
    """
    ordered: dict[tuple[int, int], list] = {}
    origins = x.layout.origins  # type: ignore[union-attr]
    registers: Sequence[ir.Value] = x.values
    if dtypes.is_packed(x.dtype):
        # Elements of 4 bits, which have a byte each elsewhere, lie as in memory.
        registers = [packed.pack(register, x.dtype) for register in registers]
    for i, (origin, held) in enumerate(
        zip(origins, words.to_words(registers), strict=True)
    ):
        tile, order = locate(*origin)
        pieces = [((i, j), word) for j, word in enumerate(held)]
        ordered.setdefault(tile, []).append((order, pieces))
    return {
        tile: [piece for _, pieces in sorted(found, key=_first) for piece in pieces]
        for tile, found in ordered.items()
    }


def _first(item):
    return item[0]


def _joined(
    acc: RegisterArray,
    sums: _Pieces,
    results: dict[tuple[int, int], list[ir.Value]],
) -> list[ir.Value]:
    """Returns registers like those of the accumulator, with the results' words."""
    placed = {
        place: word
        for tile, total in results.items()
        for (place, _), word in zip(sums[tile], total, strict=True)
    }
    return words.from_words([placed[at] for at in sorted(placed)], acc.values)


def _instruction(k: int, acc: np.dtype, a: np.dtype, b: np.dtype) -> str:
    kind = _ACCUMULATORS[acc]
    name = f"mma.sync.aligned.m16n8k{k}.row.col.{kind}.{_NAMES[a]}.{_NAMES[b]}.{kind}"
    groups, number = [], 0
    for count in (4, *_COUNTS[:2]):
        groups.append([f"${number + i}" for i in range(count)])
        number += count
    groups.append([f"${number + i}" for i in range(_COUNTS[2])])
    return f"{name} {', '.join('{' + ', '.join(g) + '}' for g in groups)};"


def _emit(
    text: str, total: Sequence[ir.Value], operands: Sequence[ir.Value]
) -> list[ir.Value]:
    inputs = [*operands, *total]
    kinds = words.constraints(inputs)
    outputs = [f"={kind}" for kind in kinds[len(operands) :]]
    return words.assemble(total, inputs, text, [*outputs, *kinds])


def _bits(word: ir.Value) -> ir.Value:
    """Returns a word as an integer: PTX has no type for tf32."""
    i32 = ir.IntegerType.get_signless(32)
    return word if word.type == i32 else llvm.bitcast(i32, word)
