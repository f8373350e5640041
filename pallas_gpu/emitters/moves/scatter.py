# SPDX-License-Identifier: Apache-2.0
"""Updates of an array in registers at positions that are values: by way of SMEM.

The result does not depend on the schedule of threads. Where positions may be equal,
each thread owns some of the array's elements and applies their updates in order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, scf

from pallas_gpu.emitters import addressing, control, mbarrier, module
from pallas_gpu.emitters.elements import arith, dtypes, table
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.moves import image
from pallas_gpu.emitters.moves.gather import position_pointer
from pallas_gpu.emitters.moves.rearrange import Loads
from pallas_gpu.emitters.moves.scratch import SmemScratch, require
from pallas_gpu.emitters.padding import inside_from
from pallas_gpu.emitters.registers import RegisterArray
from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.layouts.moves.least_scratch import SCATTER_BYTES
from pallas_gpu.layouts.moves.rearrange import Affine
from pallas_gpu.layouts.registers.linear import LinearLayout

Kind = Literal["set", "add", "mul", "max", "min"]


def wanted_bytes(elements: int, updates: int, dtype: np.dtype, unique: bool) -> int:
    """The scratch with which a scatter takes a single round.

    Args:
      elements: of the array.
      updates: their number.
      dtype: of both.
      unique: whether no two positions are equal.
    """
    size = image.size_bytes(elements, dtype)
    if unique:
        return size
    queue = image.size_bytes(updates, dtypes.I32) + image.size_bytes(updates, dtype)
    return size + queue


def scatter(
    kind: Kind,
    x: RegisterArray,
    index: RegisterArray,
    updates: RegisterArray,
    scratch: SmemScratch | None,
    *,
    unique: bool = False,
) -> RegisterArray:
    """Combines elements of an array with updates.

    PTX: `st.shared`, `ld.shared`, `barrier.sync`. All threads of the warpgroup issue
    it.

    Args:
      kind: what an update does to the element at its position.
      index: i32: the position of each update in the row-major order of `x`. Updates of
        positions outside of it are dropped.
      updates: of the shape and layout of `index`.
      scratch: less than `wanted_bytes` means rounds; at least 96 bytes.
      unique: no two positions are equal.

    Returns:
      An array in the layout of `x`. Updates of one element are applied in their
      row-major order.

    Raises:
      OutOfResources: the scratch is too small.
    """
    held = image.in_memory(x)
    size = math.prod(x.shape)
    scratch = require(scratch, SCATTER_BYTES, "a scatter")
    queue, room = None, scratch.size_bytes
    if not unique:
        image_bytes = image.size_bytes(size, x.dtype)
        queue = _queue(index, image.in_memory(updates), scratch, image_bytes)
        room -= queue.size_bytes
    pointer, itemsize = scratch.pointer, held.dtype.itemsize
    target = _Target(pointer, x.dtype, held.dtype, _combining(kind, x.dtype))
    plan = plans.reshape(x.shape, x.shape)
    loads = Loads(plan, x.layout, held.dtype, (), pointer)

    def move(span: image.Span | None, values: Sequence[ir.Value]) -> list[ir.Value]:
        part, span = span or image.Span(0, size), span and span.times(itemsize)
        # Threads may still be reading what an earlier use stored in the scratch.
        mbarrier.synchronize()
        image.store(held, plan.sources[0], pointer, span)
        if queue is None:
            mbarrier.synchronize()
            _update_own(target, index, image.in_memory(updates), part)
        else:
            queue.apply(target, part)
        mbarrier.synchronize()
        return [loads.register(r, value, span) for r, value in enumerate(values)]

    values = image.in_rounds(size, room // itemsize, held.values, move)
    final = tuple(convert_value(v, held.dtype, x.dtype) for v in values)
    return RegisterArray(final, x.layout, x.dtype)


def _combining(kind: Kind, dtype: np.dtype) -> Callable[..., ir.Value] | None:
    return None if kind == "set" else table.lookup(kind).emitter(dtype)


@dataclasses.dataclass(frozen=True)
class _Target:
    """The image of the array, and what an update does to an element of it.

    Attributes:
      pointer: the image.
      dtype, memory: of an element in registers and in memory.
      combine: None for an update that replaces the element.
    """

    pointer: ir.Value
    dtype: np.dtype
    memory: np.dtype
    combine: Callable[..., ir.Value] | None

    def update(self, position: ir.Value, value: ir.Value) -> None:
        """Applies an update, a vector of one element in memory's type."""
        place = position_pointer(self.pointer, position, self.memory.itemsize)
        if self.combine is not None:
            old = llvm.load(value.type, place)
            operands = [convert_value(v, self.memory, self.dtype) for v in (old, value)]
            value = convert_value(self.combine(*operands), self.dtype, self.memory)
        llvm.store(value, place)


def _update_own(
    target: _Target,
    index: RegisterArray,
    updates: RegisterArray,
    span: image.Span,
) -> None:
    """Each thread applies the updates in its registers."""
    layout = index.layout
    copies = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    with control.predicated(addressing.thread_bits_clear(copies)):
        for r, (positions, values) in enumerate(
            zip(index.values, updates.values, strict=True)
        ):
            for i in range(layout.vector_length):
                position = span.relative(dtypes.extract(positions, i))
                holds = control.both(inside_from(layout, r, i), span.holds(position))
                with control.predicated(holds):
                    target.update(position, image.element(values, i))


# --- updates in order -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Queue:
    """Updates in SMEM, in their row-major order, some of them at a time.

    Attributes:
      index, updates: all of them, as they are in memory.
      pointer: the positions in SMEM; the updates follow.
      count: updates in SMEM at a time: both parts start on boundaries of 16 bytes.
    """

    index: RegisterArray
    updates: RegisterArray
    pointer: ir.Value
    count: int

    @property
    def size_bytes(self) -> int:
        """The scratch that it occupies."""
        return self.count * (dtypes.I32.itemsize + self.updates.dtype.itemsize)

    def apply(self, target: _Target, span: image.Span) -> None:
        """Applies the updates of a span of positions."""
        where = Affine.row_major(self.index.shape)
        total = math.prod(self.index.shape)
        values = addressing.offset_pointer(
            self.pointer, self.count * dtypes.I32.itemsize
        )

        def move(part: image.Span | None, _: Sequence[ir.Value]) -> list[ir.Value]:
            if part is not None:
                mbarrier.synchronize()
            for x, pointer in ((self.index, self.pointer), (self.updates, values)):
                image.store(x, where, pointer, part and part.times(x.dtype.itemsize))
            mbarrier.synchronize()
            self._loop(target, values, part.size if part else total, span)
            return []

        image.in_rounds(total, self.count, [], move)

    def _loop(
        self, target: _Target, values: ir.Value, count: int | ir.Value, span: image.Span
    ) -> None:
        """Each thread applies, in order, the updates of the elements that it owns."""
        kernel = module.current()
        thread, bits = kernel.issuer_thread, kernel.issuer_threads - 1
        position_type = dtypes.vector_type(dtypes.I32, 1)
        value_type = dtypes.vector_type(self.updates.dtype, 1)
        loop = scf.ForOp(kernel.i32(0), kernel.i32(count), kernel.i32(1))
        with ir.InsertionPoint(loop.body):
            k = loop.induction_variable
            place = position_pointer(self.pointer, k, dtypes.I32.itemsize)
            position = dtypes.extract(llvm.load(position_type, place), 0)
            owner = arith.andi(position, kernel.i32(bits))
            own = arith.cmpi(arith.CmpIPredicate.eq, owner, thread)
            position = span.relative(position)
            with control.predicated(control.both(own, span.holds(position))):
                source = position_pointer(values, k, self.updates.dtype.itemsize)
                target.update(position, llvm.load(value_type, source))
            scf.yield_([])


def _queue(
    index: RegisterArray, updates: RegisterArray, scratch: SmemScratch, image_bytes: int
) -> _Queue:
    """Divides the scratch between the image and the queue, which follows it."""
    each = dtypes.I32.itemsize + updates.dtype.itemsize
    total = image.aligned(math.prod(index.shape))
    room = scratch.size_bytes
    count = total
    if image_bytes + total * each > room:
        # Rounds of the queue are cheaper than rounds of the image, which repeat it.
        granule = image.ALIGNMENT_BYTES // min(updates.dtype.itemsize, 4)
        left = max(room - image_bytes, room // 4)
        count = min(max(left // each // granule, 1) * granule, total)
    pointer = addressing.offset_pointer(scratch.pointer, room - count * each)
    return _Queue(index, updates, pointer, count)
