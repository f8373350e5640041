# SPDX-License-Identifier: Apache-2.0
"""Lowering rules stand in their family's file, and in no other place."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import pallas_gpu  # noqa: F401 - importing it enters the rules
from pallas_gpu.primitives import _registry as registry
from tools.source_tree import ROOT

FAMILIES = ROOT / "pallas_gpu" / "lowering" / "families"
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
    # The rules of scans are those of reductions; what differs stands in scans.
    **dict.fromkeys(
        (
            *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
            *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"),
            *("reduce_and", "reduce_or", "reduce_xor"),
        ),
        "reductions",
    ),
    "axis_index": "grid",
    "optimization_barrier": "wgmma",
}


def family_of(primitive: str) -> str:
    """The family of one of our primitives or of one of JAX's."""
    entry = registry.PRIMITIVES.get(primitive)
    if entry is not None:
        return entry.family
    return JAX_FAMILIES.get(primitive, "elementwise")


@pytest.mark.parametrize("kind", [registry.RuleKind.EMIT, registry.RuleKind.RELATION])
def test_a_rule_of_a_primitive_stands_in_the_file_of_its_family(
    kind: registry.RuleKind,
):
    files = {
        primitive.name: Path(inspect.getfile(inspect.unwrap(rule)))
        for primitive, rule in registry.rules(kind).items()
    }
    # An operation whose rule is its emitter stands in the table of families/direct.py.
    found = {name: at.stem for name, at in files.items() if at.name != "rules.py"}
    assert all(files[name].is_relative_to(FAMILIES) for name in found)
    assert found == {name: family_of(name) for name in found}
