# SPDX-License-Identifier: Apache-2.0
"""Devices, each with its global memory and its CTAs, and the machine of all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import arch, types
from pallas_gpu.emulator.engine import ordering, scheduler
from pallas_gpu.emulator.engine.execution import Execution, report
from pallas_gpu.emulator.engine.memory import fresh_elements
from pallas_gpu.emulator.engine.ordering import Earlier
from pallas_gpu.emulator.engine.orders.choices import Directed
from pallas_gpu.emulator.engine.tables import State
from pallas_gpu.emulator.gpu.gmem import GlobalArray
from pallas_gpu.emulator.gpu.machine import races
from pallas_gpu.emulator.launches import execution_of


class Machine:
    """The devices of one run, which advance together.

    Args:
      params: parameters of the emulator.
      target: the target of each device.
      devices: the mesh of those that reach each other's memory, or the number of
        others.
      choices: instead of those of the parameters' seed.
    """

    def __init__(
        self,
        params: types.InterpretParams,
        target: arch.GpuTarget,
        devices: types.Devices | int = 1,
        choices: Directed | None = None,
    ):
        self.execution = execution_of(params, choices)
        mesh = None if isinstance(devices, int) else devices
        count = devices if isinstance(devices, int) else devices.size
        self.devices = [
            Device(self.execution, params, target, _suffix(i, count, mesh), i)
            for i in range(count)
        ]
        if mesh is not None:
            everywhere = [device.arrays for device in self.devices]
            for device in self.devices:
                device.everywhere = everywhere
                device.axes = mesh.positions(device.number)

    def run(self, pools: Sequence[scheduler.Pool]) -> None:
        """Runs launches, each a pool of clusters, until all have ended."""
        scheduler.run(self.execution, pools)

    def dissolve(self) -> None:
        """Drops what refers to its owner; see `Group.dissolve`."""
        for device in self.devices:
            device.at_end.clear()
            device.arrays.clear()
            device.kept.clear()
            for state in device.states:
                state.clear()


class Device:
    """One GPU.

    Attributes:
      execution: its run.
      number: which of the devices it is.
      suffix: distinguishes it from other devices in messages.
      zeros: whether fresh memory contains zeros instead of poison.
      like_upstream: whether unfinished copies and semaphores are accepted at the end.
      printed: the equations whose line is printed once for all threads.
      at_end: checks to run when all its CTAs have ended.
      states: those of arrays, to be dropped then.
      earlier: the kernels before the launch, if that may start before they have ended.
      arrays: those in its global memory.
      kept: those of them that outlive the launch.
      everywhere: those of each device, if these reach each other's memory.
      axes: its position on the axes of their mesh.
      known: what all of its threads that have ended know.
      known_at_start: what they know when they start.
    """

    def __init__(
        self,
        execution: Execution,
        params: types.InterpretParams,
        target: arch.GpuTarget,
        suffix: str = "",
        number: int = 0,
    ):
        self.number = number
        self.execution = execution
        self.target = target
        self.suffix = suffix
        self.zeros = params.uninitialized_memory == "zero"
        self.printed: set[Any] = set()
        self.at_end: list[Callable[[], None]] = []
        self.states: list[State] = []
        self.earlier: Earlier | None = None
        self.like_upstream = params.like_upstream
        self.arrays: list[GlobalArray] = []
        self.kept: set[GlobalArray] = set()
        self.everywhere: Sequence[Sequence[GlobalArray]] | None = None
        self.axes: dict[Any, int] = {}
        self.known: ordering.Clock = {}
        self.known_at_start: ordering.Clock = {}
        self._partial_results = params.partial_results or params.like_upstream

    def start_early(self) -> None:
        """Lets the next launch start before the kernels before it have ended."""
        self.earlier = Earlier(
            self.execution.actors.other(),
            "the kernel before this one",
            "griddepcontrol_wait()",
            "call griddepcontrol_wait() first; in one warpgroup alone, let the others "
            "wait for a barrier on which it arrives afterwards",
        )

    def start_alone(self) -> None:
        """Lets the next launch start before other devices start theirs."""
        self.earlier = Earlier(
            self.execution.actors.other(),
            f"the work before this kernel{self.suffix}",
            "a signal of that device",
            "leave out skip_device_barrier=True, or let devices signal each other "
            "first, by semaphores of SemaphoreType.BARRIER",
        )
        self.known_at_start = {self.earlier.actor: self.earlier.time}

    def place(
        self, name: str, elements: np.ndarray, read_only: bool = True
    ) -> GlobalArray:
        """Returns an input, stored in global memory."""
        # Others may still read it when the kernel has ended here.
        read_only = read_only and self.everywhere is None
        return self._placed(GlobalArray(name + self.suffix, elements, None, read_only))

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> GlobalArray:
        """Returns fresh global memory."""
        data, written = fresh_elements(shape, dtype, self.zeros)
        array = GlobalArray(name + self.suffix, data, written)
        array.admits_poison = self._partial_results and written is not None
        return self._placed(array)

    def _placed(self, array: GlobalArray) -> GlobalArray:
        array.earlier = self.earlier
        array.place = (self.suffix, len(self.arrays))
        array.everywhere = self.everywhere
        self.arrays.append(array)
        return array

    def require_unused(self) -> None:
        """Reports accesses of other devices that may take place after the kernel."""
        if self.everywhere is None:
            return
        arrays = (array for array in self.arrays if array not in self.kept)
        parts = (part for array in arrays for part in array.parts())
        for part in parts:
            for access in part.history.live():
                if access.position.get("device") == self.number:
                    continue
                if not access.known_to(self.known):
                    report(races.after_the_end(access, part.name, self.suffix))


def _suffix(number: int, count: int, mesh: types.Devices | None) -> str:
    """Returns the words that distinguish a device from the others."""
    if count == 1:
        return ""
    if mesh is None or len(mesh.sizes) == 1:
        return f" of device {number}"
    at = ", ".join(f"{axis}={i}" for axis, i in mesh.positions(number).items())
    return f" of device {number} ({at})"
