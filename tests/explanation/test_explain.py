# SPDX-License-Identifier: Apache-2.0
"""`explain` names the cause of each slow kernel, with its line; objects, JSON, HTML."""

from __future__ import annotations

import functools

import pytest

import pallas_gpu as plgpu
from tests.support.slow_kernels import CASES, gathered_ahead

pytestmark = [pytest.mark.offline, pytest.mark.sass]


@functools.cache
def explained(name):
    case = CASES[name]
    return plgpu.explain(case.make())(*case.shapes)


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_found_with_its_line(name):
    case = CASES[name]
    found = explained(name).slow
    assert case.kind in [f.kind.id for f in found[:2]]
    (cause,) = [f for f in found if f.kind.id == case.kind]
    assert cause.at.file.endswith("tests/support/slow_kernels.py")
    assert cause.at.line == case.line
    assert cause.hint and cause.share > 0.05
    assert case.facts.items() <= cause.facts.items()


def test_a_loop_with_num_stages_does_not_wait_for_loads():
    case = CASES["loads at computed indices"]
    found = plgpu.explain(gathered_ahead())(*case.shapes).slow
    assert case.kind not in [f.kind.id for f in found]
