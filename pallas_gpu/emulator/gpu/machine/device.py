# SPDX-License-Identifier: Apache-2.0
"""Devices, each with its global memory and its CTAs, and the machine of all devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import arch, types
from pallas_gpu.emulator.engine import scheduler
from pallas_gpu.emulator.engine.execution import Execution
from pallas_gpu.emulator.engine.memory import fresh_elements
from pallas_gpu.emulator.engine.ordering import Earlier
from pallas_gpu.emulator.engine.orders.choices import Directed
from pallas_gpu.emulator.engine.tables import State
from pallas_gpu.emulator.gpu.gmem import GlobalArray
from pallas_gpu.emulator.launches import execution_of


class Machine:
    """The devices of one run, which advance together.

    Args:
      params: parameters of the emulator.
      target: the target of each device.
      devices: number of devices.
      choices: instead of those of the parameters' seed.
    """

    def __init__(
        self,
        params: types.InterpretParams,
        target: arch.GpuTarget,
        devices: int = 1,
        choices: Directed | None = None,
    ):
        self.execution = execution_of(params, choices)
        self.devices = [
            Device(
                self.execution,
                params,
                target,
                f" of device {i}" if devices > 1 else "",
                i,
            )
            for i in range(devices)
        ]

    def run(self, pools: Sequence[scheduler.Pool]) -> None:
        """Runs launches, each a pool of clusters, until all have ended."""
        scheduler.run(self.execution, pools)

    def dissolve(self) -> None:
        """Drops what refers to its owner; see `Group.dissolve`."""
        for device in self.devices:
            device.at_end.clear()
            for state in device.states:
                state.clear()


class Device:
    """One GPU.

    Attributes:
      execution: its run.
      target: its target.
      number: which of the devices it is.
      suffix: distinguishes it from other devices in messages.
      zeros: whether fresh memory contains zeros instead of poison.
      like_upstream: whether unfinished copies and semaphores are accepted at the end.
      printed: the equations whose line is printed once for all threads.
      at_end: checks to run when all its CTAs have ended.
      states: those of arrays, to be dropped then.
      earlier: the kernels before the launch, if that may start before they have ended.
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
        self._arrays = itertools.count()
        self._partial_results = params.partial_results or params.like_upstream

    def start_early(self) -> None:
        """Lets the next launch start before the kernels before it have ended."""
        self.earlier = Earlier(
            self.execution.actors.other(),
            "the kernel before this one",
            "griddepcontrol_wait()",
        )

    def place(
        self, name: str, elements: np.ndarray, read_only: bool = True
    ) -> GlobalArray:
        """Returns an input, stored in global memory."""
        return self._placed(GlobalArray(name + self.suffix, elements, None, read_only))

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> GlobalArray:
        """Returns fresh global memory."""
        data, written = fresh_elements(shape, dtype, self.zeros)
        array = GlobalArray(name + self.suffix, data, written)
        array.admits_poison = self._partial_results and written is not None
        return self._placed(array)

    def _placed(self, array: GlobalArray) -> GlobalArray:
        array.earlier = self.earlier
        array.place = (self.suffix, next(self._arrays))
        return array
