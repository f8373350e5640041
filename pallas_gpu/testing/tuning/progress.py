# SPDX-License-Identifier: Apache-2.0
"""A progress bar of the tuner, if tqdm is installed (`pallas-gpu[tune]`)."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """A bar that shows which step the tuner is at; without tqdm it shows nothing.

    Attributes:
      seconds: how long each step has taken.
    """

    def __init__(self, shown: bool | None):
        """Shows a bar if asked for; None: if the error output is a terminal."""
        self.seconds: dict[str, float] = {}
        self._step: tuple[str, float] | None = None
        self._bar: Any = None
        wanted = sys.stderr.isatty() if shown is None else shown
        self._tqdm = _tqdm() if wanted else None

    def begin(self, step: str, total: int) -> None:
        """Begins a step of so many parts."""
        self.end()
        self._step = step, time.monotonic()
        if self._tqdm is not None:
            self._bar = self._tqdm(total=total, desc=step, leave=False)

    def advance(self, parts: int = 1) -> None:
        """Some parts of the step are done."""
        if self._bar is not None:
            self._bar.update(parts)

    def end(self) -> None:
        """The step is done."""
        if self._step is not None:
            name, start = self._step
            self.seconds[name] = time.monotonic() - start
            self._step = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _tqdm() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm
