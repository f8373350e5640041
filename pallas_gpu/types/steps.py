# SPDX-License-Identifier: Apache-2.0
"""The steps from a reference to a part of it, and the window that they make.

JAX records `ref.at[i, ds(j, 8)].T[0:4]` as a chain of index and transpose steps, and
reshapes and bitcasts as further ones. Copies and clusters have steps of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, errors
from pallas_gpu.layouts.gmem.im2col import Windows
from pallas_gpu.layouts.window import Sum, Window
from pallas_gpu.types.spaces.devices import Owner

STATIC_SIZE_HINT = (
    "write `plgpu.ds(8 * i, 8)` for the range from 8 * i to 8 * (i + 1); if its size "
    "varies, loop over parts of a constant size: `plgpu.loop(0, n)`"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reinterpreted:
    """All of a reference: its bytes in row-major order, as an array.

    Copies replace the reshapes and bitcasts that an author writes by one such step, the
    first one of a reference; the steps after it select a window.

    Attributes:
      shape: of the array.
      dtype: of its elements; None for those of the reference.
    """

    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Im2ColStep:
    """Makes (N, *sizes, C) images all of their windows."""

    windows: Windows = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClusterStep:
    """Moves a reference to the same array of another CTA; it selects no elements.

    Attributes:
      axes: cluster axes.
      positions: that of the CTA on each of them: integers or scalars. On the axes that
        are not named it is that of the executing CTA.
    """

    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    positions: tuple[Any, ...]

    @classmethod
    def at(cls, positions: Mapping[str, Any]) -> ClusterStep:
        """Returns the step to a position on some axes."""
        return cls(tuple(positions), tuple(positions.values()))


def reinterpreted(steps: Sequence[Any]) -> Reinterpreted | None:
    """Returns the step that reinterprets a reference, if its first one does."""
    return steps[0] if steps and isinstance(steps[0], Reinterpreted) else None


def split_cluster(
    steps: Sequence[Any],
) -> tuple[tuple[Any, ...], ClusterStep | None]:
    """Returns the steps that select elements, and the one to another CTA or None.

    Of several positions on one axis the last one counts.
    """
    positions: dict[str, Any] = {}
    for step in steps:
        if isinstance(step, ClusterStep):
            positions |= dict(zip(step.axes, step.positions, strict=True))
    rest = tuple(step for step in steps if not isinstance(step, ClusterStep))
    return rest, ClusterStep.at(positions) if positions else None


def is_window(step: Any) -> bool:
    """True for a step from a window to a window."""
    if isinstance(step, _jax.NDIndexer):
        slices = [i for i in step.indices if isinstance(i, _jax.Slice)]
        return not step.int_indexer_shape and all(s.stride in (None, 1) for s in slices)
    return isinstance(step, (_jax.TransposeTransform, Owner))


def typed(
    steps: Sequence[Any], shape: tuple[int, ...], dtype: Any
) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and the dtype after steps on an array of a shape and a dtype.

    JAX would build the type of each step, with sharding.
    """
    for step in steps:
        match step:
            case _jax.NDIndexer():
                shape = _selected(step)
            case _jax.TransposeTransform():
                shape = tuple(shape[axis] for axis in step.permutation)
            case _jax.ReshapeTransform():
                shape = tuple(step.shape)
            case Reinterpreted():
                shape = tuple(step.shape)
                dtype = dtype if step.dtype is None else step.dtype
            case _jax.BitcastTransform():
                before, after = (jnp.dtype(t).itemsize for t in (dtype, step.dtype))
                if before != after:
                    shape = (*shape[:-1], shape[-1] * before // after)
                dtype = step.dtype
            case Im2ColStep():
                shape = step.windows.of(shape)
            case _ if hasattr(step, "typed"):  # of another machine
                shape, dtype = step.typed(shape, dtype)
    return shape, dtype


def _selected(step: _jax.NDIndexer) -> tuple[int, ...]:
    """Returns the shape of what an index expression selects.

    The axes of index arrays are where the first of adjacent arrays and integers is, and
    in front if a slice separates these: as in NumPy.
    """
    sizes = tuple(i.size for i in step.indices if isinstance(i, _jax.Slice))
    at = position_of_arrays(step)
    return (*sizes[:at], *step.int_indexer_shape, *sizes[at:])


def position_of_arrays(step: _jax.NDIndexer) -> int:
    """Returns the first axis of the index arrays among the axes of the result."""
    named = [dim for dim, i in enumerate(step.indices) if not isinstance(i, _jax.Slice)]
    if not named or named[-1] - named[0] >= len(named):
        return 0
    return named[0]


def resolve(whole: Window | Sequence[int], transforms: Sequence[Any]) -> Window:
    """Folds the steps that JAX recorded into one window.

    A start that is a value becomes a `Sum` of the values that the steps add up.

    Args:
      whole: shape of the reference, or the window that it already is.
      transforms: steps as JAX records them, outermost last.
    """
    window = whole if isinstance(whole, Window) else Window.whole(whole)
    for step in transforms:
        match step:
            case _jax.NDIndexer():
                ranges = [_range(index) for index in step.indices]
                window = window.slice([r[0] for r in ranges], [r[1] for r in ranges])
            case _jax.TransposeTransform():
                window = window.transpose(step.permutation)
            case Reinterpreted():
                window = window.reinterpreted(step.shape)
            case Im2ColStep():
                raise errors.UnsupportedError(
                    "windows of images are accessed",
                    expected="a copy of a part of them to SMEM",
                    got=f"an access to im2col_ref of windows {step.windows.shape}",
                    hint="plgpu.copy_gmem_to_smem(view.at[rows, dy, dx], x_smem, "
                    "barrier), and read that",
                )
            case _:
                raise errors.UnsupportedError(
                    f"{type(step).__name__} of a reference is not supported here",
                    expected="indices, slices and transposes of references",
                    got=str(step),
                    hint="reads, writes, atomics and copies take such a view; pass the "
                    "reference itself, or a slice of it",
                )
    return window


def _range(index: Any) -> tuple[int | Sum, int | None]:
    """Start and size of what one index names; no size for an integer."""
    if isinstance(index, _jax.Slice):
        return _start(index.start), _static_size(index)
    # In a jaxpr the index is a variable, which has its shape in its type.
    shape = getattr(getattr(index, "aval", index), "shape", ())
    if tuple(shape) != ():
        raise errors.UnsupportedError(
            "a reference is indexed with an array",
            expected="integers, scalars and slices",
            got=f"an index of shape {tuple(shape)}",
            hint="reads, writes and atomics take index arrays: x_ref[rows], without "
            "jax.vmap; copy one row at a time, in a loop",
        )
    return _start(index), None


def _start(value: Any) -> int | Sum:
    if value is None:
        return 0
    if isinstance(value, (int, np.integer, np.ndarray)):
        return int(value)
    return Sum(0, (value,))


def _static_size(index: Any) -> int:
    if index.stride not in (None, 1):
        raise errors.UnsupportedError(
            "a slice of a reference has a stride",
            expected="stride 1",
            got=f"stride {index.stride}",
            hint="reads, writes and atomics take a stride; copy the whole range",
        )
    if not isinstance(index.size, (int, np.integer)):
        raise errors.UnsupportedError(
            "a slice of a reference has a size that is not static",
            expected="a Python integer",
            got=str(index.size),
            hint=STATIC_SIZE_HINT,
        )
    return int(index.size)
