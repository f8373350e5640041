# SPDX-License-Identifier: Apache-2.0
"""Integers that depend only on the thread index, and pointers offset by them.

A layout defines what each of the seven bits of the thread index contributes. Here that
is emitted as few integer operations, once per kernel, in the prologue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_gpu.emitters import module, operations
from pallas_gpu.layouts.registers.linear import LANE_BITS, WARPS


def thread_sum(columns: Sequence[int]) -> ir.Value:
    """i32: the sum of `columns[b]` over the bits b set in the thread index.

    Args:
      columns: seven non-negative integers.
    """
    kernel = module.current()
    columns = tuple(columns)
    if not any(columns):
        return kernel.i32(0)
    return kernel.hoisted(("sum", columns), lambda: _emit_sum(columns))


def wide_thread_sum(columns: Sequence[int]) -> ir.Value:
    """i64: as `thread_sum`, for sums beyond 32 bits."""
    kernel = module.current()
    columns = tuple(columns)
    i64 = ir.IntegerType.get_signless(64)

    def emit() -> ir.Value:
        total = arith.constant(i64, 0)
        for bit, column in enumerate(columns):
            if column:
                value = arith.extui(i64, thread_bit(bit))
                step = arith.muli(value, arith.constant(i64, column))
                total = arith.addi(total, step)
        return total

    return kernel.hoisted(("wide", columns), emit)


def thread_xor(columns: Sequence[int]) -> ir.Value:
    """i32: the exclusive or of `columns[b]` over the bits b set in the thread index.

    Args:
      columns: seven non-negative integers.
    """
    kernel = module.current()
    columns = tuple(columns)
    if not any(columns):
        return kernel.i32(0)
    if _disjoint(columns):
        return thread_sum(columns)
    shifted = _diagonals(columns)
    return kernel.hoisted(
        ("xor", columns), lambda: _combine(arith.xori, map(_shifted_bits, shifted))
    )


def thread_bit(bit: int) -> ir.Value:
    """i1: a bit of the thread index within the warpgroup."""
    kernel = module.current()

    def emit() -> ir.Value:
        masked = arith.andi(kernel.threads.warpgroup_thread, kernel.i32(1 << bit))
        return arith.cmpi(arith.CmpIPredicate.ne, masked, kernel.i32(0))

    return kernel.hoisted(("bit", bit), emit)


def thread_parity(mask: int) -> ir.Value:
    """i1: an odd number of the mask's bits are set in the thread index."""
    if mask & (mask - 1) == 0:
        return thread_bit(mask.bit_length() - 1)
    kernel = module.current()

    def emit() -> ir.Value:
        sums = thread_xor([mask >> b & 1 for b in range(7)])
        return arith.cmpi(arith.CmpIPredicate.ne, sums, kernel.i32(0))

    return kernel.hoisted(("parity", mask), emit)


def thread_bits_clear(bits: Sequence[int]) -> ir.Value | None:
    """i1: these replication bits of the thread index are zero; None without bits.

    Of the threads that hold copies of an element it is true in one. The arrays of
    different warps are not copies: in code of single warps the bits of the warp do not
    count.
    """
    kernel = module.current()
    if kernel.issuer == "warp":
        bits = [b for b in bits if b < LANE_BITS]
    if not bits:
        return None
    mask = sum(1 << b for b in bits)

    def emit() -> ir.Value:
        masked = arith.andi(kernel.threads.warpgroup_thread, kernel.i32(mask))
        return arith.cmpi(arith.CmpIPredicate.eq, masked, kernel.i32(0))

    return kernel.hoisted(("clear", mask), emit)


def offset_pointer(pointer: ir.Value, *offsets_bytes: int | ir.Value) -> ir.Value:
    """The pointer plus constant and i32 or i64 offsets in bytes."""
    static = 0
    for offset in offsets_bytes:
        if isinstance(offset, int):
            static += offset
        else:
            pointer = operations.offset(pointer, offset)
    if static == 0:
        return pointer
    if not -(2**31) < static < 2**31:
        # The constant indices of the operation are i32.
        wide = ir.IntegerType.get_signless(64)
        return operations.offset(pointer, operations.constant(wide, static))
    return operations.offset(pointer, static)


def global_pointer(pointer: ir.Value) -> ir.Value:
    """A pointer to GMEM as one of its address space."""
    window = module.pointer_type(1)
    return pointer if pointer.type == window else llvm.addrspacecast(window, pointer)


def map_shared(pointer: ir.Value, block_rank: ir.Value) -> ir.Value:
    """The address of the same offset in another block's SMEM, `!llvm.ptr<7>`.

    PTX: `mapa.shared::cluster`. Since: sm_90.

    Args:
      pointer: `!llvm.ptr<3>`, an address in this block's SMEM.
      block_rank: i32, the rank of the other block in the cluster.
    """
    return nvvm.mapa(module.pointer_type(7), pointer, block_rank)


def atomic_space(pointer: ir.Value) -> tuple[str, str, ir.Value]:
    """Scope and state space of an atomic operation at an address.

    The scope has to include all threads that may access the element: those of the
    block, of the cluster, or of the GPU.

    Returns:
      The scope and the state space, as in `gpu.global`; the constraint of the address
      in inline assembly; the address.
    """
    i32 = ir.IntegerType.get_signless(32)
    match str(pointer.type):
        case "!llvm.ptr<3>":
            shared = module.current().spec.shares_smem
            scope = "cluster" if shared else "cta"
            return f"{scope}.shared::cta", "r", llvm.ptrtoint(i32, pointer)
        case "!llvm.ptr<7>":
            return "cluster.shared::cluster", "r", llvm.ptrtoint(i32, pointer)
        case _:
            return "gpu.global", "l", pointer


class Distance(NamedTuple):
    """Says that each warp, or warpgroup, of a block has something of its own in SMEM.

    Attributes:
      of: who has it.
      size_bytes: from one's to the next one's.
    """

    of: Literal["warp", "warpgroup"]
    size_bytes: int


def own_smem_pointer(offset_bytes: int, distance: Distance | None) -> ir.Value:
    """The address in the dynamic SMEM of what the block, a warpgroup or a warp has.

    Args:
      offset_bytes: the offset; of what each has its own, that of the first.
      distance: from one's to the next one's; None for what all share.
    """
    kernel = module.current()
    first = kernel.smem_pointer(offset_bytes)
    if distance is None:
        return first

    def emit() -> ir.Value:
        number = _number_in_block(distance.of)
        size = kernel.i32(distance.size_bytes)
        return offset_pointer(first, arith.muli(number, size))

    return kernel.hoisted(("own", offset_bytes, distance), emit)


def _number_in_block(of: Literal["warp", "warpgroup"]) -> ir.Value:
    kernel = module.current()
    if of == "warpgroup":
        return kernel.threads.warpgroup
    warp = kernel.threads.warp
    if kernel.spec.warpgroups == 1:
        return warp
    before = arith.muli(kernel.threads.warpgroup, kernel.i32(WARPS))
    return arith.addi(before, warp)


def thread_pointers(
    base: ir.Value,
    columns: Sequence[int],
    column_add: Sequence[int],
    xor: Sequence[int],
    add: Sequence[int],
) -> list[ir.Value]:
    """The addresses that a thread accesses; the arguments are an `AddressForm`'s.

    Returns:
      For each access i `base + (XOR of columns[b] ^ xor[i]) + sum of column_add[b] +
      add[i]`, over the bits b set in the thread index.
    """
    kernel = module.current()
    columns, column_add = tuple(columns), tuple(column_add)

    def thread_offset(constant: int) -> ir.Value:
        def emit() -> ir.Value:
            offset = thread_xor(columns)
            if constant:
                offset = arith.xori(offset, kernel.i32(constant))
            if any(column_add):
                offset = arith.addi(offset, thread_sum(column_add))
            return offset

        return kernel.hoisted(("pointer", columns, column_add, constant), emit)

    pointers = {x: offset_pointer(base, thread_offset(x)) for x in dict.fromkeys(xor)}
    return [offset_pointer(pointers[x], a) for x, a in zip(xor, add, strict=True)]


# --- how the sums are emitted ---------------------------------------------------------


def _disjoint(columns: tuple[int, ...]) -> bool:
    return sum(columns) == _fold_or(columns)


def _fold_or(columns: tuple[int, ...]) -> int:
    result = 0
    for column in columns:
        result |= column
    return result


def _diagonals(columns: tuple[int, ...]) -> list[tuple[int, int]]:
    """(mask, shift): the bits of the index that are shifted by the same distance."""
    masks: dict[int, int] = {}
    for bit, column in enumerate(columns):
        for place in range(column.bit_length()):
            if column >> place & 1:
                masks[place - bit] = masks.get(place - bit, 0) | 1 << bit
    return [(mask, shift) for shift, mask in sorted(masks.items())]


def _runs(columns: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(first bit, bits, factor): runs of adjacent bits whose columns double."""
    runs: list[tuple[int, int, int]] = []
    for bit, column in enumerate(columns):
        if not column:
            continue
        if runs:
            first, count, factor = runs[-1]
            if first + count == bit and column == factor << count:
                runs[-1] = (first, count + 1, factor)
                continue
        runs.append((bit, 1, column))
    return runs


def _emit_sum(columns: tuple[int, ...]) -> ir.Value:
    shifted, runs = _diagonals(columns), _runs(columns)
    if len(shifted) <= len(runs):
        combine = arith.ori if _disjoint(columns) else arith.addi
        return _combine(combine, map(_shifted_bits, shifted))
    return _combine(arith.addi, map(_scaled_bits, runs))


def _combine(op: Callable, terms) -> ir.Value:
    result = None
    for term in terms:
        result = term if result is None else op(result, term)
    return result


def _masked(mask: int) -> ir.Value:
    kernel = module.current()
    thread = kernel.threads.warpgroup_thread
    if mask == module.WARPGROUP_THREADS - 1:
        return thread
    return kernel.hoisted(("mask", mask), lambda: arith.andi(thread, kernel.i32(mask)))


def _shifted_bits(term: tuple[int, int]) -> ir.Value:
    mask, shift = term
    kernel = module.current()
    bits = _masked(mask)
    if shift == 0:
        return bits
    op = arith.shli if shift > 0 else arith.shrui
    return op(bits, kernel.i32(abs(shift)))


def _scaled_bits(run: tuple[int, int, int]) -> ir.Value:
    first, count, factor = run
    kernel = module.current()
    bits = _shifted_bits((((1 << count) - 1) << first, -first))
    return bits if factor == 1 else arith.muli(bits, kernel.i32(factor))
