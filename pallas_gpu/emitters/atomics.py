# SPDX-License-Identifier: Apache-2.0
"""Atomic operations on elements. PTX ISA, Parallel Synchronization: red, atom."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.emitters import (
    addressing,
    control,
    indexed,
    mbarrier,
    module,
    smem,
)
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.indexed import Elements
from pallas_gpu.emitters.moves import scratch as scratches
from pallas_gpu.emitters.moves import shuffle
from pallas_gpu.emitters.registers import Array
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREAD_BITS, THREADS
from pallas_gpu.layouts.registers.placement import Placement

# The constraint of inline assembly for a register of some bits.
_CONSTRAINTS = {16: "h", 32: "r", 64: "l"}
_ADD = {
    dtypes.F16: "add.noftz.f16",
    dtypes.BF16: "add.noftz.bf16",
    dtypes.F32: "add.f32",
    dtypes.F64: "add.f64",
}


@dataclasses.dataclass(frozen=True)
class Order:
    """What an operation orders, and with whom. PTX ISA, atom: .sem, .scope.

    Attributes:
      sem: "relaxed", "acquire", "release" or "acq_rel".
      scope: "cta" and the like; None for all who can access the memory.
    """

    sem: str = "relaxed"
    scope: str | None = None

    @property
    def releases(self) -> bool:
        """Whether it follows the earlier accesses of all threads of the issuer."""
        return self.sem in ("release", "acq_rel")

    @property
    def acquires(self) -> bool:
        """Whether the later accesses of all threads of the issuer follow it."""
        return self.sem in ("acquire", "acq_rel")

    def prefix(self, where: str) -> str:
        """Returns sem, scope and state space of an instruction.

        Args:
          where: the widest scope that is necessary, and the state space.
        """
        widest, _, space = where.partition(".")
        return f"{self.sem}.{self.scope or widest}.{space}"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction on one element.

    Attributes:
      name: operation and type, as in `add.u32`.
      returns: whether it returns the old element: `atom` rather than `red`.
      bits: width of the element.
      order: see `Order`.
    """

    name: str
    returns: bool
    bits: int
    order: Order

    def emit(
        self,
        pointer: ir.Value,
        operands: Sequence[ir.Value],
        condition: ir.Value | None = None,
    ) -> ir.Value | None:
        """Emits it; operands and result are integers of `bits`.

        Where an i1 is false nothing is updated, and the result is 0; None is true.
        """
        where, address, pointer = addressing.atomic_space(pointer)
        how = self.order.prefix(where)
        register = _CONSTRAINTS[self.bits]
        first = 1 if self.returns else 0
        places = [f"[${first}]", *(f"${first + 1 + i}" for i in range(len(operands)))]
        inputs = [address, *[register] * len(operands)]
        guard, given = "", [pointer, *operands]
        if condition is not None:
            guard = f"@${first + len(given)} "
            given.append(condition)
            inputs.append("b")
        if not self.returns:
            llvm.inline_asm(
                None,
                given,
                f"{guard}red.{how}.{self.name} {', '.join(places)};",
                ",".join([*inputs, "~{memory}"]),
                has_side_effects=True,
            )
            return None
        opcode = "atom" if operands else "ld"
        if condition is not None:
            # The result's register before the instruction.
            given.append(dtypes.constant(0, np.dtype(f"int{self.bits}")))
            inputs.append("0")
        return llvm.inline_asm(
            ir.IntegerType.get_signless(self.bits),
            given,
            f"{guard}{opcode}.{how}.{self.name} {', '.join(['$0', *places])};",
            ",".join([f"={register}", *inputs, "~{memory}"]),
            has_side_effects=True,
        )


def update(
    elements: Elements,
    layout: Placement | None,
    name: str,
    operands: Sequence[Array],
    returns: bool,
    room: scratches.SmemScratch | None,
    order: Order,
) -> Array | None:
    """Updates each element at once; one thread updates each replicated element.

    PTX: `red`, or `atom` for the old elements. All threads of the issuer issue it.

    Args:
      elements: what is updated.
      layout: of all arrays; None for a single element.
      name: `atomic_add` and the like.
      operands: the values; for `atomic_cas` what is compared first.
      returns: whether the old elements are returned.
      room: where warps exchange old elements; see `scratch_bytes`.
      order: what it orders. A barrier of the issuer extends it to all threads:
        causality order is transitive (PTX ISA, Causality order).
    """
    with _between_barriers(order):
        dtype = elements.dtype
        integer = np.dtype(f"int{8 * dtype.itemsize}")
        given = [indexed.lanes_of(x, layout) for x in operands]
        columns = [
            [dtypes.bitcast(value, integer) for value in column or ()]
            for column in given
        ]
        addresses = indexed.pointers(elements, layout)
        wanted = indexed.conditions(elements, layout)
        copies = replicas(layout)
        guard = addressing.thread_bits_clear(copies)
        # `red` neither exchanges nor acquires.
        asked = returns
        returns = asked or order.acquires or name in ("atomic_xchg", "atomic_cas")
        if asked and not order.releases and _is_load(name, elements, columns[0]):
            name = "load"
        old: list[ir.Value] = []
        if not returns:
            _without_results(elements, layout, name, columns, addresses, wanted, order)
            return None
        for i, (pointer, condition) in enumerate(zip(addresses, wanted, strict=True)):
            values = [column[i] for column in columns]
            condition = control.both(guard, condition)
            result = _one(name, dtype, returns, pointer, values, condition, order)
            assert result is not None
            old.append(result)
        if not asked:
            return None
        old = [dtypes.bitcast(x, dtype) for x in shared(old, integer, copies, room)]
        return indexed.array_of(old, layout, dtype)


@contextlib.contextmanager
def _between_barriers(order: Order) -> Iterator[None]:
    """Emits the barriers that extend an operation's order to all threads."""
    if order.releases:
        mbarrier.synchronize()
    yield
    if order.acquires:
        mbarrier.synchronize()


def _without_results(
    elements: Elements,
    layout: Placement | None,
    name: str,
    columns: Sequence[Sequence[ir.Value]],
    addresses: Sequence[ir.Value],
    wanted: Sequence[ir.Value | None],
    order: Order,
) -> None:
    """Updates elements by `red`, several at a time where they are adjacent."""
    dtype = elements.dtype
    most_bytes = _adjacent_bytes(name, elements)
    parts = indexed.parts(elements, layout, wanted, most_bytes)
    with predicated(addressing.thread_bits_clear(replicas(layout))):
        for first, count, condition in parts:
            place = addresses[first]
            if count == 1:
                values = [column[first] for column in columns]
                _one(name, dtype, False, place, values, condition, order)
                continue
            if dtype == dtypes.F32:
                _vector(place, columns[0][first : first + count], condition, order)
                continue
            pair = dtypes.pack(columns[0][first : first + 2])
            word = dtypes.extract(dtypes.bitcast(pair, dtypes.I32), 0)
            two = Instruction(f"{_ADD[dtype]}x2", False, 32, order)
            two.emit(place, [word], condition)


def _adjacent_bytes(name: str, elements: Elements) -> int:
    """Returns how many bytes one `red` updates. PTX ISA, red: vectors are in GMEM."""
    if name != "atomic_add":
        return 1
    if elements.dtype in (dtypes.F16, dtypes.BF16):
        return 4
    in_gmem = not isinstance(elements.view, smem.SmemView)
    return 16 if elements.dtype == dtypes.F32 and in_gmem else 1


def _vector(
    pointer: ir.Value,
    words: Sequence[ir.Value],
    condition: ir.Value | None,
    order: Order,
) -> None:
    """Adds two or four adjacent float32 values. PTX: red.global.add.v2.f32, v4."""
    where, address, pointer = addressing.atomic_space(pointer)
    places = ", ".join(f"${1 + i}" for i in range(len(words)))
    given, inputs = [pointer, *words], [address, *["r"] * len(words)]
    guard = ""
    if condition is not None:
        guard = f"@${len(given)} "
        given.append(condition)
        inputs.append("b")
    llvm.inline_asm(
        None,
        given,
        f"{guard}red.{order.prefix(where)}.add.v{len(words)}.f32 [$0], {{{places}}};",
        ",".join([*inputs, "~{memory}"]),
        has_side_effects=True,
    )


def _one(
    name: str,
    dtype: np.dtype,
    returns: bool,
    pointer: ir.Value,
    values: Sequence[ir.Value],
    condition: ir.Value | None,
    order: Order,
) -> ir.Value | None:
    """Emits the instructions for one element; values are its bits.

    Where the condition is false nothing is updated, and the result is 0.
    """
    bits = 8 * dtype.itemsize

    def emit(
        text: str,
        given: Sequence[ir.Value] = values,
        where: ir.Value | None = condition,
    ) -> ir.Value | None:
        return Instruction(text, returns, bits, order).emit(pointer, given, where)

    match name:
        case "atomic_add":
            return emit(_ADD.get(dtype, f"add.u{bits}"))
        case "atomic_max" | "atomic_min" if dtype.kind in "iu":
            sign = "s" if dtype.kind == "i" else "u"
            return emit(f"{name[-3:]}.{sign}{bits}")
        case "atomic_max" | "atomic_min":
            return _extreme(name[-3:], dtype, emit, values[0], condition)
        case "atomic_xchg":
            return emit(f"exch.b{bits}")
        case "load":
            return emit(f"b{bits}", [])
        case _:
            return emit(f"{name.removeprefix('atomic_')}.b{bits}")


def _is_load(name: str, elements: Elements, bits: Sequence[ir.Value]) -> bool:
    """Whether an operation that returns words of GMEM leaves them as they are."""
    in_gmem = not isinstance(elements.view, smem.SmemView)
    is_word = elements.dtype.itemsize == 4
    return name == "atomic_or" and in_gmem and is_word and all(map(_is_zero, bits))


def _is_zero(word: ir.Value) -> bool:
    while getattr(word.owner, "name", "") in ("vector.extract", "vector.broadcast"):
        word = word.owner.operands[0]
    zero = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 0)
    return dtypes.is_constant(word) and word.owner.attributes["value"] == zero


def _extreme(
    operation: str,
    dtype: np.dtype,
    emit: Callable[..., ir.Value | None],
    bits: ir.Value,
    condition: ir.Value | None,
) -> ir.Value | None:
    """Maximum or minimum of floats, which no instruction has.

    The bits of floats without a sign are in their order as signed integers, and any
    float with a sign is less; the bits of those with a sign are in reverse order as
    unsigned integers, and any float without a sign is less than these.
    """
    integer = np.dtype(f"int{8 * dtype.itemsize}")
    number = dtypes.bitcast(bits, dtype)
    is_nan = arith.cmpf(arith.CmpFPredicate.UNO, number, number)
    # A NaN beyond all numbers stays, whatever it is compared with later.
    last = -1 if operation == "min" else (1 << 8 * dtype.itemsize - 1) - 1
    bits = arith.select(is_nan, dtypes.constant(last, integer), bits)
    zero = dtypes.constant(0, integer)
    signed = arith.cmpi(arith.CmpIPredicate.slt, bits, zero)
    others = arith.cmpi(arith.CmpIPredicate.sge, bits, zero)
    other = "max" if operation == "min" else "min"
    width = 8 * dtype.itemsize
    # Each thread executes one of the two; the result of the other one is 0.
    first = emit(f"{other}.u{width}", [bits], control.both(condition, signed))
    second = emit(f"{operation}.s{width}", [bits], control.both(condition, others))
    return None if first is None or second is None else arith.ori(first, second)


# --- old elements of replicas ---------------------------------------------------------


def replicas(layout: Placement | None) -> tuple[int, ...]:
    """The bits of the thread index in which threads hold the same elements."""
    warp = module.current().issuer == "warp"
    if layout is None:
        return tuple(range(LANE_BITS if warp else THREAD_BITS))
    bits = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    # The arrays of different warps are not copies.
    return tuple(b for b in bits if not (warp and b >= LANE_BITS))


def scratch_bytes(layout: Placement | None, dtype: np.dtype) -> int:
    """SMEM with which warps exchange the old elements of one register; 0 for none."""
    crosses = any(bit >= LANE_BITS for bit in replicas(layout))
    return THREADS * dtype.itemsize if crosses else 0


def shared(
    values: list[ir.Value],
    integer: np.dtype,
    copies: Sequence[int],
    room: scratches.SmemScratch | None,
) -> list[ir.Value]:
    """Integers of the threads in which these bits are clear, in all threads.

    PTX: `shfl.sync.idx` in a warp; across warps through SMEM. All threads of the issuer
    issue it.
    """
    if lanes := sum(1 << bit for bit in copies if bit < LANE_BITS):
        kernel = module.current()
        source = arith.andi(kernel.threads.lane, kernel.i32(~lanes))
        values = [_of_lane(value, integer, source) for value in values]
    warps = [bit for bit in copies if bit >= LANE_BITS]
    if not warps:
        return values
    each = THREADS * integer.itemsize
    room = scratches.require(room, each, "the old values of an atomic operation")
    kept = (THREADS - 1) & ~sum(1 << bit for bit in warps)
    columns = [
        integer.itemsize << bit if kept >> bit & 1 else 0 for bit in range(THREAD_BITS)
    ]
    place = addressing.offset_pointer(room.pointer, addressing.thread_sum(columns))
    together, result = max(1, room.size_bytes // each), []
    type_ = dtypes.mlir_type(integer)
    first = addressing.thread_bits_clear(warps)
    for start in range(0, len(values), together):
        part = values[start : start + together]
        slots = [addressing.offset_pointer(place, i * each) for i in range(len(part))]
        # Another warp may still read what the scratch held before.
        mbarrier.warpgroup_barrier()
        with predicated(first):
            for value, slot in zip(part, slots, strict=True):
                llvm.store(value, slot)
        mbarrier.warpgroup_barrier()
        result += [llvm.load(type_, slot) for slot in slots]
    return result


def _of_lane(value: ir.Value, integer: np.dtype, lane: ir.Value) -> ir.Value:
    single = dtypes.splat(value, 1)
    moved = shuffle.by_words(single, integer, lambda x: shuffle.from_lane(x, lane))
    return dtypes.extract(moved, 0)
