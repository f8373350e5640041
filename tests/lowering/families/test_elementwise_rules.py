# SPDX-License-Identifier: Apache-2.0
"""A row of the elementwise table is all that its rules are made of."""

from __future__ import annotations

import pytest
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering.families import elementwise as family
from pallas_gpu.mosaic.elements import arithmetic, table
from pallas_gpu.mosaic.elements.row import Case, Row
from pallas_gpu.primitives import _registry as registry
from tests.support.inference_bodies import Body

CASE = Case(arithmetic.identity)
SQUARE = (64, 64)


def test_a_row_of_a_name_that_lax_does_not_know_is_an_error():
    with pytest.raises(errors.InternalError, match="no primitive 'arctangent'"):
        family.enter_rules([Row("arctangent", floating=CASE)])


def test_a_row_with_a_parameter_that_the_primitive_does_not_have_is_an_error():
    row = Row("integer_pow", floating=CASE, params=("exponent",))
    with pytest.raises(errors.InternalError, match="no parameter 'exponent'") as error:
        family.enter_rules([row])
    assert "'y'" in str(error.value)


def test_a_row_that_has_rules_already_is_an_error():
    with pytest.raises(errors.InternalError, match=r"two lane rules for .* add"):
        family.enter_rules([Row("add", floating=CASE)])


@pytest.mark.parametrize("kind", [registry.RuleKind.LANE, registry.RuleKind.WARPGROUP])
def test_every_row_has_its_rules(kind):
    names = {primitive.name for primitive in registry.rules(kind)}
    assert names >= set(table.TABLE)


def test_an_operation_of_ours_that_no_rule_knows_is_an_error_that_names_it():
    body = Body()
    with body.building() as b:
        b.op("foo", b.load(b.gmem(SQUARE)))
    with pytest.raises(errors.InternalError, match=r"no rule for pallas_gpu\.foo"):
        body.infer()


def test_so_is_one_without_arrays():
    body = Body()
    with body.building() as b, b.at():
        ir.Operation.create("pallas_gpu.foo", [], [])
    with pytest.raises(errors.InternalError, match=r"no rule for pallas_gpu\.foo"):
        body.infer()


def test_a_rows_cost_decides_where_the_work_is_done(monkeypatch):
    """Each element of a row in WGMMA_ROW is held by four lanes: costly work moves."""

    def layout_of_exp(cycles: float):
        row = Row("exp", floating=Case(CASE.emit, cycles))
        rules = registry.rules(registry.RuleKind.INFER)
        monkeypatch.setitem(rules, "pallas_gpu.exp", infer_rule(row))
        body = Body()
        with body.building() as b:
            x = b.cast(b.load(b.gmem((512,))), Layout.WG_STRIDED((512,), 4))
            y = b.op("exp", b.cast(x, Layout.WGMMA_ROW))
            b.store(b.cast(y, Layout.WGMMA_ROW), b.gmem((512,)))
        return body.infer().result(y)

    row = place(Layout.WGMMA_ROW, (512,))
    assert layout_of_exp(1.0) == row
    assert layout_of_exp(1e6) != row


def infer_rule(row: Row):
    return lambda network, op, key: family._infer(row, network, op, key)
