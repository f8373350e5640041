# SPDX-License-Identifier: Apache-2.0
"""What tutorial 2 says beside its cells holds: mistakes found, numbers measured."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import tutorial_plot
from benchmarks.tutorial_plot import SPEEDS, TUTORIAL
from pallas_gpu import errors, offline
from tests.support.tutorial_mistakes import run_with_a_mistake


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("wgmma_wait(1)", "wgmma_wait(2)"),
        # One stage ahead of what is free.
        ("fetch(ki - 1 + STAGES)", "fetch(ki + STAGES)"),
    ],
)
def test_an_early_copy_into_a_stage_is_found(tmp_path: Path, right: str, wrong: str):
    with pytest.raises(errors.RaceError, match="while the wgmma may still read it"):
        run_with_a_mistake(TUTORIAL, tmp_path, "with_stages", right, wrong)


def test_a_tile_whose_last_step_is_not_reported_deadlocks(tmp_path: Path):
    right = "plgpu.barrier_arrive(empty.at[lax.rem(first + steps - 1, STAGES)])"
    with pytest.raises(errors.DeadlockError, match="3 of 3 warpgroups wait"):
        run_with_a_mistake(TUTORIAL, tmp_path, "persistent", right, "pass")


def test_a_barrier_of_one_block_is_too_few_for_a_multicast(tmp_path: Path):
    right = 'scratch(plgpu.ClusterBarrier, collective_axes="pair")'
    with pytest.raises(errors.RaceError, match="of CTA"):
        run_with_a_mistake(TUTORIAL, tmp_path, "clustered", right, "scratch()")


@pytest.mark.offline
def test_no_step_spills():
    names = runpy.run_path(str(TUTORIAL))
    shapes = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2
    for step in list(names["STEPS"].values())[1:]:
        (report,) = offline.compile(jax.jit(step), *shapes, target="sm_90a")
        assert report.resources.spill_store_bytes == 0
        assert report.instruction_counts["wgmma"] >= 4


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads(SPEEDS.read_text())


def test_the_table_shows_the_measured_speeds(record: dict[str, Any]):
    text = TUTORIAL.read_text()
    assert all(tutorial_plot.table_row(row) in text for row in record["rows"])
    # Where they differ: python -m benchmarks.tutorial_plot, as its docstring says.
    assert tutorial_plot.with_table(text, record) == text


def test_the_table_names_card_versions_and_distribution(record: dict[str, Any]):
    text = " ".join(TUTORIAL.read_text().split())
    environment = record["environment"]
    assert f"{environment['device']}, jax {environment['jax']}" in text
    assert "random normal" in text


def test_every_step_is_in_the_table(record: dict[str, Any]):
    text = TUTORIAL.read_text()
    steps = [row["step"] for row in record["rows"] if row["step"][0].isdigit()]
    assert len(steps) == 6
    for step in steps:
        assert f'"{step}": ' in text


def test_the_plot_shows_the_numbers_of_the_table(record: dict[str, Any]):
    assert SPEEDS.with_suffix(".svg").read_text() == tutorial_plot.draw(record)
