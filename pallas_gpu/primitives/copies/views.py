# SPDX-License-Identifier: Apache-2.0
"""Reshapes and bitcasts of the operands of copies, as windows of other arrays.

A copy moves windows of arrays. A reshape or bitcast of a reference becomes its first
step, which gives the whole array another shape or type; the indices around it in the
author's expression are computed for that array. Where one side of a copy has no such
window, the other side gets the inverse.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, errors, types
from pallas_gpu.layouts.reshaped import Arithmetic, reinterpret, reshape
from pallas_gpu.layouts.window import Sum, Window
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives.indices import multiples
from pallas_gpu.primitives.registers import promised

_VIEWS = _jax.ReshapeTransform | _jax.BitcastTransform


@dataclasses.dataclass(frozen=True)
class _View:
    """A window of an array of the bytes of a reference.

    Attributes:
      ref: the reference.
      window: the window, whose dynamic starts are int32 scalars.
      dtype: of its elements.
      refused: why the reshape or bitcast after it has no window; None for none.
      is_indexed: whether there is an index after that one.
    """

    ref: Any
    window: Window
    dtype: Any
    refused: errors.PallasGpuError | None = None
    is_indexed: bool = False

    @property
    def is_reinterpreted(self) -> bool:
        """Whether the array has another shape or type than the reference."""
        aval = types.base_aval(self.ref)
        declared = tuple(aval.shape), jnp.dtype(aval.dtype)
        return declared != (self.window.array_shape, self.dtype)


def plain(ref: Any, who: str) -> Any:
    """Returns a reference without reshapes and bitcasts that is the same part."""
    if not _is_viewed(ref):
        return ref
    view = _fold(ref)
    _require(view, who)
    return _written(view)


def pair(
    gmem: Any, smem: Any, who: str, *, as_declared: bool = False
) -> tuple[Any, Any]:
    """Returns the two sides of a copy without reshapes and bitcasts.

    Args:
      gmem, smem: references of equal shape and type.
      who: the operation, for messages.
      as_declared: whether the array in SMEM keeps its declared shape and type.
    """
    if not _is_viewed(gmem) and not _is_viewed(smem):
        return gmem, smem
    far, near = _fold(gmem), _fold(smem)
    if as_declared and near.is_reinterpreted:
        near = _declared(near, smem)
    if near.refused is not None and far.refused is None and not near.is_indexed:
        far = _inverted(far, near)
        near = dataclasses.replace(near, refused=None)
    elif far.refused is not None and near.refused is None and not far.is_indexed:
        near = _inverted(near, far)
        far = dataclasses.replace(far, refused=None)
        if as_declared and near.is_reinterpreted:
            near = _declared(near, smem)
    _require(far, who)
    _require(near, who)
    return _written(far), _written(near)


def _is_viewed(ref: Any) -> bool:
    steps = ref.transforms if isinstance(ref, _jax.TransformedRef) else ()
    return any(isinstance(step, _VIEWS) for step in steps)


def _require(view: _View, who: str) -> None:
    error = view.refused
    if error is not None:
        raise errors.UnsupportedError(
            f"{who}: {error.what}",
            expected=error.expected,
            got=error.got,
            hint=error.hint,
        )


# --- from steps to a window -----------------------------------------------------------


def _fold(ref: Any) -> _View:
    """Returns the view that the steps on a reference make, up to one without."""
    operand = ops.operand(ref)
    view = _whole(operand.whole)
    for step in operand.transforms:
        if view.refused is not None:
            indexed = view.is_indexed or not isinstance(step, _VIEWS)
            view = dataclasses.replace(view, is_indexed=indexed)
        elif isinstance(step, _jax.ReshapeTransform):
            view = _reshaped(view, tuple(step.shape))
        elif isinstance(step, _jax.BitcastTransform):
            view = _bitcast(view, jnp.dtype(step.dtype))
        else:
            view = dataclasses.replace(view, window=_selected(view, step))
    return view


def _whole(ref: Any) -> _View:
    aval = types.base_aval(ref)
    return _View(ref, Window.whole(tuple(aval.shape)), jnp.dtype(aval.dtype))


def _reshaped(view: _View, shape: tuple[int, ...]) -> _View:
    """Returns a view in another shape; the view itself where that has no window."""
    try:
        window = reshape(view.window, shape, _ARITHMETIC)
        return _fitting(dataclasses.replace(view, window=window))
    except errors.LayoutError as error:
        return dataclasses.replace(view, refused=error)


def _bitcast(view: _View, dtype: Any) -> _View:
    """As `_reshaped`, for another type."""
    bits = types.itemsize_bits(view.dtype), types.itemsize_bits(dtype)
    try:
        window = reinterpret(view.window, *bits, _ARITHMETIC)
        return _fitting(dataclasses.replace(view, window=window, dtype=dtype))
    except errors.LayoutError as error:
        return dataclasses.replace(view, refused=error)


def _fitting(view: _View) -> _View:
    """Raises LayoutError for an array in SMEM whose tiles a view cuts."""
    aval = types.base_aval(view.ref)
    if aval.memory_space is types.SMEM:
        layout = types.smem_layout(aval.shape, aval.dtype, aval.transforms)
        bits = types.itemsize_bits(view.dtype)
        layout.reinterpreted(view.window.array_shape, bits)
    return view


def _inverted(view: _View, other: _View) -> _View:
    """Returns a view as the other one is before the step that it refuses."""
    bits = types.itemsize_bits(other.dtype), types.itemsize_bits(view.dtype)
    shape = other.window.shape
    if bits[0] == bits[1] or (shape and shape[-1] * bits[0] % bits[1] == 0):
        last = (shape[-1] * bits[0] // bits[1],) if shape else ()
        result = _reshaped(view, (*shape[:-1], *last))
        if result.refused is None:
            result = _bitcast(result, other.dtype)
        if result.refused is None:
            return result
    # What the author has written explains it better than the inverse.
    return dataclasses.replace(view, refused=other.refused)


def _declared(view: _View, ref: Any) -> _View:
    """Returns a view as its steps make it before they reinterpret the array."""
    operand = ops.operand(ref)
    first = next(
        (i for i, s in enumerate(operand.transforms) if isinstance(s, _VIEWS)), 0
    )
    before = _fold(types.RefView(operand.ref, operand.transforms[:first]))
    rest = operand.transforms[first:]
    error = errors.LayoutError(
        "a multicast to a reinterpreted array in SMEM",
        expected="the destination in its declared shape and type",
        got=f"{view.dtype.name}{list(view.window.array_shape)} of "
        f"{types.describe(types.base_aval(view.ref))}",
        hint="reshape or bitcast the source instead",
    )
    indexed = not all(isinstance(step, _VIEWS) for step in rest)
    return dataclasses.replace(before, refused=error, is_indexed=indexed)


def _selected(view: _View, step: Any) -> Window:
    """Returns the window after an index or a transpose."""
    if isinstance(step, _jax.TransposeTransform):
        return view.window.transpose(step.permutation)
    # It refuses strides and arrays of indices, in its own words.
    part = types.resolve(view.window.shape, (step,))
    starts = [_start(s) for s in part.starts]
    sizes = [n if a in part.axes else None for a, n in enumerate(part.sizes)]
    part = part.at(starts)
    if types.base_aval(view.ref).memory_space is types.SMEM:
        ops.require_inside(part, "a copy")
    known = [multiples.divisor(s) for s in starts]
    return view.window.slice(starts, sizes, known, add=_sum)


def _start(start: Any) -> Any:
    """Returns a start as an integer, or as an int32 scalar."""
    if isinstance(start, Sum):
        (value,) = start.terms
        if _jax.is_tracer(value):
            return lax.convert_element_type(value, jnp.int32)
        start = int(value)
    return start


def _sum(a: Any, b: Any) -> Any:
    return lax.add(*(jnp.int32(x) if isinstance(x, int) else x for x in (a, b)))


_ARITHMETIC = Arithmetic(
    times=lambda start, n: lax.mul(start, np.int32(n)),
    over=lambda start, n: lax.div(start, np.int32(n)),
)


# --- from a window to steps -----------------------------------------------------------


def _written(view: _View) -> Any:
    """Returns a view as steps on its reference."""
    window, steps = view.window, list[Any]()
    if view.is_reinterpreted:
        same = jnp.dtype(types.base_aval(view.ref).dtype) == view.dtype
        dtype = None if same else view.dtype
        steps.append(types.Reinterpreted(window.array_shape, dtype))
    untransposed = window.transpose(
        sorted(range(len(window.axes)), key=window.axes.__getitem__)
    )
    if not untransposed.is_whole:
        starts = [_known(*s) for s in zip(window.starts, window.multiples, strict=True)]
        indices = [
            _jax.Slice(start, size, 1) if axis in window.axes else start
            for axis, (start, size) in enumerate(zip(starts, window.sizes, strict=True))
        ]
        steps.append(_jax.indexer(indices, (), window.array_shape))
    if window.is_transposed:
        steps.append(_jax.TransposeTransform(window.order))
    base = types.as_view(view.ref)
    return types.RefView(base.ref, (*base.transforms, *steps)) if steps else view.ref


def _known(start: Any, multiple: int) -> Any:
    """Returns a start that later stages know to be a multiple."""
    if isinstance(start, int) or multiple <= 1 or multiples.divisor(start) == multiple:
        return start
    return promised(start, multiple)
