# SPDX-License-Identifier: Apache-2.0
"""How tests state what an error says: class, sentence, rows, and the kernel's line.

The offending line of a test carries the comment `# HERE`.
"""

from __future__ import annotations

import inspect
import os
import sys
from types import FrameType

import pytest

from pallas_gpu.errors import PallasGpuError

MARK = "# HERE"


def marked_line(frame: FrameType) -> str:
    """`file:line` of the marked line in the function that runs in the frame."""
    lines, first = inspect.getsourcelines(frame.f_code)
    found = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(MARK)]
    assert len(found) == 1, f"{len(found)} lines end with {MARK}"
    return f"{os.path.basename(frame.f_code.co_filename)}:{found[0]} "


class old_refused:  # noqa: N801 - reads as the statement it stands for
    """Expects an error of exactly this class that says all it has to say.

    Args:
      error: the class.
      what: its first sentence.
      rows: parts of the rows expected, got, hint.
    """

    def __init__(self, error: type[PallasGpuError], what: str, **rows: str):
        self._what, self._rows = what, rows
        self._error = error
        self._raises = pytest.raises(error)
        self._line = marked_line(sys._getframe(1))

    def __enter__(self):
        self._info = self._raises.__enter__()
        return self._info

    def __exit__(self, *exc):
        suppressed = self._raises.__exit__(*exc)
        if suppressed:
            self._check(self._info.value)
        return suppressed

    def _check(self, error: PallasGpuError) -> None:
        assert type(error) is self._error
        assert error.what == self._what
        text = str(error)
        assert text.startswith(self._what)
        for label in ("expected:", "got:", "hint:", "at:"):
            assert f"\n  {label}" in text, f"no row {label!r} in\n{text}"
        assert self._line in str(error.where), text
        for row, part in self._rows.items():
            assert part in str(getattr(error, row)), text
