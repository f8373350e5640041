# SPDX-License-Identifier: Apache-2.0
"""The texts that tests expect, in a file beside each test file.

`test_x.txt` has a text for each such test of test_x.py and each row of its table. `make
golden` writes these files; what changes in them is reviewed as code is.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# What the tests of {} expect, written by `make golden`.
"""
NAME = "== "
# The tests that have a text, of each test file, in their order.
COLLECTED: dict[Path, list[str]] = {}


def has_text(item: pytest.Item) -> bool:
    """Whether a test has a text."""
    return hasattr(getattr(item, "function", None), "has_golden_text")


def collect(items: Iterable[pytest.Item]) -> None:
    """Takes note of the tests that have a text."""
    for item in items:
        COLLECTED.setdefault(item.path, []).extend([item.name] * has_text(item))


def compare(request: pytest.FixtureRequest, text: str) -> None:
    """Fails unless the text is what the file says of the running test."""
    path, name = request.path.with_suffix(".txt"), request.node.name
    if request.config.getoption("golden"):
        partial = any("::" in argument for argument in request.config.args)
        known = load(path) | {name: text}
        order = COLLECTED[request.path]
        rest = [x for x in known if partial and x not in order]
        write(path, {x: known[x] for x in [*order, *rest] if x in known})
        load.cache_clear()
    if name not in load(path):
        pytest.fail(f"{path.name} does not have it: `make golden`\n{text}", False)
    if (expected := load(path)[name]) != text:
        rows = difflib.ndiff(expected.splitlines(), text.splitlines())
        pytest.fail("\n".join([f"not what {path.name} says:", *rows]), False)


@functools.cache
def load(path: Path) -> dict[str, str]:
    """The text of each test of a file."""
    texts: dict[str, str] = {}
    names: list[str] = []
    lines: list[str] = []
    for line in [*(path.read_text().splitlines() if path.exists() else ()), NAME]:
        if not line.startswith(NAME):
            lines.append(line)
            continue
        if "".join(lines):
            texts |= dict.fromkeys(names, "\n".join(lines).strip("\n"))
            names = []
        names.append(line.removeprefix(NAME))
        lines = []
    return texts


def write(path: Path, texts: dict[str, str]) -> None:
    """Writes the text of each test; neighbours with the same text share it."""
    rows = [HEAD.format(path.with_suffix(".py").name)]
    for (name, text), (_, following) in pairwise([*texts.items(), ("", None)]):
        rows.append(NAME + name)
        if text != following:
            rows.append(text + "\n")
    path.write_text("\n".join(rows).rstrip("\n") + "\n")
