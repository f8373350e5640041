# SPDX-License-Identifier: Apache-2.0
"""Tutorial 5: its kernels compile, its numbers hold, other mistakes are found."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import pallas_gpu as plgpu
from pallas_gpu import offline
from tests.support.refusal import refused
from tests.support.tutorial_mistakes import run_with_a_mistake
from tools.source_tree import ROOT

TUTORIAL = ROOT / "tutorials" / "05_blackwell.py"


WAIT, NEXT = "plgpu.barrier_wait", "_():\n            "
# The function, what is right in it, and the mistake.
MISTAKES = {
    "nothing-to-accumulate-on": ("with_stages", "=ki > 0,", "=True,"),
    "no-commit-after-the-last-step": (
        "with_stages",
        "plgpu.tcgen05_commit_arrive(done)",
        "pass",
    ),
    "a-result-before-the-products": ("with_roles", f"{NEXT}{WAIT}(done)\n", "_():\n"),
    "a-stage-that-is-not-free": ("with_roles", f"{WAIT}(free.at[stage])", "pass"),
    "an-accumulator-that-is-not-empty": ("overlapping", f"{WAIT}(empty.at[i])", "pass"),
    "an-accumulator-that-is-never-empty": (
        "overlapping",
        "plgpu.barrier_arrive(empty.at[i])",
        "pass",
    ),
}


@pytest.mark.parametrize(
    ("function", "right", "wrong"), MISTAKES.values(), ids=MISTAKES
)
@refused
def test_a_mistake_is_found(tmp_path: Path, function, right, wrong):
    run_with_a_mistake(TUTORIAL, tmp_path, function, right, wrong)


@pytest.fixture(scope="module")
def names():
    return runpy.run_path(str(TUTORIAL))


@pytest.mark.parametrize("name", ["with_stages", "with_roles", "overlapping"])
def test_ten_orders_of_events_give_one_result(names, name):
    a, b = names["random"](256, 256, 0), names["random"](256, 512, 1)
    if name != "overlapping":
        a, b = a[:128], b[:, :128]
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretParams(schedules=10)):
        names["check"](names[name], a, b)


@pytest.mark.offline
def test_no_step_spills(names):
    for _, kernel, operands, _ in names["COMPILED"]:
        (report,) = offline.compile(kernel, *operands, target="sm_100a")
        assert report.resources.spill_store_bytes == 0
        assert report.resources.spill_load_bytes == 0


@pytest.mark.offline
def test_the_numbers_in_the_text_are_those_of_the_ptx(names):
    one, stages, roles, two = names["per_tile"].values()
    for counts in (stages, roles, two):
        found = counts["copies"], counts["products"], counts["commits"]
        assert found == (13, 24, 7)
    assert (stages["bar.sync"], roles["bar.sync"]) == (17, 7)
    assert (one["products"], two["bar.sync"]) == (4, 7)
    for title in ("load waits", "fences", "waits"):
        assert two[title] > roles[title]
