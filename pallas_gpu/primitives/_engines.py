# SPDX-License-Identifier: Apache-2.0
"""The engine that carries a copy between GMEM and SMEM: TMA, or the threads.

TMA carries what a tensor map describes. Everything else is copied by threads, from GMEM
by cp.async. The choice is made when the copy is traced, so that the emulator and both
semantics agree on it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import pallas_gpu.layouts as layouts
from pallas_gpu import _jax, errors, types
from pallas_gpu.layouts.gmem.line import UNIT_BYTES, line_bytes
from pallas_gpu.layouts.gmem.thread_copy import ThreadCopy, plan_threads
from pallas_gpu.layouts.gmem.tma_order import paired_axes
from pallas_gpu.layouts.gmem.tma_start import require_start, starts_aligned
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.window import (
    ALLOCATION_ALIGNMENT_BYTES,
    alignment_bytes,
    contiguous_layout,
    require_copy_start,
)
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives.indices import multiples

Engine = types.AsyncCopyImplementation


def threads_load(
    src: Any,
    dst: Any,
    barrier: Any,
    collective_axes: Any,
    implementation: Engine | None,
    who: str,
    *,
    in_bounds: bool = False,
) -> bool:
    """Returns whether threads carry a copy from GMEM to SMEM."""
    by_tma = implementation is Engine.TMA or bool(collective_axes)
    if by_tma and barrier is None:
        raise errors.MemorySpaceError(
            f"{who}: the barrier is missing",
            expected="a barrier that the copy by TMA completes on",
            got="barrier=None",
            hint="declare plgpu.Barrier() in scratch_types (pallas_call: "
            "scratch_shapes) and pass it",
        )
    if implementation is Engine.CP_ASYNC and collective_axes:
        raise errors.UnsupportedError(
            f"{who}: cp.async has no multicast",
            expected="TMA for a copy with collective_axes",
            got="implementation=CP_ASYNC",
            hint="leave implementation out",
        )
    if by_tma:
        return False
    if implementation is not None or barrier is None:
        return True
    return _threads_carry(src, dst, who, store=False, in_bounds=in_bounds)


def require_nan_fill(src: Any, by_threads: bool, who: str) -> None:
    """Raises unless a copy can fill with NaN."""
    dtype = np.dtype(src.dtype)
    if types.kind(dtype) != "float":
        raise errors.DTypeError(
            f"{who}: these elements have no fill with NaN",
            expected="float16, bfloat16, float32 or float64 for OOBFillMode.NAN",
            got=dtype,
            hint="use OOBFillMode.ZEROS, and select elements with jnp.where",
        )
    if by_threads:
        raise errors.UnsupportedError(
            f"{who}: cp.async fills with zeros alone",
            expected="a copy that TMA carries, on a barrier, for OOBFillMode.NAN",
            got=f"{types.describe(src)}, which threads copy",
            hint="start at what is known to be a multiple of 16 bytes in GMEM, and of "
            "128 in SMEM (plgpu.multiple_of), in an array whose rows are multiples of "
            "16 bytes, and pass a barrier",
        )


def threads_store(src: Any, dst: Any, who: str) -> bool:
    """Returns whether threads carry a copy from SMEM to GMEM."""
    return _threads_carry(dst, src, who, store=True)


def _threads_carry(
    gmem: Any, smem: Any, who: str, *, store: bool, in_bounds: bool = False
) -> bool:
    """Returns whether threads carry a copy that leaves the choice open."""
    sides = Side.of(gmem), Side.of(smem)
    (window, part), divisor = (side.window for side in sides), multiples.start_divisor
    try:
        unit_bytes = check_copy(*sides, in_bounds=in_bounds)
        bits = types.itemsize_bits(sides[0].dtype)
        require_start(window, bits, who, store=store)
    except (errors.LayoutError, errors.UnsupportedError):
        return for_threads(*sides, store=store)
    except errors.PallasGpuError:
        return False  # the check of the complete kernel refuses it, whoever carries it
    # Where TMA cannot start, the hardware stops the whole launch.
    known_bytes = alignment_bytes(sides[1].layout, part, divisor)
    if starts_aligned(window, bits, divisor) and known_bytes % unit_bytes == 0:
        return False
    return for_threads(*sides, store=store)


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a copy.

    Attributes:
      aval: type of the reference.
      window: the part of it, or of its bytes in another shape.
      dtype: of the elements.
    """

    aval: Any
    window: Window
    dtype: Any

    @classmethod
    def of(cls, ref: Any) -> Side:
        """Returns the side that a reference is, while a kernel is traced."""

        def number(x: Any) -> Any:
            known = not _jax.is_tracer(x) and np.ndim(x) == 0
            return int(x) if known and not isinstance(x, int) else x

        operand, aval = ops.operand(ref), types.base_aval(ref)
        steps = jax.tree.map(number, operand.transforms)
        return cls.at(ops.RefOperand(aval, steps))

    @classmethod
    def at(cls, operand: ops.RefOperand) -> Side:
        """Returns the side that an operand is, whose reference is a type."""
        aval = operand.ref
        return cls(aval, operand.window(tuple(aval.shape)), operand.dtype)

    @classmethod
    def accessed(cls, access: Any) -> Side:
        """Returns the side that an access of a program is."""
        return cls(access.buffer.aval, access.window, access.dtype)

    @functools.cached_property
    def layout(self) -> SmemLayout:
        """How the array is stored in SMEM."""
        aval = self.aval
        layout = types.smem_layout(aval.shape, aval.dtype, aval.transforms)
        bits = types.itemsize_bits(self.dtype)
        return layout.reinterpreted(self.window.array_shape, bits)


def for_threads(gmem: Side, smem: Side, *, store: bool) -> bool:
    """Returns whether threads can carry the copy."""
    try:
        check_threads(gmem, smem, store=store)
    except errors.LayoutError:
        return False
    return True


def check_threads(gmem: Side, smem: Side, *, store: bool) -> ThreadCopy:
    """Raises LayoutError unless threads can carry the copy."""
    return plan_threads(gmem.window, smem.layout, smem.window, store=store)


def check_copy(
    gmem: Side,
    smem: Side,
    pieces: int = 1,
    *,
    allow_line: bool = True,
    in_bounds: bool = False,
) -> int:
    """Returns the alignment in SMEM, in bytes, of a copy that TMA supports.

    Args:
      pieces: number of equal pieces into which the copy is divided.
      allow_line: whether adjacent bytes that no tensor map describes are supported.
      in_bounds: whether the author promises that the part is in bounds.

    Raises:
      LayoutError: TMA does not support the copy.
    """
    gmem_window, layout = gmem.window, smem.layout
    axes = paired_axes(gmem_window, smem.window, pieces)
    require_elements(gmem_window)
    part = contiguous_layout(layout, smem.window)
    require_copy_start(layout, smem.window, "the SMEM part of a copy")
    try:
        layouts.plan_copy(
            gmem_window.array_shape,
            types.itemsize_bits(gmem.dtype),
            gmem_window.sizes,
            gmem_window.squeezed,
            part,
            inside=gmem_window.known_inside(),
            pieces=pieces,
            axes=axes,
        )
    except errors.LayoutError:
        line = None
        if allow_line:
            line = line_bytes(gmem_window, layout, smem.window, in_bounds=in_bounds)
        if line is None:
            raise
        return UNIT_BYTES
    return ALLOCATION_ALIGNMENT_BYTES


def require_elements(gmem_window: Window) -> None:
    """Raises ShapeError for a copy of nothing, or of an array without elements."""
    # A tensor map needs elements, also where a range over the edge reads zeros only.
    if 0 in (*gmem_window.shape, *gmem_window.array_shape):
        raise errors.ShapeError(
            "a copy of no elements",
            expected="at least one element",
            got=f"shape {gmem_window.shape} of an array of shape "
            f"{gmem_window.array_shape}",
            hint="omit the copy",
        )


def require_some_inside(gmem: Any, who: str) -> None:
    """Raises OutOfBoundsError for an access that is known to be wholly outside."""
    window = gmem.window
    ranges = zip(window.starts, window.sizes, window.array_shape, strict=True)
    for axis, (start, size, n) in enumerate(ranges):
        if isinstance(start, int) and (start >= n or start + size <= 0):
            what = "destination" if gmem.writes else "source"
            raise errors.OutOfBoundsError(
                f"{who}: the {what} is entirely out of bounds",
                expected=f"a range that overlaps 0 to {n} in dimension {axis} of shape "
                f"{window.array_shape}",
                got=f"{start} to {start + size}",
                hint="omit the copy, check the index, or, for a load, pass "
                "oob_mode=plgpu.OOBFillMode.ZEROS if zeros are meant",
            )
