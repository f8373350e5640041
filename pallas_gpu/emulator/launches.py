# SPDX-License-Identifier: Apache-2.0
"""Launches on emulated hardware: one run, several schedules, those of a check."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pallas_gpu import types
from pallas_gpu.emulator import schedules
from pallas_gpu.emulator.engine import scheduler
from pallas_gpu.emulator.engine.execution import Execution
from pallas_gpu.emulator.engine.orders.choices import Directed
from pallas_gpu.emulator.engine.orders.explore import Explored
from pallas_gpu.emulator.engine.plan import Plan, plan_of
from pallas_gpu.emulator.recorder import Observer, Run
from pallas_gpu.entry.interpret import Observed
from pallas_gpu.program import indices
from pallas_gpu.program.build import region_of


class Launch(Protocol):
    """A kernel that is ready to run once."""

    @property
    def execution(self) -> Execution:
        """The run."""

    def pools(self) -> Sequence[scheduler.Pool]:
        """Returns its groups of threads."""

    def finish(self) -> None:
        """Checks what it leaves, once all groups have ended."""

    def dissolve(self) -> None:
        """Drops what refers to its owner; see `Group.dissolve`."""

    def results(self) -> list[np.ndarray]:
        """Returns the results, of one device after the other."""

    @property
    def started(self) -> int:
        """How many CTAs, or cores, have started."""


class Hardware(Protocol):
    """Hardware that is emulated. The parameters are those of its kernels."""

    def ready(self, params: Any) -> Any:
        """Returns the parameters as they run; raises for a kernel that cannot start."""

    def names(self, params: Any) -> Sequence[str]:
        """Returns the names of the results of a device."""

    def launch(
        self,
        params: Any,
        arrays: Sequence[Sequence[Any]],
        plan: Plan,
        schedule: types.InterpretParams,
        choices: Directed | None,
    ) -> Launch:
        """Returns a launch.

        Args:
          params: those that are ready.
          arrays: the operands of each device.
          plan: of the body, that of `planned` or an observed copy.
          schedule: parameters of the emulator.
          choices: instead of those of the schedule.
        """


def execution_of(
    params: types.InterpretParams, choices: Directed | None = None
) -> Execution:
    """Returns a run with parameters of the emulator.

    Args:
      params: the parameters.
      choices: instead of those of the parameters' seed.
    """
    return Execution(
        seed=params.seed,
        asynchrony=params.asynchrony,
        max_steps=params.max_steps,
        detect_races=params.detect_races,
        accept_races=params.like_upstream and not params.detect_races,
        lenient_reads=params.out_of_bounds_reads == "uninitialized",
        choices=choices,
    )


def run_devices(
    hardware: Hardware,
    params: Any,
    arrays: Sequence[Sequence[Any]],
    choices: Directed | None = None,
) -> list[list[np.ndarray]]:
    """Runs a launch on the CPU, on all devices that take part in it.

    Args:
      hardware: what it runs on.
      params: parameters of the kernel.
      arrays: the operands of each device.
      choices: of one run, instead of those of the parameters.

    Returns:
      For each device, an array for each result.

    Raises:
      KernelError and its subclasses: a mistake that the run found.
      OutOfResources: the kernel exceeds the target's resources.
      LayoutError: the compiler has no code for the kernel.
      NotModelledError: the emulator does not model an operation.
    """
    return by_device(_run(hardware, params, arrays, choices), len(arrays))


def by_device(results: list[np.ndarray], devices: int) -> list[list[np.ndarray]]:
    """Returns the results of one device after the other, for each of them."""
    count = len(results) // devices
    return [results[i * count : (i + 1) * count] for i in range(devices)]


def _run(
    hardware: Hardware, params: Any, arrays: Any, choices: Directed | None
) -> list[np.ndarray]:
    """Returns the results of one device after the other."""
    interpret, devices = params.interpret, len(arrays)
    if isinstance(interpret, Observed):
        return interpret.recorder.launch(
            params, lambda: _observed(hardware, params, arrays), devices=devices
        )
    params = hardware.ready(params)
    if not isinstance(interpret, types.InterpretParams):
        interpret = types.InterpretParams()

    def run(schedule: types.InterpretParams) -> list[np.ndarray]:
        plan = planned(params)
        launch = hardware.launch(params, arrays, plan, schedule, choices)
        results, _ = _finished(launch, contextlib.nullcontext())
        return results

    if interpret.schedules == 1 or choices is not None:
        return run(interpret)
    return schedules.run_all(interpret, run, _names(hardware, params, devices))


def _names(hardware: Hardware, params: Any, devices: int) -> list[str]:
    names = [*hardware.names(params)]
    if devices == 1:
        return names
    return [f"{name} of device {i}" for i in range(devices) for name in names]


def _observed(hardware: Hardware, params: Any, arrays: Any) -> Run:
    """Returns what runs a launch of a check."""
    params = hardware.ready(params)

    def run(
        schedule: types.InterpretParams, observer: Observer, choices: Directed | None
    ) -> tuple[list[np.ndarray], int]:
        plan = observer.plan(planned(params))
        launch = hardware.launch(params, arrays, plan, schedule, choices)
        return _finished(launch, observer.observing(launch.execution))

    return run


def planned(params: Any) -> Plan:
    """Returns the plan of a kernel's body, which watches the arithmetic of indices."""
    indices.mark(region_of(params.jaxpr))
    return plan_of(params.jaxpr, params.mesh.machine)


def _finished(launch: Launch, observing: Any) -> tuple[list[np.ndarray], int]:
    """Runs a launch; returns its results, and how many groups have started."""
    try:
        # Integer arithmetic wraps as on hardware, also where numpy would warn.
        with observing, np.errstate(all="ignore"):
            scheduler.run(launch.execution, launch.pools())
            if not launch.execution.abandoned:
                launch.finish()
    finally:
        launch.dissolve()
    return launch.results(), launch.started


def explore_kernel(
    hardware: Hardware, params: Any, arrays: Sequence[Any], **limits: Any
) -> Explored[list[np.ndarray]]:
    """Runs a launch on a device in each order of its synchronization.

    Args:
      hardware, params: as of `run_devices`.
      arrays: the operands.
      limits: as of `orders.explore`.
    """
    return schedules.run_orders(
        lambda choices: _run(hardware, params, [arrays], choices),
        _names(hardware, params, 1),
        **limits,
    )
