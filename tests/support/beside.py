# SPDX-License-Identifier: Apache-2.0
"""What test files say of the operations that they test, for the tests of all of them.

A test file may end with tables:

- GOOD: from the name of a public function to a good call of it, `public_calls.Good`, or
  a function from the `Env` of a body to the arguments of one in a kernel;
- EFFECTS: from an argument, as "load.mask", to what shows that it has an effect: see
  tests/public/test_effects.py;
- FEATURES: rows of `features.row.Row`.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

TABLES = ("GOOD", "EFFECTS", "FEATURES")
TESTS = Path(__file__).parents[1]


def declared(table: str) -> Iterator[tuple[ModuleType, Any]]:
    """Each test module that has a table, and the table."""
    for module in _modules():
        if hasattr(module, table):
            yield module, getattr(module, table)


def merged(table: str, *others: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of all tables of a name, and others; a name has one row."""
    found: dict[str, Any] = {}
    for rows in (*others, *(rows for _, rows in declared(table))):
        assert found.keys().isdisjoint(rows), found.keys() & rows.keys()
        found |= rows
    return found


@functools.cache
def text_of(path: Path) -> str:
    """The text of a test file without its tables, which are not evidence."""
    text = whole = path.read_text(encoding="utf-8")
    for node in ast.parse(whole).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in TABLES:
            text = text.replace(ast.get_source_segment(whole, node) or "", "")
    return text


@functools.cache
def _modules() -> list[ModuleType]:
    starts = tuple(f"\n{name} = " for name in TABLES)
    return [
        importlib.import_module(".".join(path.relative_to(TESTS.parent).parts)[:-3])
        for path in sorted(TESTS.rglob("test_*.py"))
        if any(start in path.read_text(encoding="utf-8") for start in starts)
    ]
