# SPDX-License-Identifier: Apache-2.0
"""Where in memory the elements of a view of a reference start."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


class Positions:
    """The bytes at which elements start, with the attributes of a reference.

    Attributes:
      starts: of the elements.
      size: of an element, in bytes.
    """

    def __init__(self, starts: np.ndarray, size: int):
        self.starts, self.size = starts, size

    @classmethod
    def of(cls, x: np.ndarray) -> Positions:
        """The elements of an array in row-major order."""
        return cls(np.arange(0, x.nbytes, x.itemsize).reshape(x.shape), x.itemsize)

    @property
    def at(self) -> Positions:
        return self

    @property
    def T(self) -> Positions:  # noqa: N802 - numpy's name
        return self.transpose(None)

    def __getitem__(self, idx: Any) -> Positions:
        idx = idx if isinstance(idx, tuple) else (idx,)
        return Positions(self.starts[tuple(map(_numpy_index, idx))], self.size)

    def reshape(self, *shape: int) -> Positions:
        return Positions(self.starts.reshape(*shape), self.size)

    def transpose(self, order: Any) -> Positions:
        return Positions(self.starts.transpose(order), self.size)

    def bitcast(self, dtype: Any) -> Positions:
        size = jnp.dtype(dtype).itemsize
        lead = self.starts.shape[:-1]
        narrow = self.starts[..., None] + np.arange(0, self.size, min(size, self.size))
        flat = narrow.reshape(*lead, -1)
        return Positions(flat[..., :: max(size // self.size, 1)], size)

    def copy(self, x: np.ndarray, to: Positions, y: np.ndarray) -> None:
        """Copies these elements of an array to others of another one."""
        assert (self.starts.shape, self.size) == (to.starts.shape, to.size)
        source, result = (a.reshape(-1).view(np.uint8) for a in (x, y))
        for byte in range(self.size):
            result[to.starts + byte] = source[self.starts + byte]


def _numpy_index(i: Any) -> Any:
    """An index of an array, of a range of a known start, too."""
    is_range = hasattr(i, "size") and hasattr(i, "stride")
    return slice(int(i.start), int(i.start) + i.size) if is_range else i
