# SPDX-License-Identifier: Apache-2.0
"""Every operation has every rule or is a known gap, and docs/coverage.md says so."""

from __future__ import annotations

import dataclasses
import enum
from types import SimpleNamespace

import pytest

from pallas_gpu import errors
from pallas_gpu.primitives import _registry
from tools.coverage_table import PATH, coverage_complaints, filled_registry, table
from tools.emitted_operations import emitted_operations, lowering_sources


class Kind(enum.Enum):
    EMULATE = "emulate"
    LANE = "lane"
    WARPGROUP = "warpgroup"
    INFER = "infer"
    EXPAND = "expand"

    @property
    def of_operations(self) -> bool:
        return self in (Kind.INFER, Kind.EXPAND)


@dataclasses.dataclass(frozen=True)
class Primitive:
    name: str


def operation(primitive, **facts):
    """What `define` would say of it."""
    known = {"family": "tma", "by_warp": True, "reads": ("src",), "writes": ()}
    known |= {"feature": None, "atomic": False, "asynchronous": True, **facts}
    return SimpleNamespace(primitive=primitive, **known)


def registry(rules: set[tuple[str, Kind]], gaps: dict[tuple[str, Kind], str]):
    """A registry of one primitive, `copy`, with some rules and known gaps."""
    copy = Primitive("copy")

    def keys(kind: Kind) -> dict[object, object]:
        names = [name for name, of in rules if of is kind]
        return {n if kind.of_operations else copy: None for n in names}

    return SimpleNamespace(
        RuleKind=[kind for kind in Kind if kind is not Kind.WARPGROUP],
        PRIMITIVES={"copy": operation(copy)},
        JAX_PRIMITIVES={},
        KNOWN_GAPS=gaps,
        rule=lambda key, kind: (getattr(key, "name", key), kind) in rules or None,
        rules=keys,
    )


BOTH = {("copy", Kind.EMULATE), ("copy", Kind.LANE)}
GAPS = 2  # of KNOWN_GAPS; only ever lowered


def emitted() -> set[str]:
    return emitted_operations(lowering_sources())


def test_every_operation_has_every_rule_or_is_a_known_gap():
    assert coverage_complaints(filled_registry(), emitted()) == []


def test_known_gaps_only_shrink():
    assert len(filled_registry().KNOWN_GAPS) == GAPS


def test_the_table_in_the_documentation_is_the_registry():
    written = PATH.read_text(encoding="utf-8")
    assert written == table(filled_registry(), emitted()), "run `make coverage-table`"


def test_a_full_registry_has_no_complaints():
    assert coverage_complaints(registry(BOTH, {}), ()) == []


def test_a_missing_rule_is_found():
    found = coverage_complaints(registry({("copy", Kind.EMULATE)}, {}), ())
    assert found == ["copy has no lane rule and is not a known gap"]


def test_an_emitted_operation_without_rules_is_found():
    found = coverage_complaints(registry(BOTH, {}), ["vector.scan"])
    assert found == [
        "vector.scan has no infer rule and is not a known gap",
        "vector.scan has no expand rule and is not a known gap",
    ]


def test_an_operation_of_jax_has_a_rule_under_each_semantics():
    add, sub = Primitive("add"), Primitive("sub")
    one = registry(BOTH, {})
    copy = one.PRIMITIVES["copy"].primitive
    one.JAX_PRIMITIVES["add"] = operation(add)
    assert coverage_complaints(one, ()) == ["add has no lane rule"]
    lane, warpgroup = {copy: None, add: None}, {add: None, sub: None}
    one.rules = lambda kind: lane if kind is Kind.LANE else warpgroup
    one.RuleKind = [Kind.LANE, Kind.WARPGROUP]
    one.rule = lambda key, kind: True
    assert coverage_complaints(one, ()) == ["sub has no lane rule"]


def test_an_operation_that_only_inference_knows_is_found():
    rules = BOTH | {("vector.scan", Kind.INFER)}
    found = coverage_complaints(registry(rules, {}), ())
    assert found == ["vector.scan has no expand rule and is not a known gap"]


def test_a_known_gap_may_be_a_hole():
    gaps = {("copy", Kind.LANE): "later"}
    one = registry({("copy", Kind.EMULATE)}, gaps)
    assert coverage_complaints(one, ()) == []
    row = "| `copy` | tma | warpgroup, warp | src |  | asynchronous |  | yes | no (1) |"
    assert row in table(one, ()).splitlines()
    assert "\n1. later\n" in table(one, ())


def test_a_known_gap_that_is_filled_must_be_taken_off_the_list():
    found = coverage_complaints(registry(BOTH, {("copy", Kind.LANE): "later"}), ())
    assert found == ["copy has a lane rule: take it off KNOWN_GAPS"]


def test_a_known_gap_of_an_operation_that_is_gone_is_found():
    gaps = {("move", Kind.LANE): "later", ("vector.scan", Kind.INFER): "later"}
    assert coverage_complaints(registry(BOTH, gaps), ()) == [
        "the known gap move (lane) names no operation",
        "the known gap vector.scan (infer) names no operation",
    ]


def test_the_source_tells_which_operations_it_builds():
    source = """
from jaxlib.mlir.dialects import arith, memref as mem, scf

def rule(x):
    kind = mem.SubViewOp
    scf.yield_([dialect.ops.wgmma(x, x, x), arith.addi(x, x)])
    ir.Operation.create("test.op", [], [])
    ir.Operation.create(logical.OWN + row.name, [], [])
"""
    expected = {"memref.subview", "scf.yield", "mosaic_gpu.wgmma", "test.op"}
    assert emitted_operations([source]) == expected


@pytest.mark.parametrize(
    "line", ["ir.Operation.create(name, [])", "dialect.ops.not_an_operation()"]
)
def test_an_operation_whose_name_cannot_be_told_is_refused(line):
    with pytest.raises(ValueError):
        emitted_operations([line])


@pytest.mark.parametrize("kind", _registry.RuleKind)
def test_a_second_rule_is_refused(kind):
    filled_registry()
    key = next(iter(_registry.rules(kind)))
    with pytest.raises(errors.InternalError, match=f"two {kind.value} rules for"):
        _registry.register(key, kind)(print)


def test_a_rule_of_an_operation_is_keyed_by_its_name():
    with pytest.raises(errors.InternalError, match="keyed by names of MLIR operations"):
        _registry.register(object(), _registry.RuleKind.INFER)
    with pytest.raises(errors.InternalError, match="keyed by primitives"):
        _registry.register("vector.scan", _registry.RuleKind.LANE)
