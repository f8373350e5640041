# SPDX-License-Identifier: Apache-2.0
"""Parts of arrays that travel through SMEM, and where in memory their elements are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.host import counted


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


Part = Callable[[Any, Any], Any]


def itself(ref: Any, n: Any) -> Any:
    return ref


def through_smem(
    shape: Sequence[int],
    dtype: Any,
    part: Part,
    tile: Sequence[int] | None = None,
    within: Part = itself,
    transforms: Sequence[Any] = (),
    other: Any = None,
    **options: Any,
) -> tuple[Any, list[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """A part of an array goes to a part of an array in SMEM, and back again.

    Returns `make`, its arguments and its results: what SMEM has, of zeros at first, and
    the array with the part alone.

    Args:
      shape, dtype: of the array.
      part: of it, given a reference and a 1 that is known at run time.
      tile, other: shape and dtype of the array in SMEM; those of the part if None.
      within: the part of the array in SMEM.
      transforms: of the array in SMEM.
      options: of the copy to SMEM.
    """
    x, n = counted(shape, dtype), np.array([1], np.int32)
    chosen = part(Positions.of(x), 1)
    tile = chosen.starts.shape if tile is None else tile
    seen, back = np.zeros(tile, dtype if other is None else other), np.zeros_like(x)
    chosen.copy(x, within(Positions.of(seen), 1), seen)
    chosen.copy(x, chosen, back)

    def body(x, n, o, back, smem, full):
        back[...] = jnp.zeros(shape, dtype)
        smem[...] = jnp.zeros(tile, seen.dtype)
        plgpu.commit_smem()
        plgpu.commit_gmem()
        i = n[0]
        plgpu.copy_gmem_to_smem(part(x, i), within(smem, i), full, **options)
        plgpu.barrier_wait(full)
        o[...] = smem[...]
        plgpu.copy_smem_to_gmem(within(smem, i), part(back, i))
        plgpu.wait_smem_to_gmem(0)

    smem = plgpu.SMEM(tile, seen.dtype, transforms=transforms)
    make = everywhere.kernel(body, (seen, back), smem, plgpu.Barrier())
    return make, [x, n], (seen, back)
