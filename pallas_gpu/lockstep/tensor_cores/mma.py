# SPDX-License-Identifier: Apache-2.0
"""mma.sync: each warp multiplies what its lanes hold (PTX ISA, 9.7.14.5).

With e elements in a register, the least significant first, g = lane / 4 and
t = lane % 4: register j of A has row g + 8 (j % 2) and columns
e t + 4 e (j / 2) + x, x = 0 .. e - 1; register j of B has the rows e t + 4 e j + x and
column g; c_i of C and D has row g + 8 (i / 2) and column 2 t + i % 2.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import values
from pallas_gpu.lockstep.assembly import parse
from pallas_gpu.lockstep.engine import LANES
from pallas_gpu.lockstep.program import Program, Step
from pallas_gpu.lockstep.registers import assembles
from pallas_gpu.lockstep.tensor_cores import matrices

# Kinds of A and B, K of the instruction, kind of C and D.
_SHAPES = (
    ({"f16"}, 16, "f32"),
    ({"bf16"}, 16, "f32"),
    ({"tf32"}, 8, "f32"),
    ({"e4m3", "e5m2"}, 32, "f32"),
    ({"s8", "u8"}, 32, "s32"),
    ({"s4", "u4"}, 64, "s32"),
)
_MMA = re.compile(
    r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.(\w+)\.(\w+)\.(\w+)\.(\w+)"
)


def _places(registers: int, each: int, side: str) -> tuple[np.ndarray, np.ndarray]:
    """[lanes, registers * each]: rows and columns of a fragment's elements."""
    lane = np.arange(LANES)[:, None]
    g, t = lane // 4, lane % 4
    j, x = np.divmod(np.arange(registers * each), each)
    if side == "a":
        return g + 8 * (j % 2), each * t + 4 * each * (j // 2) + x
    if side == "b":
        return each * t + 4 * each * j + x, g + 0 * j
    return g + 8 * (j // 2), 2 * t + j % 2


def _matrix(
    strand: Any, registers: list[Any], kind: np.dtype, shape: tuple[int, int], side: str
) -> np.ndarray:
    """[warps, rows, columns]: the matrix that each warp's registers hold."""
    words = [strand.per_lane(values.forced(x)) for x in registers]
    words = [np.ascontiguousarray(w).view(np.uint32).reshape(-1) for w in words]
    held = np.ascontiguousarray(np.stack(words, axis=1))
    each = 32 // matrices.bits(kind)
    if each == 8:
        nibbles = held[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        held = nibbles.astype(np.uint8).reshape(len(held), -1)
        # ml_dtypes reads the low 4 bits of a byte.
    held = held.view(kind)
    held = held.reshape(-1, LANES, held.shape[-1])
    result = np.zeros((held.shape[0], *shape), kind)
    row, column = _places(len(registers), each, side)
    result[:, row, column] = held
    return result


@assembles("mma.sync.")
def _text(program: Program, op: ir.Operation, text: str) -> Step:
    """The step of a text that is one mma.sync."""
    (statement,) = parse(text)
    match = _MMA.fullmatch(statement.opcode)
    if match is None or statement.guard:
        raise PtxError(f"{statement.opcode}: no such instruction")
    k, kind_d, kind_a, kind_b, kind_c = int(match[1]), *match.groups()[1:]
    known = any(
        {kind_a, kind_b} <= kinds and k == size and {kind_d, kind_c} == {total}
        for kinds, size, total in _SHAPES
    )
    if not known:
        raise PtxError(f"{statement.opcode}: no such shape")
    d, a, b, c = statement.operands
    assert all(isinstance(x, tuple) for x in (d, a, b, c))
    if [len(x) for x in (d, a, b, c)] != [4, 4, 2, 4] or d != ("$0", "$1", "$2", "$3"):
        raise PtxError(f"{statement.opcode}: wrong numbers of registers")
    inputs = program.inputs(op)
    (out,) = program.outputs(op)
    sums = matrices.DTYPES[kind_d]
    wide: Any = np.int64 if kind_d == "s32" else np.float64

    def run(strand: Any) -> None:
        strand.whole_warps("mma.sync")

        def held(names: tuple[str, ...]) -> list[Any]:
            return [strand.env[inputs[int(name[1:]) - 4]] for name in names]

        left = _matrix(strand, held(a), matrices.DTYPES[kind_a], (16, k), "a")
        right = _matrix(strand, held(b), matrices.DTYPES[kind_b], (k, 8), "b")
        old = _matrix(strand, held(c), sums, (16, 8), "c")
        with np.errstate(all="ignore"):
            left = matrices.exact(left, kind_a).astype(wide)
            right = matrices.exact(right, kind_b).astype(wide)
            total = (left @ right + old.astype(wide)).astype(sums)
        row, column = _places(4, 1, "c")
        result = total[:, row, column].reshape(-1, 4)
        strand.env[out] = tuple(np.ascontiguousarray(result[:, i]) for i in range(4))

    return run
