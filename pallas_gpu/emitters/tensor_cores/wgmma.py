# SPDX-License-Identifier: Apache-2.0
"""wgmma: asynchronous matrix multiplications of a warpgroup, accumulated in registers.

One call of `mma` is one volatile inline assembly: fence, instructions, commit. So no
code is placed between the instructions, which would make ptxas serialize them, and the
offsets of their descriptors are constants.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_gpu import errors
from pallas_gpu.emitters import registers, smem
from pallas_gpu.emitters.elements import dtypes, words
from pallas_gpu.emitters.registers import Array, RegisterArray, Splat
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.layouts import Layout, LinearLayout
from pallas_gpu.layouts.registers.placement import describe, place
from pallas_gpu.layouts.smem.wgmma_descriptor import (
    K_STEP_BYTES,
    WgmmaOperand,
    plan_operand,
)

# Rows of one instruction, and its maximum of columns (PTX ISA, wgmma.mma_async shapes).
M_ROWS = 64
MAX_N = 256
N_GRANULE = 8
# Integer shapes above n32 are multiples of 16.
_INT_STEP, _INT_FREE_N = 16, 32
# setmaxnreg's operand (PTX ISA): 24 to 256, a multiple of 8.
MIN_REGISTERS, MAX_REGISTERS, REGISTER_STEP = 24, 256, 8

# dtype of an operand: its name in PTX, and the supported accumulators.
_TYPES: dict[np.dtype, tuple[str, tuple[np.dtype, ...]]] = {
    dtypes.F16: ("f16", (dtypes.F32, dtypes.F16)),
    dtypes.BF16: ("bf16", (dtypes.F32,)),
    dtypes.F32: ("tf32", (dtypes.F32,)),
    dtypes.F8_E4M3: ("e4m3", (dtypes.F32, dtypes.F16)),
    dtypes.F8_E5M2: ("e5m2", (dtypes.F32, dtypes.F16)),
    dtypes.I8: ("s8", (dtypes.I32,)),
    dtypes.U8: ("u8", (dtypes.I32,)),
}
_MIXABLE = ({dtypes.F8_E4M3, dtypes.F8_E5M2}, {dtypes.I8, dtypes.U8})
_LEFT_LAYOUTS = {8: Layout.WGMMA_8BIT, 16: Layout.WGMMA, 32: Layout.WGMMA_32BIT}
_ACCUMULATORS = {dtypes.F32: "f32", dtypes.F16: "f16", dtypes.I32: "s32"}


def left_layout(bits: int) -> Layout:
    """Returns the layout of a left operand in registers: the A fragment of wgmma.

    Args:
      bits: of an element, 8, 16 or 32.
    """
    return _LEFT_LAYOUTS[bits]


def zeros(shape: Sequence[int], dtype: np.dtype = dtypes.F32) -> RegisterArray:
    """A zero accumulator in `Layout.WGMMA`.

    Args:
      shape: (M, N); M is a multiple of 64, N of 8.
      dtype: float32, float16 or int32.
    """
    zero = registers.splat(dtypes.constant(0, np.dtype(dtype)), dtype, shape)
    return zero.materialize(Layout.WGMMA)


def mma(
    acc: RegisterArray,
    a: SmemView | RegisterArray,
    b: SmemView,
    *,
    commits: bool = True,
) -> RegisterArray:
    """Starts `acc += a @ b` and returns the accumulator that will hold the result.

    PTX: `wgmma.fence`, `wgmma.mma_async.sync.aligned.m64nNkK`, `wgmma.commit_group`.
    Since: sm_90a. All threads of the warpgroup issue it. It completes with `wait`;
    until then SMEM operands must not be modified, and only another `mma` may use the
    result. SMEM written by threads requires `tma.fence_proxy_async` before.

    Args:
      acc: (M, N) in Layout.WGMMA; float32, float16 or int32.
      a: (M, K) in SMEM, tiled and swizzled, or in registers, in `left_layout`.
      b: (K, N) in SMEM.
      commits: whether it is a group of its own; else `commit` ends the group.

    Raises:
      ShapeError, DTypeError, LayoutError: the operands do not match any instruction.
    """
    _check_shapes(acc, a, b)
    _check_dtypes(acc.dtype, a.dtype, b.dtype)
    plan = _plan(acc, a, b)
    inputs = words.to_words(acc.values)
    _check_layout(acc, "The accumulator", Layout.WGMMA, Layout.WGMMA_ACC_32BIT)
    order = _accumulator_order(_linear(acc), tuple(map(len, inputs)))
    tied = [word for register in inputs for word in register]
    a_words = [] if plan.a is not None else _a_fragments(a)  # type: ignore[arg-type]
    count = len(tied)
    operands = [*tied]
    if plan.a is not None:
        assert isinstance(a, SmemView)
        operands.append(smem.descriptor(a, plan.a.fields))
    operands += [*a_words, smem.descriptor(b, plan.b.fields)]
    # Inputs are numbered after the results; the tied inputs come first.
    text = _text(plan, order, 2 * count, len(a_words), commits=commits)
    kinds = words.constraints(operands)
    constraints = [f"={kind}" for kind in kinds[:count]]
    constraints += [str(i) for i in range(count)]
    constraints += [*kinds[count:], "~{memory}"]
    results = words.assemble(tied, operands, text, constraints)
    return acc.with_values(words.from_words(results, acc.values))


def wait(n: int) -> None:
    """Waits until at most the `n` most recent groups of the warpgroup are pending.

    PTX: `wgmma.wait_group.sync.aligned n`. Since: sm_90a. All threads of the warpgroup
    issue it. Pass the accumulators through `fence_accumulator` before reading them.

    Args:
      n: 0 waits for all; at most 7.
    """
    nvvm.WgmmaWaitGroupSyncOp(n)


def fence_accumulator(acc: RegisterArray) -> RegisterArray:
    """The accumulator after a wait: the compiler moves no read of it above the wait."""
    return optimization_barrier([acc])[0]  # type: ignore[return-value]


def optimization_barrier(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The same arrays, as new values to the compiler.

    Uses of the results are not moved above this point, and definitions of the operands
    are not moved below it. Of the deferred arrays only splats have a value to order.
    """
    held = [_registers_of(x) for x in arrays]
    pieces = words.to_words([value for values in held for value in values])
    flat = [word for register in pieces for word in register]
    if not flat:
        return tuple(arrays)
    kinds = words.constraints(flat)
    constraints = [*(f"={kind}" for kind in kinds), *map(str, range(len(flat)))]
    results = words.assemble(flat, flat, "", constraints)
    fresh = iter(words.from_words(results, [v for values in held for v in values]))
    return tuple(
        _with_registers(x, list(itertools.islice(fresh, len(values))))
        for x, values in zip(arrays, held, strict=True)
    )


def _registers_of(x: Array) -> tuple[ir.Value, ...]:
    match x:
        case RegisterArray():
            return x.values
        case Splat():
            return (dtypes.splat(x.value, 1),)
    return ()


def _with_registers(x: Array, values: list[ir.Value]) -> Array:
    match x:
        case RegisterArray():
            return x.with_values(values)
        case Splat():
            return dataclasses.replace(x, value=dtypes.extract(values[0], 0))
    return x


def set_max_registers(n: int, action: Literal["increase", "decrease"]) -> None:
    """Changes the maximum number of registers per thread of the warpgroup.

    PTX: `setmaxnreg.inc/dec.sync.aligned.u32`. Since: sm_90a. All threads of the
    warpgroup issue it; an increase blocks until enough registers have been released.

    Args:
      n: 24 to 256, a multiple of 8.
      action: whether n is above or below the current maximum.

    Raises:
      ArgumentError: n is not such a number.
    """
    if not MIN_REGISTERS <= n <= MAX_REGISTERS or n % REGISTER_STEP:
        raise errors.ArgumentError(
            "Invalid number of registers per thread",
            expected=f"{MIN_REGISTERS} to {MAX_REGISTERS}, "
            f"a multiple of {REGISTER_STEP}",
            got=n,
        )
    nvvm.setmaxregister(n, getattr(nvvm.SetMaxRegisterAction, action))


def accumulator_slice(
    acc: RegisterArray, starts: Sequence[int], sizes: Sequence[int]
) -> RegisterArray:
    """A static slice of an accumulator, itself an accumulator in the same registers.

    Args:
      starts, sizes: multiples of 64 along M and of 8 along N.
    """
    _check_slice(acc, starts, sizes)
    part = registers.static_slice(acc, starts, sizes)
    assert isinstance(part, RegisterArray)
    return part


def accumulator_update(
    acc: RegisterArray, starts: Sequence[int], part: RegisterArray
) -> RegisterArray:
    """The accumulator with the slice of `accumulator_slice` replaced."""
    _check_slice(acc, starts, part.shape)
    values = list(acc.values)
    chosen = _linear(acc).slice_registers(starts, part.shape)
    for register, value in zip(chosen, part.values, strict=True):
        values[register] = value
    return acc.with_values(values)


# --- checks ---------------------------------------------------------------------------


def _check_slice(
    acc: RegisterArray, starts: Sequence[int], sizes: Sequence[int]
) -> None:
    granules = (M_ROWS, N_GRANULE)
    numbers = (*starts, *sizes)
    if len(numbers) != 4 or any(
        x % g for x, g in zip(numbers, (*granules, *granules), strict=True)
    ):
        raise errors.LayoutError(
            "The slice of the accumulator does not consist of whole instruction tiles",
            expected=f"starts and sizes that are multiples of {granules}",
            got=f"starts {tuple(starts)}, sizes {tuple(sizes)} of {acc.shape}",
        )


def _check_shapes(acc: RegisterArray, a: SmemView | RegisterArray, b: SmemView) -> None:
    shapes = acc.shape, a.shape, b.shape
    if any(len(s) != 2 for s in shapes) or (
        shapes[0] != (a.shape[0], b.shape[1]) or a.shape[1] != b.shape[0]
    ):
        raise errors.ShapeError(
            "The shapes of wgmma's operands and accumulator do not match",
            expected="accumulator (M, N), operands (M, K) and (K, N)",
            got=f"accumulator {shapes[0]}, operands {shapes[1]} and {shapes[2]}",
        )
    m, n = acc.shape
    if m % M_ROWS or n % N_GRANULE or not m or not n:
        raise errors.ShapeError(
            "The accumulator's shape is not a multiple of wgmma's tile",
            expected=f"M a multiple of {M_ROWS}, N of {N_GRANULE}",
            got=f"accumulator {acc.shape}",
        )


def _check_dtypes(acc: np.dtype, a: np.dtype, b: np.dtype) -> None:
    names = f"{a} @ {b} into {acc}"
    if a not in _TYPES or b not in _TYPES:
        raise errors.DTypeError(
            "wgmma does not support these element types",
            expected=f"operands of {', '.join(str(d) for d in _TYPES)}",
            got=names,
        )
    if a != b and not any({a, b} <= mixable for mixable in _MIXABLE):
        raise errors.DTypeError(
            "The operands of wgmma have different element types",
            expected="equal types; float8 types, and 8-bit integers, may be mixed",
            got=names,
            hint="convert one operand with astype",
        )
    if acc not in _TYPES[a][1]:
        raise errors.DTypeError(
            f"wgmma of {a} operands does not support this accumulator",
            expected=" or ".join(str(d) for d in _TYPES[a][1]),
            got=acc,
        )


# --- the plan -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The parameters of one call's instructions; `a` is None for registers."""

    shape: tuple[int, int, int]  # M, N, K
    n: int  # columns of one instruction
    k_step: int
    a: WgmmaOperand | None
    b: WgmmaOperand
    types: tuple[str, str, str]  # accumulator, a, b in PTX


def _plan(acc: RegisterArray, a: SmemView | RegisterArray, b: SmemView) -> _Plan:
    (m, n), k = acc.shape, b.shape[0]
    k_step = K_STEP_BYTES // b.dtype.itemsize
    plan_b = _operand(b, "b")
    plan_a = _operand(a, "a") if isinstance(a, SmemView) else None
    if plan_a is not None and plan_a.mn_run % M_ROWS:
        raise errors.LayoutError(
            "An instruction crosses tiles of the left operand of wgmma",
            expected=f"8 rows, or a multiple of {M_ROWS}",
            got=f"tiles of {plan_a.mn_run} rows",
        )
    types = (_ACCUMULATORS[acc.dtype], _TYPES[a.dtype][0], _TYPES[b.dtype][0])
    columns = _columns(n, plan_b, integer=acc.dtype == dtypes.I32)
    return _Plan((m, n, k), columns, k_step, plan_a, plan_b, types)


def _operand(view: SmemView, side: Literal["a", "b"]) -> WgmmaOperand:
    return plan_operand(view.layout, view.window, side, high_tiles=True)


def _columns(n: int, b: WgmmaOperand, *, integer: bool) -> int:
    """The largest number of columns per instruction that divides N and b's atoms."""
    for columns in range(min(n, MAX_N), 0, -N_GRANULE):
        whole = n % columns == 0 and (columns == n or columns % b.mn_granule == 0)
        whole = whole and b.mn_run % columns == 0
        legal = not integer or columns <= _INT_FREE_N or columns % _INT_STEP == 0
        if whole and legal and columns % N_GRANULE == 0:
            return columns
    raise errors.ShapeError(
        "N is not divisible by the N of any wgmma instruction",
        expected=f"a multiple of {max(N_GRANULE, b.mn_granule)}",
        got=n,
    )


def _linear(x: RegisterArray) -> LinearLayout:
    if isinstance(x.layout, LinearLayout):
        return x.layout
    return x.layout.linear()


def _check_layout(x: RegisterArray, name: str, *allowed: Layout) -> None:
    if any(x.layout == place(layout, x.shape) for layout in allowed):
        return
    raise errors.LayoutError(
        f"{name} of wgmma is not in the layout of the tensor core's fragment",
        expected=" or ".join(f"Layout.{layout.name}" for layout in allowed),
        got=describe(x.layout),
        hint=f"layout_cast it to Layout.{allowed[0].name}, or load it in that layout",
    )


# (M block, N block of 8), and the positions of its fragment's words in the tied words.
_Order = tuple[tuple[tuple[int, int], tuple[int, ...]], ...]


@functools.lru_cache(maxsize=64)
def _accumulator_order(layout: LinearLayout, words_of: tuple[int, ...]) -> _Order:
    """Returns the places of an accumulator's words; `words_of` counts each register's.

    PTX ISA, "Accumulator D": row `lane / 4`, then that row plus 8; in both the columns
    `2 * (lane % 4)` and `2 * (lane % 4) + 1`.
    """
    position, places = 0, []
    for (m, n), count in zip(layout.origins, words_of, strict=True):
        key = (m // M_ROWS, n // N_GRANULE, m % M_ROWS, n % N_GRANULE)
        places.append((key, list(range(position, position + count))))
        position += count
    order: dict[tuple[int, int], list[int]] = {}
    for (block, columns, _, _), at in sorted(places):
        order.setdefault((block, columns), []).extend(at)
    return tuple((block, tuple(at)) for block, at in order.items())


def _a_fragments(a: RegisterArray) -> list[ir.Value]:
    """The words of A: four registers for each M block and K step, in order.

    PTX ISA, "Matrix A fragments": rows `lane / 4` and `lane / 4 + 8` in the lower half
    of the step's K, then both rows in the upper half.
    """
    bits = dtypes.bits(a.dtype)
    _check_layout(a, "The left operand", left_layout(bits))
    k_step = K_STEP_BYTES * 8 // bits
    half = k_step // 2
    pieces = zip(_linear(a).origins, words.to_words(a.values), strict=True)
    i32 = ir.IntegerType.get_signless(32)
    keyed = [
        ((m // M_ROWS, k // k_step, k % k_step // half, m % M_ROWS), register)
        for (m, k), register in pieces
    ]
    keyed.sort(key=lambda item: item[0])
    found = [word for _, register in keyed for word in register]
    # The operand is of registers without a type, also for tf32.
    return found if bits < 32 else [llvm.bitcast(i32, word) for word in found]


# --- the assembly ---------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _text(
    plan: _Plan, order: _Order, first_input: int, a_words: int, *, commits: bool
) -> str:
    m, n, k = plan.shape
    registers_of = {block: [f"${w}" for w in at] for block, at in order}
    a_first, b_desc = first_input, first_input + (a_words or 1)
    lines = ["wgmma.fence.sync.aligned;"]
    for k_start in range(0, k, plan.k_step):
        for block in range(m // M_ROWS):
            for start in range(0, n, plan.n):
                blocks = range(start // N_GRANULE, (start + plan.n) // N_GRANULE)
                acc = ", ".join(r for j in blocks for r in registers_of[block, j])
                if plan.a is None:
                    step = block * (k // plan.k_step) + k_start // plan.k_step
                    regs = range(a_first + 4 * step, a_first + 4 * step + 4)
                    left, setup = f"{{{', '.join(f'${r}' for r in regs)}}}", ""
                else:
                    units = plan.a.offset_units(block * M_ROWS, k_start)
                    left, setup = "da", f"add.s64 da, ${a_first}, {units};"
                units = plan.b.offset_units(start, k_start)
                lines.append(
                    f"{setup} add.s64 db, ${b_desc}, {units}; "
                    f"{_mnemonic(plan)} {{{acc}}}, {left}, db, one{_immediates(plan)};"
                )
    lines += ["wgmma.commit_group.sync.aligned;"] * commits
    declared = ".reg .b64 da, db; .reg .pred one; setp.eq.b32 one, 1, 1;"
    return "{ " + declared + "\n" + "\n".join(lines) + "\n}"


def _mnemonic(plan: _Plan) -> str:
    shape = f"m{M_ROWS}n{plan.n}k{plan.k_step}"
    return f"wgmma.mma_async.sync.aligned.{shape}.{'.'.join(plan.types)}"


def _immediates(plan: _Plan) -> str:
    """The operands' sign immediates, and the transpose bits of 16-bit ones in SMEM."""
    kind = plan.types[1]
    if kind in ("s8", "u8"):
        return ""
    if kind not in ("f16", "bf16"):
        return ", 1, 1"
    transposed = [int(x.transposed) for x in (plan.a, plan.b) if x is not None]
    return ", 1, 1, " + ", ".join(map(str, transposed))
