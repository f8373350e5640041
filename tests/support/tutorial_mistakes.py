# SPDX-License-Identifier: Apache-2.0
"""Tutorials with a mistake in one of their kernels."""

from __future__ import annotations

import runpy
from pathlib import Path


def run_with_a_mistake(
    tutorial: Path, folder: Path, function: str, right: str, wrong: str
) -> None:
    """Runs a tutorial to the end of the cells of a function, with a text replaced.

    Args:
      tutorial: its script.
      folder: for the changed script.
      function: the name of the last function to run.
      right, wrong: what is replaced, and by what.
    """
    text = tutorial.read_text()
    text = text[: text.index("\n\n# %%", text.index(f"def {function}("))]
    assert right in text, "the tutorial has changed: change this test too"
    path = folder / "mistake.py"
    path.write_text(text.replace(right, wrong))
    runpy.run_path(str(path))
