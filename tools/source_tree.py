# SPDX-License-Identifier: Apache-2.0
"""The project's source files, as used by the house checks and the map.

In a git checkout these are the files that git tracks or would track; in any other
folder (an unpacked archive, a test's tree) all files.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = (
    *("pallas_gpu", "tests", "tools", "benchmarks", "demo", "examples", "tutorials"),
)
SOURCE_SUFFIXES = (".py", ".sh")


def project_files(root: Path = ROOT) -> list[str]:
    """All files of the project, relative to its root, with forward slashes."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others"]
        command.append("--exclude-standard")
        listing = subprocess.run(command, cwd=root, capture_output=True, check=True)
        names = {name for name in listing.stdout.decode().split("\0") if name}
        # A deleted file is in git's index until the deletion is committed.
        return sorted(name for name in names if (root / name).is_file())
    paths = (path for path in root.rglob("*") if path.is_file())
    return sorted(path.relative_to(root).as_posix() for path in paths)


def source_files(root: Path = ROOT) -> list[str]:
    """The source files of the project."""
    return [
        name
        for name in project_files(root)
        if name.startswith(tuple(f"{folder}/" for folder in SOURCE_FOLDERS))
        and name.endswith(SOURCE_SUFFIXES)
    ]


def python_files(root: Path = ROOT) -> list[str]:
    """The Python source files of the project."""
    return [name for name in source_files(root) if name.endswith(".py")]


@functools.lru_cache(maxsize=1024)
def syntax_tree(source: str) -> ast.Module:
    """The tree of a file's text, which several house checks read and none changes."""
    return ast.parse(source)
