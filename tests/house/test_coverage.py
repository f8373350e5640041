# SPDX-License-Identifier: Apache-2.0
"""Every primitive has every rule or is a known gap, and docs/coverage.md says so."""

from __future__ import annotations

import enum
from types import SimpleNamespace

from tools.coverage_table import PATH, coverage_complaints, filled_registry, table


class Kind(enum.Enum):
    EMULATE = "emulate"
    LANE = "lane"


def registry(rules: set[tuple[str, Kind]], gaps: dict[tuple[str, Kind], str]):
    """A registry of one primitive, `copy`, with some rules and known gaps."""
    copy = SimpleNamespace(name="copy")
    return SimpleNamespace(
        RuleKind=Kind,
        PRIMITIVES={"copy": SimpleNamespace(primitive=copy, family="tma")},
        KNOWN_GAPS=gaps,
        rule=lambda primitive, kind: (primitive.name, kind) in rules or None,
        rules=lambda kind: {},
    )


BOTH = {("copy", Kind.EMULATE), ("copy", Kind.LANE)}


def test_every_primitive_has_every_rule_or_is_a_known_gap():
    assert coverage_complaints(filled_registry()) == []


def test_both_semantics_know_the_same_operations():
    full = filled_registry()
    lane, warpgroup = (
        {p.name for p in full.rules(kind)}
        for kind in (full.RuleKind.LANE, full.RuleKind.WARPGROUP)
    )
    assert lane ^ warpgroup == set()


def test_the_table_in_the_documentation_is_the_registry():
    written = PATH.read_text(encoding="utf-8")
    assert written == table(filled_registry()), "run `make coverage-table`"


def test_a_full_registry_has_no_complaints():
    assert coverage_complaints(registry(BOTH, {})) == []


def test_a_missing_rule_is_found():
    found = coverage_complaints(registry({("copy", Kind.EMULATE)}, {}))
    assert found == ["copy has no lane rule and is no known gap"]


def test_a_known_gap_may_be_a_hole():
    gaps = {("copy", Kind.LANE): "later"}
    one = registry({("copy", Kind.EMULATE)}, gaps)
    assert coverage_complaints(one) == []
    assert "| `copy` | tma | yes | no (1) |\n\n1. later\n" in table(one)


def test_a_known_gap_that_is_filled_must_be_taken_off_the_list():
    found = coverage_complaints(registry(BOTH, {("copy", Kind.LANE): "later"}))
    assert found == ["copy has a lane rule: take it off KNOWN_GAPS"]


def test_a_known_gap_of_a_primitive_that_is_gone_is_found():
    found = coverage_complaints(registry(BOTH, {("move", Kind.LANE): "later"}))
    assert found == ["the known gap move (lane) is no primitive"]
