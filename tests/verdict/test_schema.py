# SPDX-License-Identifier: Apache-2.0
"""Verdicts have the published schema, and its rules are those of the table."""

from __future__ import annotations

import json

import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.verdict.verdict import SCHEMA_VERSION
from tests.support import everywhere
from tests.support.mutations import cluster_refs, specialised, warps
from tests.support.mutations.mutant import Switches
from tools import rules_table

# It comes with nbformat.
jsonschema = pytest.importorskip("jsonschema")
SCHEMA = json.loads(rules_table.SCHEMA.read_text())


@pytest.mark.parametrize("module", [specialised, cluster_refs, warps])
def test_verdicts_fit_the_schema(module):
    for mutant in module.SUBJECT.mutants[:4]:
        launch = module.make(Switches(mutant.name))
        verdict = plgpu.check(launch.call(None), orders=3)(*launch.arguments)
        jsonschema.validate(json.loads(verdict.to_json()), SCHEMA)


def test_a_clean_verdict_fits_and_a_field_less_does_not():
    def body(x, o):
        o[...] = x[...]

    kernel = everywhere.kernel(body, np.zeros(128, np.float32))(None)
    verdict = plgpu.check(kernel)(np.ones(128, np.float32)).to_dict()
    jsonschema.validate(verdict, SCHEMA)
    del verdict["coverage"][0]["missed"]
    with pytest.raises(jsonschema.ValidationError, match="missed"):
        jsonschema.validate(verdict, SCHEMA)


def test_the_schema_and_the_page_have_every_rule():
    assert rules_table.SCHEMA.read_text() == rules_table.schema()
    assert rules_table.PAGE.read_text() == rules_table.page()
    assert rules_table.KERNELS.read_text() == rules_table.kernels()
    assert SCHEMA["properties"]["schema"]["const"] == SCHEMA_VERSION
