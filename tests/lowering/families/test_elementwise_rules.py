# SPDX-License-Identifier: Apache-2.0
"""A row of the elementwise table is all that its rules are made of."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emitters.elements import arithmetic, table
from pallas_gpu.emitters.elements.row import Case, Row
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering.families import elementwise as family
from pallas_gpu.lowering.rules import find_primitive
from pallas_gpu.primitives import _registry as registry
from tests.support.inferred import array, infer

CASE = Case(arithmetic.identity)


def test_a_row_of_a_name_that_lax_does_not_know_is_an_error():
    with pytest.raises(errors.InternalError, match="no primitive 'arctangent'"):
        family.enter_rules([Row("arctangent", floating=CASE)])


def test_a_row_with_a_parameter_that_the_primitive_does_not_have_is_an_error():
    row = Row("integer_pow", floating=CASE, params=("exponent",))
    with pytest.raises(errors.InternalError, match="no parameter 'exponent'") as error:
        family.enter_rules([row])
    assert "'y'" in str(error.value)


def test_a_row_that_has_rules_already_is_an_error():
    with pytest.raises(errors.InternalError, match=r"two emit rules for .* add"):
        family.enter_rules([Row("add", floating=CASE)])


@pytest.mark.parametrize("kind", [registry.RuleKind.EMIT, registry.RuleKind.RELATION])
def test_every_row_has_its_rules(kind):
    names = {primitive.name for primitive in registry.rules(kind)}
    assert names >= set(table.TABLE)


def test_a_rows_cost_decides_where_the_work_is_done(monkeypatch):
    """Each element of a row in WGMMA_ROW is held by four lanes: costly work moves."""

    def body(x, o):
        y = plgpu.layout_cast(x[...], plgpu.Layout.WG_STRIDED((512,), 4))
        y = jnp.exp(plgpu.layout_cast(y, plgpu.Layout.WGMMA_ROW))
        o[...] = plgpu.layout_cast(y, plgpu.Layout.WGMMA_ROW)

    def layout_of_exp(cycles: float):
        row = Row("exp", floating=Case(CASE.emit, cycles))
        rules = registry.rules(registry.RuleKind.RELATION)
        relation = functools.partial(family._rule, row)
        monkeypatch.setitem(rules, find_primitive("exp"), relation)
        return infer(body, [array(512)], array(512)).layout("exp")

    row = place(plgpu.Layout.WGMMA_ROW, (512,))
    assert layout_of_exp(1.0) == row
    assert layout_of_exp(1e6) != row
