# SPDX-License-Identifier: Apache-2.0
"""lax.gather and lax.scatter of values: by the positions of single elements.

An index vector selects a window of the array. Position, in the row-major order of the
array, of an element: that of its window's start plus that of the element in the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu.entry.expand import Composite, composite
from pallas_gpu.primitives.positions import gather_positions, scatter_positions
from pallas_gpu.program.passes.no_elements import applied

_I32 = jnp.int32


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[a + 1 :]) for a in range(len(shape))]


def _starts(
    shape: Sequence[int],
    sizes: Sequence[int],
    indices: Any,
    axes: Sequence[int],
    batching: Sequence[tuple[int, int]],
) -> tuple[Any, Any]:
    """The position of each window's start, and whether the window is in the array.

    The start is clamped such that it is.

    Args:
      shape: of the array.
      sizes: of a window.
      indices: index vectors, along the last axis.
      axes: the array's axis of each number of an index vector.
      batching: axes of the array and of `indices` with equal coordinates.
    """
    batch = indices.shape[:-1]
    strides = _strides(shape)
    start = jnp.zeros(batch, _I32)
    inside = jnp.ones(batch, bool)
    for k, axis in enumerate(axes):
        index = lax.index_in_dim(indices, k, -1, keepdims=False)
        if index.dtype.itemsize < np.dtype(_I32).itemsize:
            index = index.astype(_I32)
        most = index.dtype.type(shape[axis] - sizes[axis])
        clamped = lax.clamp(index.dtype.type(0), index, most)
        inside = inside & (index == clamped)
        start = start + clamped.astype(_I32) * strides[axis]
    for axis, other in batching:
        start = start + lax.broadcasted_iota(_I32, batch, other) * strides[axis]
    return start, inside


def _positions(
    start: Any, dims: Sequence[int], result: Sequence[int], steps: dict[int, int]
) -> Any:
    """The position of each element of all windows.

    Args:
      start: of each window.
      dims: the axes of the result that are those of `start`.
      result: shape of all windows.
      steps: the stride in the array of the other axes of the result.
    """
    total = lax.broadcast_in_dim(start, result, tuple(dims))
    for axis, stride in steps.items():
        total = total + lax.broadcasted_iota(_I32, tuple(result), axis) * stride
    return total


def _axes_besides(rank: int, *excluded: Sequence[int]) -> list[int]:
    gone = {a for axes in excluded for a in axes}
    return [a for a in range(rank) if a not in gone]


@composite("gather")
def _gather(composite: Composite, x: Any, indices: Any) -> Any:
    params, aval = composite.params, composite.out_aval
    dims, sizes = params["dimension_numbers"], params["slice_sizes"]
    batching = list(
        zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    )
    start, inside = _starts(x.shape, sizes, indices, dims.start_index_map, batching)
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        # No axis of the window may lead back into the array.
        start = jnp.where(inside, start, -math.prod(x.shape) - 1)
    window = _axes_besides(
        x.ndim, dims.collapsed_slice_dims, dims.operand_batching_dims
    )
    strides = _strides(x.shape)
    steps = {o: strides[a] for o, a in zip(dims.offset_dims, window, strict=True)}
    shape = aval.shape or (1,)
    batch = _axes_besides(len(aval.shape), dims.offset_dims)
    index = _positions(start, batch, shape, steps)
    fill = _fill_value(params["fill_value"], aval.dtype)
    taken = gather_positions(x, index, jnp.asarray(fill, aval.dtype))
    return taken.reshape(aval.shape)


def _fill_value(given: Any, dtype: Any) -> Any:
    """As lax.gather: NaN, the least signed or the largest unsigned number."""
    if given is not None:
        return given
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype == np.bool_:
        return True
    info = jnp.iinfo(dtype)
    return info.min if info.min < 0 else info.max


def _scatter(kind: str):
    def rule(composite: Composite, x: Any, indices: Any, updates: Any) -> Any:
        params = composite.params
        dims = params["dimension_numbers"]
        window = _axes_besides(
            x.ndim, dims.inserted_window_dims, dims.operand_batching_dims
        )
        sizes = [1] * x.ndim
        for axis, a in zip(dims.update_window_dims, window, strict=True):
            sizes[a] = updates.shape[axis]
        pairs = zip(
            dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True
        )
        axes = dims.scatter_dims_to_operand_dims
        start, inside = _starts(x.shape, sizes, indices, axes, list(pairs))
        if params["mode"] != lax.GatherScatterMode.CLIP:
            start = jnp.where(inside, start, -math.prod(x.shape) - 1)
        strides = _strides(x.shape)
        steps = {
            axis: strides[a]
            for axis, a in zip(dims.update_window_dims, window, strict=True)
        }
        batch = _axes_besides(updates.ndim, dims.update_window_dims)
        shape = updates.shape or (1,)
        index = _positions(start, batch, shape, steps)
        unique = params["unique_indices"] or math.prod(start.shape) == 1
        flat = x.reshape(x.shape or (1,))
        if kind == "set" and params["update_jaxpr"] is not None:
            old = gather_positions(flat, index, jnp.zeros((), x.dtype))
            updates = applied(params, old)
        result = scatter_positions(
            kind,
            flat,
            index,
            updates.reshape(shape),
            unique=unique,
        )
        return result.reshape(x.shape)

    return rule


_KINDS = {
    "scatter": "set",
    "scatter-add": "add",
    "scatter-mul": "mul",
    "scatter-max": "max",
    "scatter-min": "min",
}
for _name, _kind in _KINDS.items():
    composite(_name)(_scatter(_kind))


@composite("scatter-sub")
def _scatter_sub(composite: Composite, x: Any, indices: Any, updates: Any) -> Any:
    return _scatter("add")(composite, x, indices, -updates)
