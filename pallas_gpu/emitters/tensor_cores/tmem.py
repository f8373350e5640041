# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: its allocation, and transfers between it and registers.

A block allocates its columns at once, at the start, and frees them at the end: one warp
does both. An address has the lane in bits 16 to 31 and the column in bits 0 to 15 (PTX
ISA, "Tensor Memory Addressing"). Each warp of a warpgroup transfers its own quarter of
the lanes.

A pair of CTAs allocates and frees together: its warps issue the instructions with
`cta_group::2` (`collective`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_gpu.emitters import mbarrier, module
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.elements import dtypes, words
from pallas_gpu.emitters.registers import RegisterArray
from pallas_gpu.emitters.smem import Windowed, add_index
from pallas_gpu.emitters.tensor_cores import pairs
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.tmem.transfer import TmemTransfer, plan_transfer
from pallas_gpu.layouts.window import Window

# The SMEM word that receives the address of an allocation; aligned like an mbarrier.
ADDRESS_BYTES = 8
_LANE_SHIFT = 16
# The lanes of a warp, as an address: 32 << 16.
_WARP_SHIFT = 21


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The columns of a block.

    Attributes:
      address: i32, of lane 0 and the first column.
      warp_address: i32, of the first lane of the executing warp.
    """

    address: ir.Value
    warp_address: ir.Value


@dataclasses.dataclass(frozen=True)
class TmemView(Windowed):
    """A part of an array in TMEM.

    Attributes:
      allocation: the block's columns.
      first_column: of the array in the allocation.
      layout: of the array.
      dtype: element type.
      window: the part, of two dimensions; dynamic starts are i32 values.
    """

    allocation: Allocation
    first_column: int
    layout: TmemLayout
    dtype: np.dtype
    window: Window

    def address(self, base: ir.Value) -> ir.Value:
        """The address of the view's first column, from `base` on."""
        offset = add_index(self.first_column, self._start_column())
        return (
            arith.addi(base, offset)
            if not isinstance(offset, int)
            else _add(base, offset)
        )

    def _start_column(self) -> int | ir.Value:
        """The column at which the view starts in its array."""
        tile = self.layout.base_tile_shape[1]
        rows = self.window.array_shape[0]
        columns = self.layout.columns((rows, tile))
        start = self.window.starts[1]
        if isinstance(start, int):
            return start // tile * columns
        kernel = module.current()
        if tile > 1:
            start = arith.divui(start, kernel.i32(tile))
        return arith.muli(start, kernel.i32(columns)) if columns > 1 else start


def _add(base: ir.Value, offset: int) -> ir.Value:
    return arith.addi(base, module.current().i32(offset)) if offset else base


# --- allocation -----------------------------------------------------------------------


def allocate(
    word: ir.Value, columns: int, *, collective: bool, barriers: bool
) -> Allocation:
    """Allocates the columns of the block; all its threads issue it, at the start.

    PTX: `tcgen05.alloc`, `tcgen05.relinquish_alloc_permit` by warp 0, a barrier of the
    block, `ld.shared` of the address. Since: sm_100a.

    Args:
      word: `!llvm.ptr<3>`, ADDRESS_BYTES of SMEM, which hold the address until `free`.
      columns: a power of two from 32 to 512.
      collective: whether a pair of CTAs allocates together.
      barriers: whether mbarriers have been initialized, which the barrier also makes
        visible.
    """
    kernel = module.current()
    group = pairs.group(collective)
    with predicated(_first_warp()):
        nvvm.tcgen05_alloc(word, kernel.i32(columns), group=group)
        nvvm.tcgen05_relinquish_alloc_permit(group=group)
    if kernel.spec.has_cluster or not barriers:
        # The arrival at the cluster's barrier is relaxed: it does not order the word.
        mbarrier.block_barrier()
    if barriers or kernel.spec.has_cluster:
        kernel.sync_after_init()
    address = llvm.load(ir.IntegerType.get_signless(32), word)
    warp = arith.shli(kernel.threads.warp, kernel.i32(_WARP_SHIFT))
    return Allocation(address, arith.addi(address, warp))


def free(word: ir.Value, columns: int, *, collective: bool) -> None:
    """Frees the columns; all threads of the block issue it, at the end.

    PTX: `tcgen05.wait::ld`, a barrier of the block (of the cluster, if collective),
    `tcgen05.dealloc` by warp 0. Since: sm_100a.
    """
    kernel = module.current()
    # Nobody has to wait for a last load, whose values are in registers when used.
    nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.LOAD)
    fence_before_thread_sync()
    if collective:
        kernel.sync_cluster()
    else:
        mbarrier.block_barrier()
    with predicated(_first_warp()):
        fence_after_thread_sync()
        address = llvm.load(ir.IntegerType.get_signless(32), word)
        # An address in TMEM is a pointer to LLVM.
        nvvm.tcgen05_dealloc(
            pointer(address), kernel.i32(columns), group=pairs.group(collective)
        )


def pointer(address: ir.Value) -> ir.Value:
    """An address as LLVM's pointer to tensor memory: `!llvm.ptr<6>`."""
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<6>"), address)


def _first_warp() -> ir.Value:
    """i1: the warp is the first of the block."""
    kernel = module.current()

    def emit() -> ir.Value:
        warp, warpgroup = kernel.threads.warp, kernel.threads.warpgroup
        number = warp if kernel.spec.warpgroups == 1 else arith.ori(warp, warpgroup)
        return arith.cmpi(arith.CmpIPredicate.eq, number, kernel.i32(0))

    return kernel.hoisted("first warp", emit)


# --- ordering -------------------------------------------------------------------------


def fence_before_thread_sync() -> None:
    """Orders earlier tcgen05 instructions before a following synchronization."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def fence_after_thread_sync() -> None:
    """Orders later tcgen05 instructions after a preceding synchronization."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def wait_loads() -> None:
    """Waits until the warpgroup has read what its loads load.

    PTX: `tcgen05.wait::ld.sync.aligned`, and a barrier of the warpgroup between the two
    tcgen05 fences: another of its threads may overwrite the columns then.
    """
    _wait(nvvm.Tcgen05WaitKind.LOAD)


def wait_stores() -> None:
    """Waits until the warpgroup's stores are complete, and known to all its threads.

    PTX: `tcgen05.wait::st.sync.aligned`, and a barrier as in `wait_loads`.
    """
    _wait(nvvm.Tcgen05WaitKind.STORE)


def _wait(kind: nvvm.Tcgen05WaitKind) -> None:
    nvvm.tcgen05_wait(kind)
    fence_before_thread_sync()
    mbarrier.synchronize()
    fence_after_thread_sync()


# --- registers ------------------------------------------------------------------------


def load(view: TmemView, placement: Placement) -> RegisterArray:
    """Loads a part of an array.

    PTX: `tcgen05.ld.sync.aligned`. Since: sm_100a. All threads of the warpgroup issue
    it. The values may be used at once (PTX ISA, tcgen05 "Memory consistency": a true
    dependency of registers is honoured); TMEM has been read after `wait_loads`.

    Args:
      view: the part.
      placement: of the result; an instruction leaves the array in it.

    Raises:
      LayoutError: no instruction does.
    """
    plan = plan_transfer(placement, view.layout, dtypes.stored_bits(view.dtype))
    register = dtypes.vector_type(view.dtype, placement.vector_length)
    word = words.word_type(register)
    base = view.address(view.allocation.warp_address)
    held: dict[int, ir.Value] = {}
    form = f"{plan.access.shape}.x{{}}{'.pack::16b' if plan.access.paired else ''}.b32"
    for part in plan.instructions:
        names = ", ".join(f"${i}" for i in range(len(part.words)))
        source = f"${len(part.words)}"
        text = f"tcgen05.ld.sync.aligned.{form.format(part.repetitions)}"
        types = [word] * len(part.words)
        letters = words.constraints_of(types)
        results = words.assemble_types(
            types,
            [_place(base, part)],
            f"{text} {{{names}}}, [{source}];",
            [*(f"={letter}" for letter in letters), "r", "~{memory}"],
        )
        held.update(zip(part.words, results, strict=True))
    ordered = [held[i] for i in range(len(held))]
    values = words.join(ordered, [register] * placement.num_registers)
    return RegisterArray(tuple(values), placement, view.dtype)


def store(view: TmemView, value: RegisterArray) -> None:
    """Stores a part of an array.

    PTX: `tcgen05.st.sync.aligned`. Since: sm_100a. All threads of the warpgroup issue
    it; it is complete after `wait_stores`.

    Args:
      view: the part.
      value: in a layout that an instruction stores from.

    Raises:
      LayoutError: no instruction does.
    """
    plan = plan_transfer(value.layout, view.layout, dtypes.stored_bits(view.dtype))
    held = [w for register in words.to_words(value.values) for w in register]
    base = view.address(view.allocation.warp_address)
    unpack = ".unpack::16b" if plan.access.paired else ""
    for part in plan.instructions:
        names = ", ".join(f"${i + 1}" for i in range(len(part.words)))
        operands = [_place(base, part), *(held[i] for i in part.words)]
        shape = f"{plan.access.shape}.x{part.repetitions}{unpack}.b32"
        _emit(
            f"tcgen05.st.sync.aligned.{shape} [$0], {{{names}}};",
            operands,
            [*words.constraints(operands), "~{memory}"],
        )


def _place(base: ir.Value, part: TmemTransfer) -> ir.Value:
    return _add(base, part.lane << _LANE_SHIFT | part.column)


def _emit(text: str, operands: Sequence[ir.Value], constraints: Sequence[str]) -> None:
    llvm.inline_asm(
        None, list(operands), text, ",".join(constraints), has_side_effects=True
    )
