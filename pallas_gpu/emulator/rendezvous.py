# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of devices: the launches of a kernel on all of them run as one.

JAX runs a callback for each device, in threads of its own. Those of a kernel whose
devices reach each other's memory wait here for one another; the last one to come runs
the machine of all devices, and each returns the results of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallas_gpu import errors

# Seconds without an emulated kernel that starts, runs or ends, after which devices that
# have not come are taken to be missing.
PATIENCE_S = 60.0

_CHANGED = threading.Condition()


class _Activity:
    """What the emulator does in this process, under the lock of `_CHANGED`.

    Attributes:
      running: number of kernels that run.
      since: when one has started or ended last.
    """

    running = 0
    since = time.monotonic()

    @classmethod
    def idle_s(cls) -> float:
        """Returns for how long nothing has happened."""
        return 0.0 if cls.running else time.monotonic() - cls.since


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Says that a kernel runs: whoever waits for its device has to be patient."""
    with _CHANGED:
        _Activity.running += 1
    try:
        yield
    finally:
        with _CHANGED:
            _Activity.running -= 1
            _Activity.since = time.monotonic()


@dataclasses.dataclass(eq=False)
class _Meeting:
    """One launch of a kernel on all devices.

    Attributes:
      operands: of the devices that have come, by logical id.
      results: of each device, once all have come and the kernel has ended.
      error: what has been raised instead.
    """

    operands: dict[int, Sequence[Any]] = dataclasses.field(default_factory=dict)
    results: Sequence[Any] | None = None
    error: BaseException | None = None


class Rendezvous:
    """Where the devices meet that launch a kernel.

    Args:
      devices: how many take part.
      run: runs the kernel on all of them, given the operands of each.
      name: of the kernel, for messages.
      where: its line.
    """

    def __init__(
        self,
        devices: int,
        run: Callable[[list[Sequence[Any]]], Sequence[Any]],
        name: str,
        where: str | None,
    ):
        self._devices = devices
        self._run = run
        self._name = name
        self._where = where
        # A device launches the next one when the others may still wait for the last.
        self._open: list[_Meeting] = []

    def launch(self, device: int, operands: Sequence[Any]) -> Any:
        """Launches the kernel on a device; returns its results.

        Raises:
          DeadlockError: another device does not come.
          Errors of the run, on every device.
        """
        with _CHANGED:
            _Activity.since = time.monotonic()
            meeting = next((m for m in self._open if device not in m.operands), None)
            if meeting is None:
                meeting = _Meeting()
                self._open.append(meeting)
            meeting.operands[device] = operands
            complete = len(meeting.operands) == self._devices
            if complete:
                self._open.remove(meeting)
            else:
                self._await(meeting)
        if complete:
            self._execute(meeting)
        if meeting.error is not None:
            raise meeting.error
        assert meeting.results is not None
        return meeting.results[device]

    def _await(self, meeting: _Meeting) -> None:
        """Waits for the end of a launch, or until a device has to be missing."""
        while meeting.results is None and meeting.error is None:
            left = PATIENCE_S - _Activity.idle_s()
            if left <= 0 and meeting in self._open:
                self._open.remove(meeting)
                meeting.error = self._missing(meeting)
                _CHANGED.notify_all()
                return
            _CHANGED.wait(max(left, 0.01))

    def _execute(self, meeting: _Meeting) -> None:
        results, error = None, None
        try:
            with running():
                operands = [meeting.operands[i] for i in range(self._devices)]
                results = self._run(operands)
        except BaseException as raised:
            error = raised
        with _CHANGED:
            meeting.results, meeting.error = results, error
            _CHANGED.notify_all()

    def _missing(self, meeting: _Meeting) -> errors.DeadlockError:
        came = sorted(meeting.operands)
        missing = [i for i in range(self._devices) if i not in meeting.operands]
        return errors.DeadlockError(
            f"kernel {self._name}: devices wait for others, which have not launched it",
            expected=f"a launch on each of the {self._devices} devices of the mesh: "
            "they access each other's memory",
            got=f"launches on {came} and none on {missing}, and {PATIENCE_S:g} s in "
            "which no emulated kernel has run",
            hint="let every device launch the kernel equally often, and in the same "
            "order as others: outside of lax.cond and loops whose iterations differ "
            "between devices",
            where=self._where,
        )
