# SPDX-License-Identifier: Apache-2.0
"""Tutorial 4: its kernels compile, and other mistakes in them are found."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from pallas_gpu import offline
from tests.support.refusal import refused
from tests.support.tutorial_mistakes import run_with_a_mistake
from tools.source_tree import ROOT

TUTORIAL = ROOT / "tutorials" / "04_copies_and_barriers.py"
SUM = ', reduction_op="add"'


PAIR = 'tile, full, collective_axes="pair"'
# The function, what is right in it, and the mistake.
MISTAKES = {
    "a-plain-copy-of-each-cta": ("add_all", SUM, ""),
    "a-smaller-result": (
        "add_all",
        "(TILE, F32))\nadd_all",
        "(TILE, F32)[:32])\nadd_all",
    ),
    "other-tiles-in-each-cta": (
        "multicast",
        f"x_gmem.at[k], {PAIR}",
        f"x_gmem.at[(k + cta) % 4], {PAIR}",
    ),
    "beyond-the-cluster": ("normalized", '{"part": k}', '{"part": k + 1}'),
    "no-wait-for-the-sender": (
        "ring",
        "    plgpu.barrier_wait(full)\n    o_gmem[part]",
        "    o_gmem[part]",
    ),
    "all-send-to-one": ("ring", "idx=(part + 1) % 4", "idx=0 * part"),
}


@pytest.mark.parametrize(
    ("function", "right", "wrong"), MISTAKES.values(), ids=MISTAKES
)
@refused
def test_a_mistake_is_found(tmp_path: Path, function, right, wrong):
    run_with_a_mistake(TUTORIAL, tmp_path, function, right, wrong)


@pytest.mark.offline
def test_every_kernel_compiles():
    names = runpy.run_path(str(TUTORIAL))
    x = names["x"]
    kernels = [
        (names["copied"](), x),
        (names["sum_of_two"](2), x),
        (names["total"], x),
        (names["stored"](), x),
        (names["take"], names["table"], names["rows"]),
        (names["multicast"](names["free"]), x),
        (names["normalized"](names["sums_of_all"]), x),
        (names["borrowed"](), x),
        (names["ring"], x),
    ]
    for kernel, *arguments in kernels:
        (report,) = offline.compile(kernel, *arguments, target="sm_90a")
        assert report.resources.spill_store_bytes == 0
