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


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        pytest.param("add_all", SUM, "", id="a-plain-copy-of-each-cta"),
        pytest.param(
            "add_all",
            "jnp.zeros(TILE, F32))\nadd_all",
            "jnp.zeros(TILE, F32)[:32])\nadd_all",
            id="a-smaller-result",
        ),
        pytest.param(
            "multicast",
            'x_gmem.at[k], tile, full, collective_axes="pair"',
            'x_gmem.at[(k + cta) % 4], tile, full, collective_axes="pair"',
            id="other-tiles-in-each-cta",
        ),
        pytest.param(
            "normalized", '{"part": k}', '{"part": k + 1}', id="beyond-the-cluster"
        ),
        pytest.param(
            "ring",
            "    plgpu.barrier_wait(full)\n    o_gmem[part]",
            "    o_gmem[part]",
            id="no-wait-for-the-sender",
        ),
        pytest.param(
            "ring",
            "cluster_idx=(part + 1) % 4",
            "cluster_idx=0 * part",
            id="all-send-to-one",
        ),
    ],
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
