# SPDX-License-Identifier: Apache-2.0
"""Hints name what exists: public names, parameters, and code that works."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pallas_gpu as plgpu
from pallas_gpu import sparsecore as plsc
from tests.support.recipes import RECIPES
from tools.source_tree import ROOT, syntax_tree

# What an author of kernels never sees.
_INTERNAL = re.compile(
    r"\bjaxpr\b|KernelBuilder|\bMLIR\b|\w+_p\b"
    r"|pallas_gpu\.(?!ops\b|offline\b|errors\b|arch\b|layouts\b)\w+"
)
_FIELD = re.compile(r"\b(plsc\.)?(CompilerParams|InterpretParams|\w+Config)\((\w+)=")


def hints(source: str) -> Iterator[tuple[int, str]]:
    """The constant texts of all hints in a source file, with their lines."""
    tree = syntax_tree(source)
    assigned = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and node.value is not None
    }
    queue: list[ast.expr] = [
        keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "hint"
    ]
    queue += [value for name, value in assigned.items() if name in ("hint", "HINTS")]
    seen: set[str] = set()
    for value in queue:  # grows by the constants that a hint is made of
        for part in ast.walk(value):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value
            if isinstance(part, ast.Name) and part.id in set(assigned) - seen:
                seen.add(part.id)
                queue.append(assigned[part.id])


def complaints(source: str, recipes: str) -> list[str]:
    """One line for each hint that names something that does not exist."""
    found = []
    for line, text in hints(source):
        for name in re.findall(r"\bplgpu\.([\w.]*\w)", text):
            if not exists(name):
                found.append(f"{line}: plgpu.{name} does not exist")
        for code in re.findall(r"`([^`]+)`", text):
            if not re.fullmatch(r"[\w.]+", code) and not stands_in(code, recipes):
                found.append(f"{line}: no recipe executes {code}")
        for name in re.findall(r"\bplsc\.(\w+)", text):
            if not hasattr(plsc, name):
                found.append(f"{line}: plsc.{name} does not exist")
        for machine, owner, field in _FIELD.findall(text):
            if not has_parameter(plsc if machine else plgpu, owner, field):
                found.append(f"{line}: {owner} has no {field}")
    return found


def exists(name: str) -> bool:
    """Whether `plgpu.name` is public; further attributes only have to exist."""
    first, *rest = name.split(".")
    value = getattr(plgpu, first, None)
    for attribute in rest:
        value = getattr(value, attribute, None)
    return first in plgpu.__all__ and value is not None


def stands_in(code: str, recipes: str) -> bool:
    return re.sub(r"\s", "", code) in recipes or code == "import pallas_gpu as plgpu"


def has_parameter(package: Any, owner: str, field: str) -> bool:
    kind = getattr(package, owner, None)
    return kind is None or field in {f.name for f in dataclasses.fields(kind)}


def executed_code() -> str:
    return re.sub(r"\s", "", "\n".join(recipe.code for recipe in RECIPES.values()))


def files() -> list[Path]:
    return sorted((ROOT / "pallas_gpu").rglob("*.py"))


def test_every_hint_names_what_exists():
    recipes = executed_code()
    found = [
        f"{path.relative_to(ROOT)}:{complaint}"
        for path in files()
        for complaint in complaints(path.read_text(encoding="utf-8"), recipes)
    ]
    assert found == []


def test_no_hint_names_internals():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match.group()}"
        for path in files()
        for line, text in hints(path.read_text(encoding="utf-8"))
        if (match := _INTERNAL.search(text)) is not None
    ]
    assert found == []


@pytest.mark.parametrize(
    ("hint", "complaint"),
    [
        ("use plgpu.masked_load", "plgpu.masked_load does not exist"),
        ("e.g. plgpu.Layout.WGNMA", "plgpu.Layout.WGNMA does not exist"),
        ("write `x_ref.scatter(i)`", "no recipe executes x_ref.scatter(i)"),
        ("pass CompilerParams(scratch=8)", "CompilerParams has no scratch"),
    ],
)
def test_a_hint_that_names_what_does_not_exist_is_found(hint: str, complaint: str):
    source = f"raise errors.ShapeError('what', hint={hint!r})"
    assert complaints(source, "x_ref[i]") == [f"1: {complaint}"]


def test_a_hint_that_names_what_exists_passes():
    source = "hint = 'use plgpu.Layout.WGMMA, `plgpu.when`, or `x_ref[i]`'"
    assert complaints(source, "x_ref[i]") == []
