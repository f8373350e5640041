# SPDX-License-Identifier: Apache-2.0
"""Parts of arrays in memory, loads and stores, copies and their waits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref
from jaxlib.mosaic.python import tpu

from pallas_gpu import errors
from pallas_gpu.layouts.window import Window
from pallas_gpu.sparsecore.emitters.values import (
    WORD_BYTES,
    Array,
    ArrayType,
    Handle,
    i32,
    index,
    known,
    memref_type,
    vector_type,
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an array in memory; starts are numbers or i32 values."""

    handle: Handle
    window: Window

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.window.shape


def view(part: Part) -> ir.Value:
    """Returns a part as an array of its own: slice, then squeeze."""
    handle, window = part.handle, part.window
    if window.is_transposed:
        raise errors.UnsupportedError(
            "a copy of a transposed reference",
            expected="the axes in the array's order",
            got=f"axes {list(window.axes)}",
            hint="transpose the array before the call",
        )
    found = handle.memref
    element = ir.MemRefType(found.type).element_type
    if not (
        window.sizes == window.array_shape
        and window.starts == (0,) * len(window.starts)
    ):
        t = memref_type(window.sizes, element, handle.space)
        rows = window.squeezed if handle.space == "hbm" else ()
        given = enumerate(zip(window.starts, window.multiples, strict=True))
        starts = [_known(*start, is_row=axis in rows) for axis, start in given]
        found = tpu.memref_slice(t, found, starts, [])
    if window.squeezed:
        t = memref_type(window.shape, element, handle.space)
        found = tpu.memref_squeeze(t, found)
    return found


def _known(start: Any, multiple: int, *, is_row: bool) -> ir.Value:
    """Returns a start with what is known of it: libtpu looks for whole tiles.

    It refuses the last of an odd number of rows in HBM where it sees that number.
    """
    constant = known(start)
    if constant is not None:
        multiple = constant if is_row else 1
    return tpu.assume_multiple(i32(start), multiple) if multiple > 1 else i32(start)


# --- loads and stores -----------------------------------------------------------------


def _positions(part: Part, elements: int) -> Iterator[list[ir.Value]]:
    """Yields the indices of the first element of each register of a part.

    The last axis of the array is one of the part, and holds whole registers.
    """
    window = part.window
    rank = len(window.sizes)
    counts = [*window.sizes[:-1], window.sizes[-1] // elements]
    steps = [1] * (rank - 1) + [elements]
    for at in itertools.product(*(range(n) for n in counts)):
        yield [
            index(_plus(start, i * step))
            for start, i, step in zip(window.starts, at, steps, strict=True)
        ]


def _plus(start: Any, offset: int) -> Any:
    if isinstance(start, int):
        return start + offset
    return start if not offset else arith.addi(start, i32(offset))


def _require_rows(part: Part, elements: int) -> None:
    window = part.window
    last = len(window.sizes) - 1
    if window.is_transposed or last not in window.axes or window.sizes[-1] % elements:
        raise errors.ShapeError(
            "a part of VMEM that is not rows of whole registers",
            expected=f"a multiple of {elements} elements of the last dimension",
            got=f"{list(window.shape)} of {list(window.array_shape)}",
            hint="load a register at a time, or use plsc.load_gather",
        )


def load(part: Part, elements: int) -> Array:
    """Loads a part: a scalar from SMEM, or registers from VMEM.

    Args:
      elements: of a register.
    """
    handle, window = part.handle, part.window
    if math.prod(window.shape) == 1:
        loaded = memref.load(handle.memref, [index(i) for i in window.starts])
        return Array(window.shape, handle.dtype, (loaded,))
    _require_rows(part, elements)
    t = vector_type(elements, handle.dtype)
    parts = [tpu.vector_load(t, handle.memref, at) for at in _positions(part, elements)]
    return Array(window.shape, handle.dtype, tuple(parts))


def store(part: Part, value: Array, elements: int, *, add: bool = False) -> None:
    """Stores a value to a part, or adds it."""
    handle, window = part.handle, part.window
    if math.prod(window.shape) == 1:
        _store_scalar(part, value.value, add=add)
        return
    _require_rows(part, elements)
    for x, at in zip(value.parts, _positions(part, elements), strict=True):
        if add and handle.dtype.itemsize < WORD_BYTES:
            # No store adds bytes; on v5p and v6e none adds narrow elements.
            t = vector_type(elements, handle.dtype)
            before = tpu.vector_load(t, handle.memref, at)
            tpu.vector_store(_sum(before, x), handle.memref, at)
        else:
            tpu.vector_store(x, handle.memref, at, add=add)


def _sum(x: ir.Value, y: ir.Value) -> ir.Value:
    element = x.type.element_type if isinstance(x.type, ir.VectorType) else x.type
    return (arith.addi if isinstance(element, ir.IntegerType) else arith.addf)(x, y)


def _store_scalar(part: Part, value: ir.Value, *, add: bool) -> None:
    handle, at = part.handle, [index(i) for i in part.window.starts]
    if add:
        value = _sum(memref.load(handle.memref, at), value)
    memref.store(value, handle.memref, at)


def load_indexed(
    handle: Handle, indices: Sequence[ir.Value], mask: Any = None
) -> ir.Value:
    """Loads an element for each lane."""
    elements = ir.VectorType(indices[0].type).shape[0]
    t = vector_type(elements, handle.dtype)
    return tpu.vector_load_idx(t, handle.memref, list(indices), mask=mask)


def store_indexed(
    handle: Handle,
    indices: Sequence[ir.Value],
    value: ir.Value,
    *,
    mask: Any = None,
    add: bool = False,
) -> None:
    """Stores an element of each lane, or adds it, the lowest lane first."""
    tpu.vector_store_idx(value, handle.memref, list(indices), mask=mask, add=add)


def load_expanded(part: Part, mask: ir.Value) -> ir.Value:
    """Loads adjacent elements to the lanes of a mask."""
    t = vector_type(ir.VectorType(mask.type).shape[0], part.handle.dtype)
    at = [index(i) for i in part.window.starts]
    return tpu.vector_load(t, part.handle.memref, at, mask=mask)


def store_compressed(
    part: Part, value: ir.Value, mask: ir.Value, *, add: bool = False
) -> None:
    """Stores the lanes of a mask to adjacent elements, or adds them."""
    at = [index(i) for i in part.window.starts]
    tpu.vector_store(value, part.handle.memref, at, mask=mask, add=add)


# --- allocation -----------------------------------------------------------------------


def allocate(array: ArrayType) -> Handle:
    """Returns an array that lives as long as the enclosing region."""
    return array.handle(memref.alloca(array.type, [], []))


def semaphores(shape: Sequence[int], kind: str) -> Handle:
    """Returns semaphores, `dma_semaphore` or `semaphore`, of the enclosing region."""
    t = memref_type(shape, ir.Type.parse(f"!tpu.{kind}"), "semaphore_mem")
    return Handle(tpu.sem_alloc(t), tuple(shape), None, "semaphore_mem")


# --- copies ---------------------------------------------------------------------------


def start_copy(
    src: Part,
    dst: Part,
    indices: Any,
    semaphore: Part,
    *,
    priority: int,
    ignored: int | None,
    add: bool,
) -> None:
    """Starts a copy, which adds its size to the semaphore.

    Args:
      indices: of the rows that are copied, a `Part` or a register; None for all.
      ignored: the index of rows that are not copied, or None.
    """
    sides = view(src), view(dst)
    if indices is None:
        tpu.enqueue_dma(*sides, target_semaphore=view(semaphore), priority=priority)
        return
    named = view(indices) if isinstance(indices, Part) else indices.value
    without = None if ignored is None else i32(ignored)
    tpu.enqueue_indirect_dma(
        *sides, named, view(semaphore), offset_filter=without, add=add
    )


def wait_copy(src: Part, dst: Part, semaphore: Part, *, of_rows: bool) -> None:
    """Waits for a copy, of all or of rows that indices name."""
    wait = tpu.wait_indirect_dma if of_rows else tpu.wait_dma2
    wait(view(semaphore), view(src), view(dst))
