# SPDX-License-Identifier: Apache-2.0
"""Files, functions and folders stay small, and no file is a drawer for leftovers."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path, PurePosixPath

from tools.source_tree import ROOT, python_files

FILE_LINES = 600
# Without the docstring: the public names have to describe every argument.
FUNCTION_LINES = 80
FOLDER_FILES = 20
# A file whose name says nothing collects what has no place; a thing has a stem.
EMPTY_NAMES = {"utils", "util", "helpers", "common", "misc"}


def size_complaints(root: Path) -> list[str]:
    """One line for every file, function or folder of `root` that is too large."""
    found = []
    files = python_files(root)
    for file in files:
        text = (root / file).read_text()
        lines = text.count("\n")
        if lines > FILE_LINES:
            found.append(f"{file}: {lines} lines, at most {FILE_LINES}")
        if PurePosixPath(file).stem.strip("_") in EMPTY_NAMES:
            found.append(f"{file}: a name that says nothing")
        for node in statements(ast.parse(text, filename=file)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = line_count(node) - docstring_lines(node)
            if length > FUNCTION_LINES:
                found.append(
                    f"{file}:{node.lineno}: {node.name} has {length} lines, at most "
                    f"{FUNCTION_LINES}"
                )
    folders = Counter(str(PurePosixPath(file).parent) for file in files)
    for folder, count in sorted(folders.items()):
        if count > FOLDER_FILES and folder.startswith("pallas_gpu"):
            found.append(f"{folder}: {count} files, it needs inner rooms")
    return found


def statements(tree: ast.Module) -> list[ast.AST]:
    """All statements of a file, which is much less than all its nodes."""
    found: list[ast.AST] = [tree]
    for node in found:  # grows by the blocks of what is in it
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(node, block, ())
    return found


def line_count(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return line_count(node.body[0]) if ast.get_docstring(node) is not None else 0


def test_files_functions_and_folders_stay_small():
    assert size_complaints(ROOT) == []


def test_a_long_file_is_found(tmp_path: Path):
    _write(tmp_path / "tools/long.py", "x = 0\n" * (FILE_LINES + 1))
    assert size_complaints(tmp_path) == ["tools/long.py: 601 lines, at most 600"]


def test_a_file_of_the_largest_size_passes(tmp_path: Path):
    _write(tmp_path / "tools/long.py", "x = 0\n" * FILE_LINES)
    assert size_complaints(tmp_path) == []


def test_a_long_function_is_found(tmp_path: Path):
    body = "    x = 0\n" * FUNCTION_LINES
    _write(tmp_path / "demo/long.py", f"class C:\n  def f():\n{body}")
    found = size_complaints(tmp_path)
    assert found == ["demo/long.py:2: f has 81 lines, at most 80"]


def test_a_function_of_the_largest_size_passes(tmp_path: Path):
    body = "    x = 0\n" * (FUNCTION_LINES - 1)
    _write(tmp_path / "demo/long.py", f"def f():\n{body}")
    assert size_complaints(tmp_path) == []


def test_the_docstring_of_a_function_does_not_count(tmp_path: Path):
    docstring = '    """First.\n' + "    more\n" * FUNCTION_LINES + '    """\n'
    body = "    x = 0\n" * (FUNCTION_LINES - 1)
    _write(tmp_path / "demo/long.py", f"def f():\n{docstring}{body}")
    assert size_complaints(tmp_path) == []


def test_a_drawer_for_leftovers_is_found(tmp_path: Path):
    _write(tmp_path / "pallas_gpu/emulator/_utils.py", "x = 0\n")
    found = size_complaints(tmp_path)
    assert found == ["pallas_gpu/emulator/_utils.py: a name that says nothing"]


def test_a_crowded_folder_is_found(tmp_path: Path):
    for number in range(FOLDER_FILES + 1):
        _write(tmp_path / f"pallas_gpu/types/t{number}.py", "x = 0\n")
    found = size_complaints(tmp_path)
    assert found == ["pallas_gpu/types: 21 files, it needs inner rooms"]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
