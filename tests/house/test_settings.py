# SPDX-License-Identifier: Apache-2.0
"""docs/settings.md lists the environment variables that the source reads or sets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from pallas_gpu import compiler
from tools.source_tree import ROOT

PAGE = ROOT / "docs" / "settings.md"
SOURCES = ["pallas_gpu", "demo", "benchmarks", "tools", "tests/lowering"]
FILES = ["tests/conftest.py"]
# A whole string of this form is the name of a variable, wherever it is used.
_NAME = re.compile(r"(PALLAS_GPU|MOSAIC_GPU|CUDA|JAX|XLA)_[A-Z]+(_[A-Z]+)*")
# Of what has none of this, nothing is parsed.
_MAY_NAME_ONE = re.compile(rf"{_NAME.pattern}|environ|\benv\b")
# Prefixes of what the offline compiler's process does not inherit.
_PREFIXES = {"MOSAIC_GPU_DUMP", "MOSAIC_GPU_LLVM_DEBUG"}


def variables(source: str) -> Iterator[str]:
    """The environment variables that a source names."""
    if not _MAY_NAME_ONE.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if _NAME.fullmatch(text):
                yield text
            case ast.Subscript(value=place, slice=ast.Constant(value=str(text))):
                if _is_environment(place):
                    yield text
            case ast.Call(func=ast.Attribute(value=place), args=[first, *_]):
                if _is_environment(place) and isinstance(first, ast.Constant):
                    yield str(first.value)


def _is_environment(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ", "env")


def in_the_source() -> set[str]:
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    paths += [ROOT / file for file in FILES]
    found = {name for p in paths for name in variables(p.read_text(encoding="utf-8"))}
    return found - _PREFIXES


def in_the_page() -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_page_lists_every_variable_of_the_source_and_no_other():
    assert in_the_page() == in_the_source()


def test_the_page_lists_every_stage_that_can_be_kept():
    (row,) = re.findall(r"^\| `PALLAS_GPU_KEEP`.*$", PAGE.read_text(), re.MULTILINE)
    stages = re.findall(r"`(\w+)`", row.split("|")[2])
    assert stages == list(compiler.TEXTS)


def test_variables_are_found_however_they_are_read():
    source = """
NAME = "PALLAS_GPU_KEEP"
os.environ.get("CI")
environ["PATH"] = ""
for variable in ("CUDA_HOME", "CUDA_PATH"):
    os.environ.get(variable)
text = "set PALLAS_GPU_LINEINFO=1"
"""
    assert sorted(variables(source)) == [
        "CI", "CUDA_HOME", "CUDA_PATH", "PALLAS_GPU_KEEP", "PATH",
    ]  # fmt: skip
