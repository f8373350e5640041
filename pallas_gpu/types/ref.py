# SPDX-License-Identifier: Apache-2.0
"""The type of references in annotations of kernels."""

from __future__ import annotations

from typing import Any, Protocol

import jax


class Ref(Protocol):
    """A reference to an array, an accumulator or barriers, for annotations.

    A kernel receives references for its arguments, results and scratch memory.

      >>> def body(x_ref: plgpu.Ref, o_ref: plgpu.Ref) -> None:
      ...     o_ref[0:8] = 2 * x_ref[0:8]
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    @property
    def dtype(self) -> Any:
        """Type of an element."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""

    @property
    def size(self) -> int:
        """Number of elements."""

    @property
    def at(self) -> _At:
        """`ref.at[index]` is a part of the reference, which is not read."""

    @property
    def T(self) -> Ref:  # noqa: N802 - numpy's name
        """A view with the dimensions in reverse order."""

    def transpose(self, *permutation: Any) -> Ref:
        """Returns a view with the dimensions permuted."""

    def reshape(self, *shape: Any) -> Ref:
        """Returns a view of the elements in another shape."""

    def bitcast(self, dtype: Any) -> Ref:
        """Returns a view of the same bytes as elements of another type."""

    def get(self, idx: Any = ...) -> jax.Array:
        """Reads elements."""

    def set(self, value: Any, idx: Any = ...) -> None:
        """Writes elements."""

    def swap(self, value: Any, idx: Any = ...) -> jax.Array:
        """Writes elements and returns the old ones."""

    def __getitem__(self, idx: Any, /) -> jax.Array:
        """Reads elements."""

    def __setitem__(self, idx: Any, value: Any, /) -> None:
        """Writes elements."""


class _At(Protocol):
    def __getitem__(self, idx: Any, /) -> Ref: ...
