# SPDX-License-Identifier: Apache-2.0
"""Every operation has the rules that it needs, and docs/coverage.md says so."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from pallas_gpu import errors
from pallas_gpu.primitives import _registry
from pallas_gpu.primitives._registry import RuleKind
from tools.coverage_table import PATH, coverage_complaints, filled_registry, table

EMULATE, EMIT, RELATION = RuleKind.EMULATE, RuleKind.EMIT, RuleKind.RELATION


@dataclasses.dataclass(frozen=True)
class Primitive:
    name: str


def operation(primitive, **facts):
    """What `define` would say of it."""
    known = {"family": "tma", "by_warp": True, "reads": ("src",), "writes": ()}
    known |= {"feature": None, "atomic": False, "asynchronous": True, **facts}
    return SimpleNamespace(primitive=primitive, **known)


def registry(*kinds: RuleKind, jax=(), **facts):
    """A registry of one primitive, `copy`, with some rules; and of rules of JAX's."""
    copy = Primitive("copy")
    rules = {kind: dict.fromkeys([copy] * (kind in kinds)) for kind in RuleKind}
    for name, *others in jax:
        for kind in others:
            rules[kind][Primitive(name)] = None
    return SimpleNamespace(
        RuleKind=RuleKind,
        PRIMITIVES={"copy": operation(copy, **facts)},
        JAX_PRIMITIVES={},
        rule=lambda key, kind: key in rules[kind] or None,
        rules=rules.__getitem__,
    )


def test_every_operation_has_the_rules_that_it_needs():
    assert coverage_complaints(filled_registry()) == []


def test_the_table_in_the_documentation_is_the_registry():
    written = PATH.read_text(encoding="utf-8")
    assert written == table(filled_registry()), "run `make coverage-table`"


@pytest.mark.parametrize(
    ("one", "missing"),
    [
        (registry(EMULATE, EMIT, RELATION), []),
        (registry(EMULATE, RELATION), ["copy has no emit rule"]),
        (registry(EMULATE, EMIT), ["copy has no relation rule"]),
        (registry(EMULATE, EMIT, reads=(), writes=("barrier",)), []),
        (registry(*RuleKind, jax=[("axis_index", EMIT)]), []),
        (registry(*RuleKind, jax=[("add", EMIT)]), ["add has no relation rule"]),
        (registry(*RuleKind, jax=[("add", RELATION)]), ["add has no emit rule"]),
    ],
)
def test_a_missing_rule_is_found(one, missing):
    assert coverage_complaints(one) == missing


def test_a_row_has_the_facts_and_the_rules():
    row = "| `copy` | tma | warpgroup, warp | src |  | asynchronous |  | yes | yes |  |"
    assert row in table(registry(EMULATE, EMIT)).splitlines()


@pytest.mark.parametrize("kind", RuleKind)
def test_a_second_rule_is_refused(kind):
    filled_registry()
    key = next(iter(_registry.rules(kind)))
    with pytest.raises(errors.InternalError, match=f"two {kind.value} rules for"):
        _registry.register(key, kind)(print)
