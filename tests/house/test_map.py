# SPDX-License-Identifier: Apache-2.0
"""MAP.md names every source file once and nothing else (`make map` mends it)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.source_tree import ROOT
from tools.update_map import file_list, map_complaints, purpose


def test_the_map_names_every_source_file_once_and_nothing_else():
    assert map_complaints(ROOT) == [], "run `make map`"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of two files whose map is right."""
    for name in ("pallas_gpu/errors.py", "tools/find.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "pallas_gpu/errors.py").write_text('"""Mistakes. More."""\n')
    (tmp_path / "tools/find.sh").write_text("#!/bin/sh\n# SPDX-X: y\n# Finds it.\n")
    (tmp_path / "MAP.md").write_text(file_list(tmp_path))
    return tmp_path


def test_a_generated_map_is_right(tree: Path):
    assert map_complaints(tree) == []
    assert "- `pallas_gpu/errors.py`: Mistakes\n" in (tree / "MAP.md").read_text()
    assert "- `tools/find.sh`: Finds it\n" in (tree / "MAP.md").read_text()


def test_what_the_map_says_wrong_is_found(tree: Path):
    (tree / "pallas_gpu/arch.py").write_text("")
    with (tree / "MAP.md").open("a") as stream:
        stream.write("- `tools/find.sh`: again\n- `tools/gone.sh`: gone\n")
    assert set(map_complaints(tree)) == {
        "MAP.md lacks pallas_gpu/arch.py",
        "MAP.md names tools/find.sh 2 times",
        "MAP.md names tools/gone.sh, which is not there",
    }


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("One thing. Another.", "One thing"),
        ("One thing:\nover two lines. And more.", "One thing: over two lines"),
        ("For 0.11.2 and sm_90a only.\n\nMore.", "For 0.11.2 and sm_90a only"),
    ],
)
def test_the_purpose_of_a_file_is_its_first_sentence(
    tmp_path: Path, docstring: str, sentence: str
):
    (tmp_path / "x.py").write_text(f'"""{docstring}"""\n')
    assert purpose(tmp_path / "x.py") == sentence
