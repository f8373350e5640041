# SPDX-License-Identifier: Apache-2.0
"""From the steps that JAX records on a reference to a window of its array.

JAX records `ref.at[i, ds(j, 8)].T[0:4]` as a chain of index and transpose steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_gpu import _jax, errors
from pallas_gpu.layouts.window import Sum, Window
from pallas_gpu.types.copies.im2col import Im2ColStep
from pallas_gpu.types.copies.reinterpreted import Reinterpreted

STATIC_SIZE_HINT = (
    "write `plgpu.ds(8 * i, 8)` for the range from 8 * i to 8 * (i + 1); if its size "
    "varies, loop over parts of a constant size: `plgpu.loop(0, n)`"
)


def resolve(whole: Window | Sequence[int], transforms: Sequence[Any]) -> Window:
    """Folds the steps that JAX recorded into one window.

    A start that is a value becomes a `Sum` of the values that the steps add up.

    Args:
      whole: shape of the reference, or the window that it already is.
      transforms: steps as JAX records them, outermost last.

    Raises:
      UnsupportedError: a step that has no form here (stride, gather, reshape, bitcast).
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
    if isinstance(value, int | np.integer | np.ndarray):
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
    if not isinstance(index.size, int | np.integer):
        raise errors.UnsupportedError(
            "a slice of a reference has a size that is not static",
            expected="a Python integer",
            got=str(index.size),
            hint=STATIC_SIZE_HINT,
        )
    return int(index.size)
