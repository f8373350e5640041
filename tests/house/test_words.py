# SPDX-License-Identifier: Apache-2.0
"""No file names a place that exists on one machine only: paths, package hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.source_tree import ROOT, project_files

# Written in pieces, so that this file does not complain about itself.
_LOCAL_FOLDERS = "|".join(["work", "root", "opt", "workspace"])
FORBIDDEN = {
    "a path of one machine": re.compile(rf"(?<![\w.\-~}}/])/({_LOCAL_FOLDERS})/\w"),
    "a home folder": re.compile(r"(?<![\w.\-~/])/(home|Users)/\w"),
    "a host of a package registry": re.compile(
        r"pypi\.(org|nvidia)|python" + r"hosted\.org|registry\.npm|proxy\.golang",
        re.IGNORECASE,
    ),
}
# CUDA's own place on Linux is the same everywhere; nobody's home is an example.
ALLOWED = re.compile(r"/usr/local/cuda|/opt/cuda|/home/(me|user|you)\b")


def word_complaints(root: Path) -> list[str]:
    """One line for every place in the files of `root` that names one machine."""
    found = []
    for file in project_files(root):
        try:
            text = (root / file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture has no words
        for number, line in enumerate(text.splitlines(), 1):
            line = ALLOWED.sub("", line)
            for what, pattern in FORBIDDEN.items():
                if (match := pattern.search(line)) is not None:
                    found.append(f"{file}:{number}: {what}: {match.group()}")
    return found


def test_no_file_names_a_place_on_one_machine():
    assert word_complaints(ROOT) == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("cd " + "/work" + "/main", "a path of one machine"),
        ("'/" + "opt/wheels'", "a path of one machine"),
        ("see /" + "home/ada/notes", "a home folder"),
        ("see /" + "Users/ada/notes", "a home folder"),
        ("https://py" + "pi.org/simple", "a host of a package registry"),
    ],
    ids=["work", "opt", "home", "users", "registry"],
)
def test_a_word_of_one_machine_is_found(tmp_path: Path, line: str, what: str):
    (tmp_path / "notes.md").write_text(f"first\n{line}\n")
    (found,) = word_complaints(tmp_path)
    assert found.startswith(f"notes.md:2: {what}")


@pytest.mark.parametrize(
    "line",
    ["a/work/b is relative", "${HOME}/.pyenv", "/usr/local/cuda/bin", "/home/me/bin"],
)
def test_words_that_hold_everywhere_pass(tmp_path: Path, line: str):
    (tmp_path / "notes.md").write_text(line)
    assert word_complaints(tmp_path) == []
