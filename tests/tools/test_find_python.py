# SPDX-License-Identifier: Apache-2.0
"""tools/find_python.sh: where an interpreter is sought, and what is said if none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.source_tree import ROOT

OLD_PYTHON = "#!/bin/sh\nexit 1\n"
THIS_PYTHON = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder for PATH with what a shell script needs and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat"):
        path = shutil.which(name)
        assert path
        (folder / name).symlink_to(path)
    return folder


def find(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "tools" / "find_python.sh")],
        env={"PATH": str(path), "HOME": str(path / "nobody"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def is_this_python(result: subprocess.CompletedProcess[str]) -> bool:
    assert result.returncode == 0, result.stderr
    return os.path.samefile(result.stdout.strip(), sys.executable)


def test_without_an_interpreter_it_says_so_in_one_sentence_and_exits_2(bare: Path):
    result = find(bare)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("No Python 3.12 or newer was found on PATH")


def test_an_interpreter_on_path_is_found(bare: Path):
    program(bare / "python3", THIS_PYTHON)
    assert is_this_python(find(bare))


def test_a_name_on_path_that_fails_when_run_is_passed_over(bare: Path):
    program(bare / "python3.12", OLD_PYTHON)
    program(bare / "python", THIS_PYTHON)
    assert is_this_python(find(bare))


def test_an_interpreter_among_the_versions_of_pyenv_is_found(bare: Path):
    root = bare / "pyenv"
    program(root / "versions/3.11.9/bin/python", OLD_PYTHON)
    program(root / "versions/3.12.1/bin/python", THIS_PYTHON)
    assert is_this_python(find(bare, PYENV_ROOT=str(root)))


def test_an_interpreter_that_uv_knows_is_found(bare: Path):
    program(bare / "uv", f'#!/bin/sh\necho "{sys.executable}"\n')
    assert is_this_python(find(bare))


def test_an_interpreter_that_is_named_goes_first(bare: Path):
    program(bare / "python3.12", OLD_PYTHON)
    assert is_this_python(find(bare, PYTHON=sys.executable))


def test_a_named_interpreter_that_does_not_fit_is_an_error(bare: Path):
    program(bare / "python3", THIS_PYTHON)
    program(bare / "old", OLD_PYTHON)
    result = find(bare, PYTHON=str(bare / "old"))
    assert result.returncode == 2
    assert result.stderr == f"PYTHON={bare}/old is not a Python 3.12 or newer.\n"


def test_a_module_that_is_needed_must_be_there(bare: Path):
    program(bare / "python3", THIS_PYTHON)
    assert find(bare, NEED_MODULE="json").returncode == 0
    result = find(bare, NEED_MODULE="no_such_module")
    assert result.returncode == 2
    assert "3.12 or newer with no_such_module" in result.stderr
