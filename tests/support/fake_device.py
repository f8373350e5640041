# SPDX-License-Identifier: Apache-2.0
"""A device of which tests choose the kernels' times: the `timer` of measurements."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any


class FakeDevice:
    """Records the kernels that its functions launch, as CUPTI does on a GPU.

    Attributes:
      launched: the names of all kernels, in order.
    """

    def __init__(self) -> None:
        self.launched: list[str] = []
        self._recorded: list[tuple[str, float]] = []

    def kernel(self, name: str, *milliseconds: float) -> Callable[..., Any]:
        """Returns a function that launches one kernel, with these times in turn."""
        times = itertools.cycle(milliseconds)
        return lambda *args: self.launch(name, next(times), *args)

    def launch(self, name: str, milliseconds: float, *results: Any) -> Any:
        """Launches a kernel; returns what it is given."""
        self.launched.append(name)
        self._recorded.append((name, milliseconds))
        return results

    def __call__(self, run: Callable[[], Any]) -> list[tuple[str, float]]:
        """Returns the kernels that `run` launches, with their times."""
        self._recorded = []
        run()
        return self._recorded
