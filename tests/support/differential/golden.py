# SPDX-License-Identifier: Apache-2.0
"""The files beside the tests, a line for each kernel, in which both sides agree."""

from __future__ import annotations

import pathlib


def lines(path: pathlib.Path) -> dict[str, str]:
    """Returns the lines of a file by the names before their colons."""
    return dict(line.split(": ", 1) for line in path.read_text().splitlines())
