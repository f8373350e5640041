# SPDX-License-Identifier: Apache-2.0
"""Lowering rules stand in their family's file, and in no other place."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pallas_gpu  # noqa: F401 - importing it enters the rules
from pallas_gpu.primitives import _registry as registry
from tools.source_tree import ROOT, python_files, syntax_tree

FAMILIES = "pallas_gpu/lowering/families/"
DECORATORS = {"emits", "relates"}
# Families of JAX's own primitives; the others are elementwise.
JAX_FAMILIES = {
    **dict.fromkeys(
        (
            "jit",
            "remat2",
            "custom_jvp_call",
            "custom_vjp_call",
            "scan",
            "while",
            "cond",
        ),
        "control",
    ),
    **dict.fromkeys(("get", "swap", "addupdate"), "registers"),
    **dict.fromkeys(
        ("broadcast_in_dim", "iota", "transpose"),
        "shapes",
    ),
    **dict.fromkeys(("reshape", "squeeze"), "reshapes"),
    **dict.fromkeys(
        ("slice", "split", "dynamic_slice", "dynamic_update_slice"), "slices"
    ),
    **dict.fromkeys(("concatenate", "rev", "pad"), "concatenate"),
    **dict.fromkeys(
        (
            *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"),
            *("reduce_and", "reduce_or", "reduce_xor"),
        ),
        "reductions",
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "scans"),
    "axis_index": "grid",
    "optimization_barrier": "wgmma",
}


def family_of(primitive: str) -> str:
    """The family of one of our primitives or of one of JAX's."""
    entry = registry.PRIMITIVES.get(primitive)
    if entry is not None:
        return entry.family
    return JAX_FAMILIES.get(primitive, "elementwise")


def stem(rule: Callable) -> str:
    """The stem of the file that a rule is written in."""
    return Path(rule.__code__.co_filename).stem


@pytest.mark.parametrize("kind", [registry.RuleKind.EMIT, registry.RuleKind.RELATION])
def test_a_rule_of_a_primitive_stands_in_the_file_of_its_family(
    kind: registry.RuleKind,
):
    found = {p.name: stem(rule) for p, rule in registry.rules(kind).items()}
    assert found == {name: family_of(name) for name in found}


def registrations(source: str) -> Iterator[int]:
    """The lines of a file that register a lowering rule."""
    if not any(name in source for name in DECORATORS):
        return
    for node in ast.walk(syntax_tree(source)):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in DECORATORS:
                yield node.lineno


def misplaced_rules(root: Path) -> list[str]:
    """One line for every lowering rule that is registered outside of its family."""
    return [
        f"{file}:{line}: a rule outside of {FAMILIES}"
        for file in python_files(root)
        if file.startswith("pallas_gpu/") and not file.startswith(FAMILIES)
        if file != "pallas_gpu/lowering/rules.py"
        for line in registrations((root / file).read_text("utf-8"))
    ]


def test_no_file_but_a_familys_registers_a_lowering_rule():
    assert misplaced_rules(ROOT) == []


@pytest.mark.parametrize(
    "line", ["@emits(add_p)\ndef f(): ...", "rules.relates('cond')(f)"]
)
def test_a_rule_outside_of_the_families_is_found(tmp_path: Path, line: str):
    for file in ("pallas_gpu/lowering/launch.py", f"{FAMILIES}tma.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(line)
    assert [text.split(":")[0] for text in misplaced_rules(tmp_path)] == [
        "pallas_gpu/lowering/launch.py"
    ]
