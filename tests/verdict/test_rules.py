# SPDX-License-Identifier: Apache-2.0
"""Each rule is broken by a small kernel, and its correct form is clean."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import pallas_gpu as plgpu
from pallas_gpu import findings
from tests.support import everywhere
from tests.support.rule_kernels import RIGHT, WRONG, Case, X


def lines_of(body: Callable[..., None], what: str) -> set[int]:
    lines, first = inspect.getsourcelines(body)
    marks = re.compile(rf"# .*\b{what}\b")
    return {first + i for i, text in enumerate(lines) if marks.search(text)}


def checked(case: Case, **options: Any):
    of_check = {n: x for n, x in case.options.items() if n in everywhere.OF_EMULATOR}
    of_kernel = {n: x for n, x in case.options.items() if n not in of_check}
    kernel = everywhere.kernel(case.body, X, *case.scratch, **of_kernel)(None)
    return plgpu.check(kernel, **of_check, **options)(X)


def name(case: Case) -> str:
    return f"{case.rule}-{case.body.__name__}"


@pytest.mark.parametrize("case", WRONG, ids=name)
def test_a_kernel_breaks_a_rule(case):
    verdict = checked(case)
    first = verdict.findings[0]
    assert (first.rule.id, first.after) == (case.rule, 0), verdict
    assert first.at.line in lines_of(case.body, "at"), verdict
    other = lines_of(case.body, "other")
    assert (first.other.line if first.other else None) in (other or {None}), verdict


@pytest.mark.parametrize("case", RIGHT.values(), ids=name)
def test_its_correct_form_is_clean(case):
    verdict = checked(case)
    assert verdict.clean, verdict


def test_each_rule_that_a_run_can_break_has_a_kernel():
    # The others are those of a kernel that does not start; schedule-dependent and the
    # three that are not modelled are in test_check.py.
    run = {case.rule for case in WRONG} | {"schedule-dependent"}
    starts = [rule.id for rule in findings.RULES]
    assert set(starts[: starts.index("debug-check") + 1]) <= run
    assert RIGHT.keys() == {case.rule for case in WRONG}
