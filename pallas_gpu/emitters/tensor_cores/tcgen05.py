# SPDX-License-Identifier: Apache-2.0
"""tcgen05: asynchronous matrix multiplications, accumulated in TMEM.

One thread issues the instructions, and the commit that follows them must be its own. A
call of `mma` is one volatile inline assembly with an instruction for each step of K and
each part of N; the offsets of their descriptors are constants.

Operands besides a and b, scales or metadata, are a `_Plan`'s `extra`.

The instructions of a pair of CTAs (`collective`) are issued by its leader alone: their
descriptors are applied in both CTAs, each of which has half of the rows of `a` and of
the accumulator, and half of the columns of `b`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_gpu import errors
from pallas_gpu.emitters import module, smem
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.emitters.tensor_cores import pairs, scales
from pallas_gpu.emitters.tensor_cores.scales import Scaling
from pallas_gpu.emitters.tensor_cores.sparsity import ScaledSparsity, Sparsity
from pallas_gpu.emitters.tensor_cores.tmem import TmemView
from pallas_gpu.layouts.smem import tcgen05_descriptor as descriptors
from pallas_gpu.layouts.smem.wgmma_descriptor import (
    WgmmaOperand,
)
from pallas_gpu.layouts.tmem import mma_instruction as instructions
from pallas_gpu.layouts.tmem import sparsity
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS, TmemKind
from pallas_gpu.layouts.tmem.mma_instruction import K_BYTES, Instruction
from pallas_gpu.layouts.tmem.scaled_instruction import ROWS as SCALED_ROWS
from pallas_gpu.layouts.tmem.scaled_instruction import ScaledInstruction

_LANE_SHIFT = 16
# M = 64: the right half of N lies 16 lanes further (PTX ISA, "Layout F").
_HALF_LANES = 16
_COLUMN_BYTES = COLUMN_BITS // 8

# dtype of an operand or an accumulator: its name in PTX.
TYPES: dict[np.dtype, str] = {
    dtypes.F16: "f16",
    dtypes.BF16: "bf16",
    dtypes.F32: "tf32",
    dtypes.F8_E4M3: "e4m3",
    dtypes.F8_E5M2: "e5m2",
    dtypes.I8: "s8",
    dtypes.U8: "u8",
    dtypes.F4_E2M1: "e2m1",
}
ACCUMULATORS: dict[np.dtype, str] = {
    dtypes.F32: "f32",
    dtypes.F16: "f16",
    dtypes.I32: "s32",
}


def mma(
    acc: TmemView,
    a: SmemView | TmemView,
    b: SmemView,
    accumulate: bool | ir.Value,
    scaled: tuple[TmemView, TmemView] | None = None,
    metadata: TmemView | None = None,
    *,
    collective: bool = False,
) -> None:
    """Starts `acc += a @ b`, or `acc = a @ b`.

    PTX: `tcgen05.mma.cta_group::{1,2}`. Since: sm_100a. The elected thread issues it,
    of a pair that of the leader. It is complete for those who wait on an mbarrier of a
    later `commit_arrive`; until then SMEM operands must not be modified.

    Args:
      acc: (M, N); M is 64 or 128.
      a: (M, K) in SMEM, tiled and swizzled, or packed in TMEM; (M, K / 2) with
        metadata.
      b: (K, N) in SMEM.
      accumulate: whether to add to the accumulator: a bool or an i1.
      scaled: the scales of a, (M, blocks of K), and of b, (at least N, blocks of K).
      metadata: of a sparse a: (128, indices of K).
      collective: whether a pair of CTAs multiplies: the rows are those of each CTA, and
        `b` is (K, N / 2).

    Raises:
      ShapeError, DTypeError, LayoutError: no instruction has these operands.
    """
    ctas, sparse = 2 if collective else 1, metadata is not None
    plan = _plan(acc, a, b, scaled, ctas, sparse=sparse)
    views = (*(scaled or ()), *((metadata,) if metadata is not None else ()))
    if isinstance(a, TmemView):
        left = a.address(a.allocation.address)
    else:
        assert plan.a is not None
        left = smem.descriptor(a, descriptors.fields(plan.a))
    kernel = module.current()
    if isinstance(accumulate, bool):
        first = kernel.i32(int(accumulate))
    else:
        first = arith.extui(ir.IntegerType.get_signless(32), accumulate)
    operands = [
        acc.address(acc.allocation.address),
        left,
        smem.descriptor(b, descriptors.fields(plan.b)),
        kernel.i32(plan.instruction.descriptor),
        first,
        *(view.address(view.allocation.address) for view in views),
    ]
    kind = "r" if isinstance(a, TmemView) else "l"
    with predicated(pairs.issuer(collective)):
        llvm.inline_asm(
            None,
            operands,
            _text(plan),
            f"r,{kind},l,r,r,{'r,' * len(views)}~{{memory}}",
            has_side_effects=True,
        )


def commit_arrive(barrier: ir.Value, *, collective: bool = False) -> None:
    """Arrives on an mbarrier once all earlier instructions of the thread are complete.

    PTX: `tcgen05.commit.cta_group::{1,2}.mbarrier::arrive::one`, of a pair with
    `.multicast::cluster`. Since: sm_100a. The elected thread, which has issued the
    instructions, issues it.

    Args:
      barrier: `!llvm.ptr<3>` of the mbarrier.
      collective: whether the instructions are those of a pair of CTAs; it arrives on
        the mbarrier of both.
    """
    # As an intrinsic: jax's own emitters record that ptxas miscompiles it as inline
    # assembly.
    with predicated(pairs.issuer(collective)):
        nvvm.tcgen05_commit(
            barrier,
            multicast_mask=pairs.mask() if collective else None,
            group=pairs.group(collective),
        )


# --- the plan -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The instructions of one call.

    Attributes:
      instruction: their types, and the N of each.
      n, k: of the whole product.
      k_step: K of an instruction.
      a_step: elements of a that it reads from each row.
      a, b: the operands in SMEM; `a` is None in TMEM.
      halved: the accumulator has 64 rows: the right half of its columns lies 16 lanes
        below the left half.
      extra: the scales of blocks, or the metadata of a sparse a, if there are any.
    """

    instruction: Instruction | ScaledInstruction
    n: int
    k: int
    k_step: int
    a_step: int
    a: WgmmaOperand | None
    b: WgmmaOperand
    halved: bool
    extra: Scaling | Sparsity | ScaledSparsity | None

    def accumulator_offset(self, column: int) -> int:
        """The address of a column of the accumulator, from its first."""
        if not self.halved:
            return column
        half, within = divmod(column, self.n // 2)
        return half * _HALF_LANES << _LANE_SHIFT | within


def _plan(
    acc: TmemView,
    a: SmemView | TmemView,
    b: SmemView,
    scaled: tuple[TmemView, TmemView] | None,
    ctas: int,
    *,
    sparse: bool,
) -> _Plan:
    (m, n), k = acc.shape, b.shape[0]
    _require_types(acc.dtype, a.dtype, b.dtype)
    names = ACCUMULATORS[acc.dtype], TYPES[a.dtype], TYPES[b.dtype]
    right = descriptors.plan(b.layout, b.window, "b")
    left = None
    if isinstance(a, SmemView):
        left = descriptors.plan(a.layout, a.window, "a")
    bits = dtypes.stored_bits(b.dtype)
    a_step = K_BYTES * 8 // bits
    k_step = a_step * (2 if sparse else 1)
    if scaled is not None:
        scaling = _scaling(m, n, k, names, scaled, left, right, ctas, sparse=sparse)
        more = ScaledSparsity(scaling) if sparse else scaling
        one = scaling.instruction
        return _Plan(one, n, k, k_step, a_step, left, right, False, more)
    halved = acc.layout.kind is TmemKind.HALF_LANE
    kind = instructions.kind_of(names[1])
    least = sparsity.N_STEP if sparse and not halved else 1
    # A pair's N is that of one instruction: each CTA has half of its columns of b.
    columns = n if ctas == 2 else _columns(n // 2 if halved else n, right, kind, least)
    instruction = Instruction(
        ctas * m,
        columns,
        *names,
        left is not None and left.transposed,
        right.transposed,
        ctas,
        sparse,
    )
    extra = Sparsity(bits) if sparse else None
    return _Plan(instruction, n, k, k_step, a_step, left, right, halved, extra)


def _scaling(
    m: int,
    n: int,
    k: int,
    names: tuple[str, str, str],
    scaled: tuple[TmemView, TmemView],
    left: WgmmaOperand | None,
    right: WgmmaOperand,
    ctas: int,
    *,
    sparse: bool,
) -> Scaling:
    """All columns are those of one instruction, which finds their scales by itself."""
    instruction = ScaledInstruction(
        n,
        *names[1:],
        scales.TYPES[scaled[0].dtype],
        k // (2 if sparse else 1) // scaled[0].shape[1],
        left is not None and left.transposed,
        right.transposed,
        ctas,
        sparse,
        m,
    )
    halved = scales.in_halves(scaled[1])
    return Scaling(instruction, 1 if halved else scaled[1].shape[0] // SCALED_ROWS)


def _require_types(acc: np.dtype, a: np.dtype, b: np.dtype) -> None:
    if acc in ACCUMULATORS and a in TYPES and b in TYPES:
        return
    raise errors.DTypeError(
        "tcgen05.mma does not support these element types",
        expected=f"operands of {', '.join(str(d) for d in TYPES)}",
        got=f"{a} @ {b} into {acc}",
    )


def _columns(n: int, b: WgmmaOperand, kind: instructions.Kind, step: int) -> int:
    """The largest number of columns per instruction that divides N and b's atoms."""
    for columns in range(min(n, instructions.MAX_N), 0, -1):
        # A single atom along N may be larger than the product.
        whole = n % columns == 0 and (columns == n or columns % b.mn_granule == 0)
        whole = whole and b.mn % columns == 0 and columns % step == 0
        if whole and instructions.is_n(columns, kind):
            return columns
    raise errors.ShapeError(
        "N is not divisible by the N of any tcgen05.mma",
        expected=f"a multiple of {max(8, b.mn_granule)}",
        got=n,
        hint="pad N, or store b with a narrower swizzle",
    )


# --- the assembly ---------------------------------------------------------------------


def _text(plan: _Plan) -> str:
    """The assembly; $0 accumulator, $1 a, $2 b, $3 descriptor, $4 accumulate.

    $5 and $6 are the scales of a and b; behind them is the metadata of a.
    """
    mnemonic = plan.instruction.mnemonic
    lines = []
    for start in range(0, plan.n, plan.instruction.n):
        offset = plan.accumulator_offset(start)
        lane = offset >> _LANE_SHIFT << _LANE_SHIFT
        lines.append(f"add.u32 d, $0, {offset};")
        for k in range(0, plan.k, plan.k_step):
            step = k // plan.k_step
            if plan.a is None:
                # Each column holds four bytes of a row.
                column = step * (K_BYTES // _COLUMN_BYTES)
                setup, left = f"add.u32 a, $1, {column};", "[a]"
            else:
                units = plan.a.offset_units(0, step * plan.a_step)
                setup, left = f"add.u64 a, $1, {units};", "a"
            units = plan.b.offset_units(start, k)
            predicate = "rest" if k else "first"
            more = "$3"
            if plan.extra is not None:
                setup += plan.extra.setup(step, lane)
                more = plan.extra.operands
            lines.append(
                f"{setup} add.u64 b, $2, {units}; "
                f"{mnemonic} [d], {left}, b, {more}, {predicate};"
            )
    width = "b32" if plan.a is None else "b64"
    declared = (
        f".reg .b32 d{f', {plan.extra.registers}' if plan.extra else ''}; "
        f".reg .{width} a; "
        ".reg .b64 b; .reg .pred first, rest; "
        "setp.ne.b32 first, $4, 0; setp.eq.b32 rest, 0, 0;"
    )
    return "{ " + declared + "\n" + "\n".join(lines) + "\n}"
