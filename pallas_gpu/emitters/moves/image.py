# SPDX-License-Identifier: Apache-2.0
"""An image in the scratch of a warpgroup: its addresses, and stores of arrays to it.

An image that is larger than the scratch goes through it in several rounds, of which
each stores and loads a span of the image's addresses: `in_rounds`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_gpu.emitters import addressing, control, module, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.padding import inside_from
from pallas_gpu.emitters.registers import Iota, RegisterArray
from pallas_gpu.layouts.moves.least_scratch import IMAGE_BYTES
from pallas_gpu.layouts.moves.rearrange import Addresses, Affine, addresses
from pallas_gpu.layouts.registers.linear import LinearLayout
from pallas_gpu.layouts.registers.placement import Placement, uniform_length

# The image starts on such a boundary, and so does each span.
ALIGNMENT_BYTES = IMAGE_BYTES
# More rounds than this are a loop, whose code does not know which registers a round
# moves: it tests each element. Estimate.
MOST_EMITTED = 8


@dataclasses.dataclass(frozen=True)
class Span:
    """The addresses of an image that are in the scratch in a round.

    Attributes:
      low: the first one; a value, i32, where the rounds are a loop.
      size: their number, likewise.
    """

    low: int | ir.Value
    size: int | ir.Value

    def bounds(self) -> tuple[int, int] | None:
        """From, up to; None if they are values."""
        if isinstance(self.low, int) and isinstance(self.size, int):
            return self.low, self.low + self.size
        return None

    def relative(self, address: ir.Value) -> ir.Value:
        """An address counted from the first one."""
        if isinstance(self.low, int):
            return plus(address, -self.low)
        return arith.subi(address, self.low)

    def holds(self, relative: ir.Value) -> ir.Value:
        """Whether a relative address is in the span; one unsigned comparison."""
        end = module.current().i32(self.size)
        return arith.cmpi(arith.CmpIPredicate.ult, relative, end)

    def times(self, factor: int) -> Span:
        """The span in a smaller unit: from elements to bytes."""
        low, size = (
            x * factor
            if isinstance(x, int)
            else arith.muli(x, module.current().i32(factor))
            for x in (self.low, self.size)
        )
        return Span(low, size)


def size_bytes(elements: int, dtype: np.dtype) -> int:
    """The scratch with which an image takes a single round."""
    return aligned(elements * dtypes.memory_dtype(dtype).itemsize)


def aligned(number: int) -> int:
    """The next boundary of an image."""
    return -(-number // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def in_rounds(
    total: int,
    most: int,
    values: Sequence[ir.Value],
    move: Callable[[Span | None, Sequence[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """Calls `move(span, values)`, which returns new values, for each round.

    Args:
      total, most: addresses in all, and of a round. A single round has the span None.
      values: before the first round.
    """
    if total <= most:
        return list(move(None, values))
    if total <= MOST_EMITTED * most:
        for low in range(0, total, most):
            values = move(Span(low, min(most, total - low)), values)
        return list(values)
    i32 = module.current().i32
    loop = scf.ForOp(i32(0), i32(total), i32(most), list(values))
    with ir.InsertionPoint(loop.body):
        low = loop.induction_variable
        span = Span(low, arith.minui(arith.subi(i32(total), low), i32(most)))
        scf.yield_(list(move(span, list(loop.inner_iter_args))))
    return list(loop.results)


def in_memory(x: RegisterArray) -> RegisterArray:
    """The array with its elements as they are in memory: a bool is a byte."""
    memory = dtypes.memory_dtype(x.dtype)
    values = [convert_value(value, x.dtype, memory) for value in x.values]
    return x.with_values(values, memory)


# --- addresses ------------------------------------------------------------------------


def thread_offset(found: Addresses) -> tuple[ir.Value | None, int]:
    """What depends on the thread, as a value that is not negative, and a constant."""
    up = [max(c, 0) for c in found.columns]
    down = [max(-c, 0) for c in found.columns]
    if not any(down):
        return (addressing.thread_sum(up) if any(up) else None), 0
    kernel, most = module.current(), sum(down)

    def emit() -> ir.Value:
        rest = arith.subi(kernel.i32(most), addressing.thread_sum(down))
        return arith.addi(rest, addressing.thread_sum(up)) if any(up) else rest

    return kernel.hoisted(("signed sum", found.columns), emit), -most


def computed(
    layout: Placement, where: Affine, coordinates: Sequence[Sequence[ir.Value]]
) -> list[ir.Value]:
    """The addresses of each register's elements, as i32 vectors, of any layout."""
    result = []
    for r in range(layout.num_registers):
        total = like(where.offset, coordinates[0][r])
        for stride, values in zip(where.strides, coordinates, strict=True):
            if stride:
                step = arith.muli(values[r], like(stride, values[r]))
                total = arith.addi(total, step)
        result.append(total)
    return result


def coordinates_of(layout: Placement, axis: int) -> tuple[ir.Value, ...]:
    return Iota(dtypes.I32, layout.shape, axis).materialize(layout).values


def like(value: int, vector: ir.Value) -> ir.Value:
    return dtypes.constant(value, dtypes.I32, vector)


def plus(a: ir.Value | None, b: int) -> ir.Value:
    constant = module.current().i32(b)
    if a is None:
        return constant
    return a if b == 0 else arith.addi(a, constant)


# --- stores ---------------------------------------------------------------------------


def store(
    x: RegisterArray, where: Affine, pointer: ir.Value, span: Span | None
) -> None:
    """Stores an array, or what of it belongs into a span."""
    layout = x.layout
    copies = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    with control.predicated(addressing.thread_bits_clear(copies)):
        found = addresses(layout, where, x.dtype.itemsize)
        if found is None:
            stores = list(_computed_stores(x, where, pointer, span))
        else:
            stores = list(_summed_stores(x, found, pointer, span))
        for _, group in itertools.groupby(stores, _Store.key):
            alike = list(group)
            with control.predicated(alike[0].condition):
                for store in alike:
                    store.emit()


@dataclasses.dataclass(frozen=True)
class _Store:
    """A store of a vector, and the i1 under which it is executed."""

    condition: ir.Value | None
    value: ir.Value
    pointer: ir.Value
    offsets: tuple[int | ir.Value, ...]

    def key(self) -> int | None:
        """Identifies the condition: MLIR's values cannot be compared with None."""
        return None if self.condition is None else hash(self.condition)

    def emit(self) -> None:
        llvm.store(self.value, addressing.offset_pointer(self.pointer, *self.offsets))


def _computed_stores(
    x: RegisterArray, where: Affine, pointer: ir.Value, span: Span | None
) -> Iterator[_Store]:
    """Stores to addresses that are computed for each element."""
    axes = range(len(x.layout.shape))
    coordinates = [coordinates_of(x.layout, a) for a in axes]
    registers = computed(x.layout, where.scaled(x.dtype.itemsize), coordinates)
    for r, (value, places) in enumerate(zip(x.values, registers, strict=True)):
        for i in range(x.layout.vector_length):
            place = dtypes.extract(places, i)
            place = place if span is None else span.relative(place)
            yield _single_store(x, r, i, place, value, pointer, span)


def _summed_stores(
    x: RegisterArray, found: Addresses, pointer: ir.Value, span: Span | None
) -> Iterator[_Store]:
    """Stores to addresses that are a sum of the thread's and the register's part."""
    base, constant = thread_offset(found)
    start = pointer if base is None else addressing.offset_pointer(pointer, base)
    width = math.gcd(found.width, uniform_length(x.layout))
    for r, value in enumerate(x.values):
        low, high = found.bounds(r)
        origin = found.origins[r] + constant
        bounds = (low, high + 1) if span is None else span.bounds()
        if bounds and bounds[0] <= low and high < bounds[1]:
            shift = origin - (0 if span is None else bounds[0])
            for i, chunk in enumerate(smem.split(value, width)):
                condition = inside_from(x.layout, r, i * width)
                step = i * width * found.step
                yield _Store(condition, chunk, start, (shift + step,))
        elif not bounds or (low < bounds[1] and bounds[0] <= high):
            assert span is not None
            # The sum of base and span is that of all registers, which saves some.
            relative = span.relative(plus(base, 0))
            for i in range(found.length):
                place = plus(relative, origin + i * found.step)
                yield _single_store(x, r, i, place, value, pointer, span)


def _single_store(
    x: RegisterArray,
    register: int,
    i: int,
    place: ir.Value,
    value: ir.Value,
    pointer: ir.Value,
    span: Span | None,
) -> _Store:
    condition = inside_from(x.layout, register, i)
    if span is not None:
        condition = control.both(condition, span.holds(place))
    return _Store(condition, element(value, i), pointer, (place,))


def element(value: ir.Value, i: int) -> ir.Value:
    return dtypes.pack([dtypes.extract(value, i)])
