# SPDX-License-Identifier: Apache-2.0
"""What part of a reference a chain of index and transpose steps names.

JAX records `ref.at[i, ds(j, 8)].T[0:4]` as a chain of steps. `resolve` folds the chain
into one `View`: for each axis of the reference a start, a size and whether it is kept.
The emitter, the emulator and the bounds check read references through it alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import _jax, errors


@dataclasses.dataclass(frozen=True)
class Axis:
    """A range of one axis of a reference.

    Attributes:
      start: static part of the start.
      dynamic: values to add to it, known when the kernel runs.
      size: static number of elements.
      kept: False for an axis indexed by an integer.
    """

    start: int
    dynamic: tuple[Any, ...]
    size: int
    kept: bool


@dataclasses.dataclass(frozen=True)
class View:
    """A part of a reference.

    Attributes:
      base_shape: shape of the whole reference.
      axes: one range for each axis of the reference.
      order: which axes, in which order, make up the shape of the view.
    """

    base_shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    order: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> View:
        """Returns the view of everything."""
        return cls(
            tuple(shape),
            tuple(Axis(0, (), n, True) for n in shape),
            tuple(range(len(shape))),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the view."""
        return tuple(self.axes[a].size for a in self.order)

    @property
    def is_whole(self) -> bool:
        """True when the view is the reference itself."""
        return self == View.whole(self.base_shape)

    def index(self, indices: Sequence[Any]) -> View:
        """Applies one index a kept axis: an integer, a scalar value, or a Slice."""
        axes = list(self.axes)
        order = []
        for a, index in zip(self.order, indices, strict=True):
            if isinstance(index, _jax.Slice):
                start, size, kept = index.start, _static_size(index), True
            else:
                start, size, kept = index, 1, False
            static, dynamic = _split(start)
            old = axes[a]
            axes[a] = Axis(old.start + static, old.dynamic + dynamic, size, kept)
            if kept:
                order.append(a)
        return View(self.base_shape, tuple(axes), tuple(order))

    def transpose(self, permutation: Sequence[int]) -> View:
        """Permutes the kept axes."""
        return dataclasses.replace(
            self, order=tuple(self.order[p] for p in permutation)
        )

    def starts(self, add: Callable[[Any, Any], Any], zero: Any = 0) -> tuple[Any, ...]:
        """Returns one start for each axis of the reference: int, or a sum by `add`."""
        result = []
        for axis in self.axes:
            total: Any = None
            for value in axis.dynamic:
                total = value if total is None else add(total, value)
            if total is None:
                result.append(axis.start)
            elif axis.start:
                result.append(add(total, axis.start))
            else:
                result.append(total)
        return tuple(result)

    def over_the_edge(self) -> list[int]:
        """Returns the axes whose static range leaves the reference."""
        bad = []
        for a, (axis, n) in enumerate(zip(self.axes, self.base_shape, strict=True)):
            if axis.size > n or (
                not axis.dynamic and (axis.start < 0 or axis.start + axis.size > n)
            ):
                bad.append(a)
        return bad


def _split(start: Any) -> tuple[int, tuple[Any, ...]]:
    if start is None:
        return 0, ()
    if isinstance(start, int | np.integer):
        return int(start), ()
    if isinstance(start, np.ndarray) and start.ndim == 0:
        return int(start), ()
    return 0, (start,)


def _static_size(index: Any) -> int:
    if index.stride not in (None, 1):
        raise errors.UnsupportedError(
            "a slice of a reference has a stride",
            expected="stride 1",
            got=f"stride {index.stride}",
            hint="load the whole range, or index in a loop",
        )
    if not isinstance(index.size, int | np.integer):
        raise errors.UnsupportedError(
            "a slice of a reference has a size that is not static",
            expected="a Python integer",
            got=str(index.size),
            hint="use ds(start, size) with a constant size and mask the rest",
        )
    return int(index.size)


def resolve(shape: Sequence[int], transforms: Sequence[Any]) -> View:
    """Folds the steps that JAX recorded into one view.

    Args:
      shape: shape of the reference.
      transforms: steps as JAX records them, outermost last.

    Raises:
      UnsupportedError: a step that has no form here (stride, gather, reshape, bitcast).
    """
    view = View.whole(shape)
    for step in transforms:
        match step:
            case _jax.NDIndexer():
                for index in step.indices:
                    _check_scalar_index(index)
                view = view.index(step.indices)
            case _jax.TransposeTransform():
                view = view.transpose(step.permutation)
            case _:
                raise errors.UnsupportedError(
                    f"{type(step).__name__} of a reference is not supported",
                    expected="indices, slices and transposes of references",
                    got=str(step),
                    hint="load the array and change it in registers",
                )
    return view


def _check_scalar_index(index: Any) -> None:
    # In a jaxpr the index is a variable, which has its shape in its type.
    shape = getattr(getattr(index, "aval", index), "shape", ())
    if not isinstance(index, _jax.Slice) and tuple(shape) != ():
        raise errors.UnsupportedError(
            "a reference is indexed with an array",
            expected="integers, scalars and slices",
            got=f"an index of shape {tuple(shape)}",
            hint="loop over the indices",
        )
