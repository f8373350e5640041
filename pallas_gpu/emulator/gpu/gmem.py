# SPDX-License-Identifier: Apache-2.0
"""Global memory: arrays that all CTAs of a device share, and others may reach."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine.memory import Memory, Referent, Region
from pallas_gpu.emulator.engine.ordering import Fence, Viewer
from pallas_gpu.emulator.engine.reinterpreted import ReinterpretedArray
from pallas_gpu.emulator.engine.tables import State


class GlobalArray(Memory):
    """An array in GMEM, as accessed by one cluster.

    The views of all clusters share elements, mask, history and origins.

    Attributes:
      state: state of families, which the views share too.
      place: identifies it in all runs of a launch: the suffix of its device, its number
        among the arrays of the device, and the indices of parts.
      everywhere: the arrays of each device; None if no device reaches those of another.
    """

    __slots__ = ("_parts", "everywhere", "place", "state")

    fence = Fence.GMEM
    unwritten_hint = (
        "store to it first; a result begins with the elements of an argument, zeros "
        "for instance, by pallas_call(..., input_output_aliases={0: 0}), or if the "
        "argument is a jax.Ref, jax.new_ref(jnp.zeros(...))"
    )

    def __init__(
        self,
        name: str,
        data: np.ndarray,
        written: np.ndarray | None,
        read_only: bool = False,
    ):
        super().__init__(name, data, written, read_only)
        self.state: State = {}
        self.place: tuple[Any, ...] = ()
        self.everywhere: Sequence[Sequence[GlobalArray]] | None = None
        self._parts: dict[tuple[int, ...], GlobalArray] = {}

    @property
    def hint_if_unwritten(self) -> str:
        if self.everywhere is None:
            return self.unwritten_hint
        return (
            "if another device stores it, let that call semaphore_signal(..., "
            "device_id=...) after the store, and wait for the semaphore before the "
            f"read; else {self.unwritten_hint}"
        )

    @property
    def suffix(self) -> str:
        """Distinguishes its device from others in messages."""
        return self.place[0]

    @property
    def identity(self) -> Hashable:
        return self.place

    def reinterpreted(self, shape: tuple[int, ...], dtype: Any) -> Memory:
        """Returns the array in another shape, or as another type if one is given."""
        return ReinterpretedArray(self, shape, dtype)

    def at(self, index: tuple[int, ...]) -> GlobalArray:
        """Returns the part at leading indices, as a view with its own history.

        Different indices are different memory, and a launch uses no other parts.
        """
        if not index:
            return self
        if index in self._parts:
            return self._parts[index]
        # The ellipsis keeps a view also where all axes are indexed.
        key: Any = (*index, ...)
        written = None if self.written is None else self.written[key]
        part = GlobalArray(self.name, self.data[key], written, self.read_only)
        part.admits_poison = self.admits_poison
        part.earlier = self.earlier
        part.place = (*self.place, index)
        part.everywhere = self.everywhere
        if self.everywhere is not None:
            self._parts[index] = part
        return part

    def parts(self) -> list[GlobalArray]:
        """Returns the arrays with a history: itself, or its parts."""
        if not self._parts:
            return [self]
        return [one for part in self._parts.values() for one in part.parts()]

    def owned_by(self, owner: int | None) -> Any:
        if owner is None:
            devices = range(len(self._others()))
            return MulticastArray(self.name, [self.owned_by(i) for i in devices])
        arrays = self._others()
        if not 0 <= owner < len(arrays):
            raise errors.OutOfBoundsError(
                f"remote_ref refers to device {owner}, which the mesh does not have",
                expected=f"a logical id from 0 to {len(arrays) - 1}",
                got=owner,
                hint="compute the position modulo the size of the axis",
            )
        _, number, *indices = self.place
        found = arrays[owner][number]
        for index in indices:
            found = found.at(index)
        return found.seen_by(self.viewer) if self.viewer is not None else found

    def _others(self) -> Sequence[Sequence[GlobalArray]]:
        if self.everywhere is None:
            raise errors.InternalError(f"{self.name} has no counterparts")
        return self.everywhere

    def seen_by(self, viewer: Viewer) -> GlobalArray:
        """Returns the array as accessed by a cluster."""
        if self.read_only:
            return self
        view = copy.copy(self)
        view.viewer = viewer
        return view

    @property
    def is_complete(self) -> bool:
        """Whether each element has a value, or need not have one."""
        return self.admits_poison or self.written is None or bool(self.written.all())

    def incomplete(self, where: str | None) -> errors.UnwrittenResultError:
        """Returns the error for elements that nobody has stored.

        Args:
          where: the kernel's line.
        """
        assert self.written is not None
        first = np.unravel_index(int(np.argmin(self.written)), self.shape)
        missing = self.written.size - int(np.count_nonzero(self.written))
        return errors.UnwrittenResultError(
            f"{self.name} has elements that no CTA stored",
            expected="a store to each element of a result",
            got=f"{missing} of {self.written.size} elements without a value, the first "
            f"at {[int(i) for i in first]}",
            hint="store the rest too; if it is meant to be undefined, as a GPU leaves "
            "it, run with interpret=plgpu.InterpretParams(partial_results=True)",
            where=where,
        ).about(buffer=self.name, elements=tuple((int(i), int(i) + 1) for i in first))


class MulticastArray(Referent):
    """The same array in the memories of all devices.

    Attributes:
      each: those arrays, in the order of the devices.
    """

    __slots__ = ("each",)

    def __init__(self, name: str, each: Sequence[Any]):
        super().__init__(name)
        self.each = each

    @property
    def shape(self) -> tuple[int, ...]:
        return self.each[0].shape

    def reinterpreted(self, shape: tuple[int, ...], dtype: Any) -> MulticastArray:
        """Returns the arrays in another shape, or as another type if one is given."""
        each = [array.reinterpreted(shape, dtype) for array in self.each]
        return MulticastArray(self.name, each)


def of_each(region: Region) -> list[Region]:
    """Returns the parts of memory that a region is: one of each device, or itself."""
    if isinstance(region.memory, MulticastArray):
        return [Region(memory, region.place) for memory in region.memory.each]
    return [region]
