# SPDX-License-Identifier: Apache-2.0
"""The tutorials run to their end, and each notebook agrees with its text form.

The text form (`.py`) is the source. After a change to it,
`.venv/bin/jupytext --sync tutorials/*.py` brings the notebook up to date.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.source_tree import ROOT

TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
# Under a minute each, the compiler's start included, on a machine with two cores.
TIMEOUT_S = 300

each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)


def test_there_is_a_first_tutorial():
    assert "01_first_kernel" in [path.stem for path in TUTORIALS]


@pytest.mark.smoke
@each_tutorial
def test_every_code_cell_runs_in_order_in_a_fresh_process(path: Path):
    run(path)


# The modules of SparseCores are interpreted in tests alone.
@pytest.mark.parametrize(
    "path",
    [path for path in TUTORIALS if "sparsecore" not in path.stem],
    ids=lambda p: p.stem,
)
def test_every_code_cell_runs_as_emitted_code_too(path: Path):
    """The mistakes in them are found as well, as the same errors."""
    run(path, PALLAS_GPU_INTERPRET="emitted")


def run(path: Path, **variables: str) -> None:
    # The text form is a Python script whose statements are the code cells.
    path_and_platform = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=ROOT,
        env={**os.environ, **path_and_platform, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_notebook_runs_in_jupyter(monkeypatch: pytest.MonkeyPatch):
    """Each one's cells run as a script above: the text form agrees with it."""
    pytest.importorskip("ipykernel")
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(TUTORIALS[0].with_suffix(".ipynb"), as_version=4)
    # Raises what a cell raises, with the cell.
    nbclient.NotebookClient(notebook, timeout=TIMEOUT_S).execute()
    assert all(cell.execution_count for cell in code_cells(notebook))


@each_tutorial
def test_the_notebook_agrees_with_its_text_form(path: Path):
    jupytext = pytest.importorskip("jupytext")
    nbformat = pytest.importorskip("nbformat")
    text = jupytext.read(path)
    notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    # Where they differ: jupytext --sync, as above.
    assert contents(notebook) == contents(text)


@each_tutorial
def test_the_notebook_holds_no_outputs(path: Path):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    assert [cell.outputs for cell in code_cells(notebook) if cell.outputs] == []
    assert {cell.execution_count for cell in code_cells(notebook)} == {None}


def contents(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]
