# SPDX-License-Identifier: Apache-2.0
"""docs/ops.md has every ready kernel and every configuration."""

from __future__ import annotations

import inspect
import re

from pallas_gpu import ops
from tests.support.every import every
from tools.source_tree import ROOT

TEXT = (ROOT / "docs/ops.md").read_text()
FUNCTIONS = [
    name
    for name in ops.__all__
    if inspect.isfunction(getattr(ops, name)) and name != "clear_cache"
]


@every(FUNCTIONS)
def test_a_row_of_a_table_has_every_function(name):
    assert re.search(rf"^\| [^|]*`ops\.{name}`", TEXT, re.MULTILINE)


@every(n for n in ops.__all__ if n.endswith("Config"))
def test_every_configuration_is_named(name):
    assert f"`{name}`" in TEXT


def test_every_function_that_the_page_names_exists():
    names = set(re.findall(r"ops\.(\w+)", TEXT))
    assert names <= set(ops.__all__)


def test_its_speeds_are_those_of_the_measurements():
    measured = [
        {cell.strip() for cell in line.split("|")}
        for line in (ROOT / "docs/performance.md").read_text().splitlines()
        if line.startswith("|")
    ]
    section = TEXT.split("## Speed on an H200")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `ops.")]
    assert table
    for line in table:
        *_, microseconds, _, ratio, _ = (cell.strip() for cell in line.split("|"))
        assert any({microseconds, ratio} <= row for row in measured), line
