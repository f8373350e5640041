# SPDX-License-Identifier: Apache-2.0
"""Runs of a check: each launch takes place in several orders, and nothing is raised.

The recorder travels in the parameters of the emulator, which are parameters of the
kernel primitive: so it reaches launches inside of jitted functions, in whichever thread
of Python they take place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from pallas_gpu import errors, findings, types
from pallas_gpu.emulator.coverage import Coverage
from pallas_gpu.emulator.engine import evaluate, race_report
from pallas_gpu.emulator.engine.execution import Execution, recording
from pallas_gpu.emulator.engine.orders.choices import Directed
from pallas_gpu.emulator.engine.orders.explore import explore
from pallas_gpu.emulator.engine.plan import Plan
from pallas_gpu.entry import call

# What may explain that elements without a value are read: at the line where it shows,
# or also at that of the other access.
_EXPLAINS = {"missing-wait": 1, "out-of-bounds": 1, "race": 2, "race-between-ctas": 2}


class Run(Protocol):
    """A launch that can be repeated."""

    def __call__(
        self,
        schedule: types.InterpretParams,
        observer: Observer,
        choices: Directed | None,
    ) -> tuple[list[np.ndarray], int]:
        """Runs it; returns the results, and how many CTAs have run."""


@dataclasses.dataclass(eq=False)
class Kernel:
    """What is known of a kernel after a check.

    Attributes:
      params: of its first launch.
      launches: how often it has been launched.
      schedules: how many runs there were.
      ctas: how many CTAs have run, in all of them.
      compared: how many accesses have been compared with earlier ones.
      orders: how many orders were explored, no two of a launch equivalent; None where
        schedules were sampled.
      complete: whether each possible order of its launches is equivalent to one of
        them.
      has_failed: whether something has been found in it.
      emitted: whether the code that it is lowered to is run.
      coverage: its operations; None if it could not start, or is run as emitted code.
    """

    params: call.CallParams
    launches: int = 0
    schedules: int = 0
    ctas: int = 0
    compared: int = 0
    orders: int | None = None
    complete: bool = False
    has_failed: bool = False
    emitted: bool = False
    coverage: Coverage | None = None


class Observer:
    """One run.

    Args:
      kernel: what is launched.
      reproduce: parameters that repeat the run.
    """

    def __init__(self, kernel: Kernel, reproduce: str):
        self._kernel = kernel
        self._reproduce = reproduce
        self.found: dict[Any, findings.Finding] = {}

    def plan(self, plan: Plan) -> Plan:
        """Returns a plan that counts what is executed, the same in all runs."""
        if self._kernel.coverage is None:
            self._kernel.coverage = Coverage(plan)
        return self._kernel.coverage.plan

    @contextlib.contextmanager
    def observing(self, execution: Execution) -> Iterator[None]:
        """Records what is reported inside, and what ends the run."""

        def record(error: errors.PallasGpuError) -> None:
            threads: list[Any] = [
                t for group in execution.resident for t in group.threads
            ]
            # None runs while asynchronous work advances.
            for thread in threads:
                if thread.is_running:
                    evaluate.located(error, thread)
            self.add(error.with_location(execution.default_line()))

        try:
            with recording(record):
                yield
        except errors.PallasGpuError as error:
            self.add(error)
        self._kernel.compared += execution.compared

    def add(self, error: errors.PallasGpuError) -> None:
        """Adds a finding, of those with the same rule at the same lines one."""
        found = dataclasses.replace(
            error.finding,
            kernel=self._kernel.params.name,
            reproduce=self._reproduce,
            after=len(self.found),
        )
        self.found.setdefault(found.key, found)


class Recorder:
    """The launches of a check.

    Args:
      seconds: how long each launch is run in one order after the other, until there is
        no other one; None: in the schedules of its parameters.

    Attributes:
      found: the findings by what makes them one.
      kernels: by their bodies and how they are launched.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        # Devices of a sharded function launch at the same time.
        self._lock = threading.Lock()
        self.found: dict[Any, findings.Finding] = {}
        self.kernels: dict[Any, Kernel] = {}

    @property
    def explores(self) -> bool:
        """Whether each launch is run in one order after the other."""
        return self._seconds is not None

    def add(self, each: Iterable[findings.Finding]) -> None:
        """Adds the findings of a run; those of the same kind at the same lines once."""
        for new in each:
            old = self.found.get(new.key)
            if old is not None:
                first = min(old, new, key=lambda x: x.after)
                new = dataclasses.replace(first, schedules=old.schedules + 1)
            self.found[new.key] = new

    def findings(self) -> list[findings.Finding]:
        """Returns what was found, first what nothing else of its run can have caused.

        Elements without a value that are read at a line that races, or out of bounds,
        are not a mistake of their own.
        """
        found = sorted(self.found.values(), key=lambda f: f.after)
        explained = {
            (f.kernel, f.buffer, place.file, place.line)
            for f in found
            for place in (f.at, f.other)[: _EXPLAINS.get(f.rule.id, 0)]
            if place is not None
        }
        return [
            f
            for f in found
            if f.rule.id != "uninitialized-read"
            or (f.kernel, f.buffer, f.at.file, f.at.line) not in explained
        ]

    def launch(
        self,
        params: call.CallParams,
        prepare: Callable[[], Run],
        *,
        emitted: bool = False,
        devices: int = 1,
    ) -> list[np.ndarray]:
        """Runs a launch in all schedules.

        Args:
          params: its parameters.
          prepare: returns what runs it; raises for a kernel that cannot start.
          emitted: whether that is the code that it is lowered to.
          devices: on how many devices.

        Returns:
          The results of the first run, of one device after the other; zeros if there is
          none.
        """
        with self._lock:
            key = (id(params.jaxpr), params.mesh, params.batch, params.compiler_params,
                   params.interpret)  # fmt: skip
            kernel = self.kernels.setdefault(key, Kernel(params, emitted=emitted))
            kernel.launches += 1
            launch = _Launch(self, kernel, prepare)
            if self._seconds is None:
                launch.sample()
            else:
                launch.explore(self._seconds)
            results = launch.first
        if results is None:
            return [np.zeros(a.shape, a.dtype) for a in params.out_avals * devices]
        return results


class _Launch:
    """A launch of a check.

    Attributes:
      first: the results of its first run.
    """

    def __init__(self, recorder: Recorder, kernel: Kernel, prepare: Callable[[], Run]):
        assert isinstance(kernel.params.interpret, types.InterpretParams)
        self._recorder = recorder
        self._kernel = kernel
        self._prepare = functools.cache(prepare)
        self._schedules = kernel.params.interpret.each_schedule()
        self.first: list[np.ndarray] | None = None

    def sample(self) -> None:
        """Runs it in the schedules of its parameters."""
        for schedule in self._schedules:
            found = self._run(schedule, str(schedule))
            if any(f.rule.id == "livelock" for f in found) or self.first is None:
                break

    def explore(self, seconds: float) -> None:
        """Runs it in each order, up to equivalence, until one shows a mistake."""
        kernel = self._kernel
        kernel.orders = kernel.orders or 0
        # At least one run ends, however little time there is.
        if self._run(self._schedules[0], str(self._schedules[0])):
            return
        explored = explore(
            lambda choices: self._run(self._schedules[0], 'orders="all"', choices),
            seconds=seconds,
            fails=bool,
        )
        kernel.complete = explored.complete and (
            kernel.launches == 1 or kernel.complete
        )
        kernel.orders += explored.orders

    def _run(
        self,
        schedule: types.InterpretParams,
        reproduce: str,
        choices: Directed | None = None,
    ) -> list[findings.Finding]:
        """Runs it once; returns what was found."""
        kernel, observer = self._kernel, Observer(self._kernel, reproduce)
        try:
            results, ctas = self._prepare()(schedule, observer, choices)
        except errors.PallasGpuError as error:
            observer.add(error)
        else:
            kernel.schedules += 1
            kernel.ctas += ctas
            if self.first is None:
                self.first = results
            if not observer.found and not kernel.has_failed:
                self._compare(observer, results, reproduce)
            self._add_not_modelled(observer)
        kernel.has_failed |= bool(observer.found)
        self._recorder.add(observer.found.values())
        return [*observer.found.values()]

    def _compare(
        self, observer: Observer, results: list[np.ndarray], reproduce: str
    ) -> None:
        """Adds integers that differ between runs; floats depend on rounding."""
        assert self.first is not None
        for i, (a, b) in enumerate(zip(self.first, results, strict=True)):
            if a.dtype.kind in "iub":
                name = f"output {i} (GMEM {a.dtype.name}{list(a.shape)})"
                error = race_report.schedule_dependent(
                    name, a, b, self._schedules[0], reproduce
                )
                if error is not None:
                    observer.add(error)

    def _add_not_modelled(self, observer: Observer) -> None:
        """Adds what a run would have met behind the first such operation."""
        coverage = self._kernel.coverage
        if coverage is not None and any(
            f.rule.id == "not-modelled" for f in observer.found.values()
        ):
            for error in coverage.not_modelled():
                observer.add(error)
