# SPDX-License-Identifier: Apache-2.0
"""What tutorial 3 says beside its cells holds: mistakes found, figures explained."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from pallas_gpu import arch, errors
from tests.support.tutorial_mistakes import run_with_a_mistake
from tools.source_tree import ROOT

TUTORIAL = ROOT / "tutorials" / "03_pallas_call_and_pipelines.py"


def test_a_block_that_the_specialised_product_releases_early_is_found(tmp_path: Path):
    right, wrong = "delay_release=1)", "delay_release=0)"
    with pytest.raises(errors.RaceError, match="the wgmma may still read it"):
        run_with_a_mistake(TUTORIAL, tmp_path, "specialized_matmul", right, wrong)


def test_the_figures_of_the_last_section_are_those_of_the_target():
    text = " ".join(TUTORIAL.read_text().split())
    target = arch.SM_90A
    assert "168 for each of 384 threads are all" in text
    assert target.registers_per_sm // 384 // 8 * 8 == 168
    assert "SM's part of the H200's 4.8 TB/s is 36 KB per microsecond" in text
    assert round(4.8e12 / target.sm_count / 1e9) == 36
    assert "128 x 128 x 64 in 0.35 microseconds" in text
    assert round(2 * 128 * 128 * 64 / (800e12 / target.sm_count) * 1e6, 2) == 0.35


@pytest.mark.offline
def test_the_report_shows_one_block_per_sm_without_spills():
    names = runpy.run_path(str(TUTORIAL))
    resources = names["report"](4)
    assert resources.spill_store_bytes == 0
    assert "blocks per SM         1" in str(resources)
