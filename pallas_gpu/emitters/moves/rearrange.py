# SPDX-License-Identifier: Apache-2.0
"""Moves elements between threads by way of SMEM: `layouts/moves/rearrange.py`'s plans.

Operands are stored to an image in the scratch of the warpgroup; after a barrier the
result is loaded from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.emitters import addressing, control, mbarrier, module, smem
from pallas_gpu.emitters.elements import dtypes, scalars
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.moves import image
from pallas_gpu.emitters.moves.scratch import SmemScratch, require
from pallas_gpu.emitters.padding import inside_from, is_padded
from pallas_gpu.emitters.registers import Array, Deferred, RegisterArray, Splat
from pallas_gpu.layouts.moves.least_scratch import IMAGE_BYTES
from pallas_gpu.layouts.moves.rearrange import (
    Addresses,
    Affine,
    Rearrangement,
    addresses,
    extent,
)
from pallas_gpu.layouts.registers.placement import Placement


def rearrange(
    plan: Rearrangement,
    operands: Sequence[RegisterArray],
    target: Placement,
    scratch: SmemScratch | None,
    *,
    starts: Sequence[ir.Value] = (),
    other: Array | None = None,
) -> RegisterArray:
    """Stores operands to scratch in SMEM and loads the result from there.

    PTX: `st.shared`, `barrier.sync`, `ld.shared`. All threads of the warpgroup issue
    it.

    Args:
      plan: where the elements are.
      operands: one for each of the plan's sources, of one dtype.
      target: the result's layout.
      scratch: less than the image means rounds.
      starts: i32, for each of the plan's dynamic axes.
      other: the elements that the plan does not load, of the result's shape.

    Raises:
      OutOfResources: the scratch is too small.
    """
    dtype = operands[0].dtype
    scratch = require(scratch, IMAGE_BYTES, "moving data between threads")
    pointer, memory = scratch.pointer, dtypes.memory_dtype(dtype)
    held = [image.in_memory(x) for x in operands]
    loads = Loads(plan, target, memory, tuple(starts), pointer)
    if other is None:
        other = Splat(dtypes.constant(0, memory), memory, plan.shape)
    placed = other.materialize(target) if isinstance(other, Deferred) else other

    def move(span: image.Span | None, values: Sequence[ir.Value]) -> list[ir.Value]:
        # Threads may still be reading what an earlier use stored in the scratch.
        mbarrier.synchronize()
        for where, x in zip(plan.sources, held, strict=True):
            image.store(x, where, pointer, span)
        mbarrier.synchronize()
        return [loads.register(r, value, span) for r, value in enumerate(values)]

    values = image.in_rounds(
        plan.size * memory.itemsize,
        scratch.size_bytes,
        image.in_memory(placed).values,
        move,
    )
    final = tuple(convert_value(value, memory, dtype) for value in values)
    return RegisterArray(final, target, dtype)


# --- loads ----------------------------------------------------------------------------


@dataclasses.dataclass
class Loads:
    """The loads of a result.

    Attributes:
      plan, target: what is loaded, in which layout.
      dtype: of the elements in memory.
      starts: i32, for each of the plan's dynamic axes.
      pointer: the scratch.
    """

    plan: Rearrangement
    target: Placement
    dtype: np.dtype
    starts: tuple[ir.Value, ...]
    pointer: ir.Value

    @functools.cached_property
    def dynamic(self) -> dict[int, ir.Value]:
        """The value that is added to the first coordinate, by axis."""
        return dict(zip(self.plan.dynamic, self.starts, strict=True))

    @functools.cached_property
    def where(self) -> Affine:
        """The bytes of the result's elements, by their coordinates, without steps."""
        affine = self.plan.result
        moved = sum(
            f * s for f, s in zip(self.plan.firsts, affine.strides, strict=True)
        )
        return Affine(affine.offset - moved, affine.strides)

    @functools.cached_property
    def found(self) -> Addresses | None:
        """The addresses as sums; None if they must be computed for each element."""
        if any(step != 1 for step in self.plan.steps):
            return None
        multiple = 0
        for axis, start in self.dynamic.items():
            stride = self.plan.result.strides[axis]
            multiple = math.gcd(multiple, scalars.divisor(start) * stride)
        return addresses(self.target, self.where, self.dtype.itemsize, multiple)

    @functools.cached_property
    def base(self) -> tuple[ir.Value | None, int]:
        """What is common to all registers: a value and a constant, in bytes."""
        assert self.found is not None
        base, constant = image.thread_offset(self.found)
        for axis, start in self.dynamic.items():
            stride = self.plan.result.strides[axis] * self.dtype.itemsize
            moved = arith.muli(start, module.current().i32(-stride))
            base = moved if base is None else arith.addi(base, moved)
        return base, constant

    @functools.cached_property
    def start(self) -> ir.Value:
        """The pointer of what is common to all registers."""
        base, _ = self.base
        if base is None:
            return self.pointer
        return addressing.offset_pointer(self.pointer, base)

    @functools.cached_property
    def indices(self) -> list[list[ir.Value]]:
        """For each axis the number of each element among those that are loaded."""
        result = []
        for axis, step in enumerate(self.plan.steps):
            values = self._from_first(axis)
            if step > 1:
                values = [arith.divui(v, image.like(step, v)) for v in values]
            result.append(values)
        return result

    def _from_first(self, axis: int) -> list[ir.Value]:
        """The coordinates, less the first that is loaded."""
        return [
            self._relative(value, axis)
            for value in image.coordinates_of(self.target, axis)
        ]

    def _relative(self, value: ir.Value, axis: int) -> ir.Value:
        first = self.plan.firsts[axis]
        if first:
            value = arith.subi(value, image.like(first, value))
        if axis in self.dynamic:
            start = dtypes.splat(self.dynamic[axis], dtypes.length(value) or 1)
            value = arith.subi(value, start)
        return value

    @functools.cached_property
    def computed(self) -> list[ir.Value]:
        """The addresses of each register's elements, as i32 vectors."""
        scaled = self.plan.result.scaled(self.dtype.itemsize)
        return image.computed(self.target, scaled, self.indices)

    # --- which elements ---------------------------------------------------------------

    @functools.cached_property
    def bounded(self) -> list[tuple[int, list[ir.Value]]]:
        """The axes on which not all coordinates are loaded, with the coordinates."""
        axes = [a for a, count in enumerate(self.plan.counts) if count is not None]
        return [(a, self._from_first(a)) for a in axes]

    def covered(self, register: int) -> ir.Value | bool:
        """Which elements of a register are loaded: all, none, or a vector of i1."""
        result: ir.Value | None = None
        for axis, relative in self.bounded:
            if axis not in self.dynamic and self.plan.steps[axis] == 1:
                low, high = extent(self.target, register, axis)
                first, count = self.plan.firsts[axis], self.plan.counts[axis]
                assert count is not None
                if high < first or low >= first + count:
                    return False
                if low >= first and high < first + count:
                    continue
            holds = self._covered_on(axis, relative[register])
            result = holds if result is None else arith.andi(result, holds)
        return True if result is None else result

    def _covered_on(self, axis: int, relative: ir.Value) -> ir.Value:
        count, step = self.plan.counts[axis], self.plan.steps[axis]
        assert count is not None
        end = max((count - 1) * step + 1, 0)
        holds = arith.cmpi(arith.CmpIPredicate.ult, relative, image.like(end, relative))
        if step == 1:
            return holds
        rest = arith.remui(relative, image.like(step, relative))
        whole = arith.cmpi(arith.CmpIPredicate.eq, rest, image.like(0, rest))
        return arith.andi(holds, whole)

    # --- a register -------------------------------------------------------------------

    def register(self, r: int, before: ir.Value, span: image.Span | None) -> ir.Value:
        """A register with the elements that are loaded in a span, or were before."""
        covered = self.covered(r)
        if covered is False:
            return before
        if covered is True and self.found is not None:
            low, high = self.found.bounds(r)
            bounds = (
                span.bounds() if span else (0, self.plan.size * self.dtype.itemsize)
            )
            # What is loaded into padding does not matter, if it is in the image.
            unpadded = span is None and not is_padded(self.target)
            if unpadded:
                return self._whole(r, 0)
            if bounds and not self.dynamic:
                if bounds[0] <= low and high < bounds[1]:
                    return self._whole(r, bounds[0])
                if high < bounds[0] or bounds[1] <= low:
                    return before
        return self._elements(r, before, covered, span)

    def _whole(self, r: int, origin: int) -> ir.Value:
        assert self.found is not None
        found, (_, constant) = self.found, self.base
        type_ = dtypes.vector_type(self.dtype, found.width)
        first = found.origins[r] + constant - origin
        places = [first + i * found.step for i in range(0, found.length, found.width)]
        return smem.concatenate(
            [llvm.load(type_, addressing.offset_pointer(self.start, p)) for p in places]
        )

    def _elements(
        self,
        r: int,
        before: ir.Value,
        covered: ir.Value | bool,
        span: image.Span | None,
    ) -> ir.Value:
        """Loads each element by itself; those that are not loaded read the first."""
        type_ = dtypes.vector_type(self.dtype, 1)
        length = self.target.vector_length
        result = []
        for i in range(length):
            place = self._place(r, i, span)
            asked = None if covered is True else dtypes.extract(covered, i)
            holds = control.both(asked, inside_from(self.target, r, i))
            if span is not None:
                holds = control.both(holds, span.holds(place))
            if holds is not None:
                place = arith.select(holds, place, module.current().i32(0))
            at = addressing.offset_pointer(self.pointer, place)
            value = dtypes.extract(llvm.load(type_, at), 0)
            if holds is not None:
                value = arith.select(holds, value, dtypes.extract(before, i))
            result.append(value)
        return dtypes.pack(result)

    def _place(self, r: int, i: int, span: image.Span | None) -> ir.Value:
        """i32: the address of an element of a register, counted from the span's."""
        if self.found is None:
            place = dtypes.extract(self.computed[r], i)
            return place if span is None else span.relative(place)
        base, constant = self.base
        if span is not None:
            base = span.relative(image.plus(base, 0))
        return image.plus(base, self.found.origins[r] + constant + i * self.found.step)
