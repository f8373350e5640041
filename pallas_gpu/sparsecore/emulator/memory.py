# SPDX-License-Identifier: Apache-2.0
"""Arrays in the memories of a SparseCore."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine.memory import Memory, fresh_elements
from pallas_gpu.sparsecore.types import VMEM

# The unit of positions in HBM: a copy that starts elsewhere raises an error interrupt.
HBM_BYTES = 32


class Array(Memory):
    """An array in one memory.

    Copies need no fence after the accesses of subcores: the compiler orders them.

    Attributes:
      space: the memory.
      place: identifies it in all runs of a launch.
      declared: its declaration; None for arguments and results.
    """

    __slots__ = ("declared", "place", "space")

    unwritten_hint = (
        "store to it first, or copy to it and wait for the copy: plsc.sync_copy"
    )

    def __init__(
        self,
        name: str,
        data: np.ndarray,
        written: np.ndarray | None,
        space: Any,
        place: Hashable,
        read_only: bool = False,
    ):
        super().__init__(name, data, written, read_only)
        self.space, self.place = space, place
        self.declared: Any = None

    @property
    def identity(self) -> Hashable:
        return self.place

    @property
    def private(self) -> bool:
        """Whether no other subcore can access it."""
        return self.space is VMEM

    @classmethod
    def fresh(cls, name: str, declared: Any, place: Hashable, zeros: bool) -> Array:
        """Returns an array without contents, as a scope declares it."""
        aval = declared.aval
        shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
        data, written = fresh_elements(shape, dtype, zeros)
        array = cls(name, data, written, aval.memory_space, place)
        array.admits_poison, array.declared = True, declared
        return array
