# SPDX-License-Identifier: Apache-2.0
"""Reading ptxas's report, and the limits that follow from it."""

from __future__ import annotations

import pytest

from pallas_gpu import errors
from pallas_gpu.runtime import resources_report

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'matmul_kernel' for 'sm_90a'
ptxas info    : Function properties for matmul_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
SPILLING = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are \
serialized due to insufficient register resources in function 'matmul_kernel'
ptxas info    : Compiling entry function 'matmul_kernel' for 'sm_90a'
ptxas info    : Function properties for matmul_kernel
    48 bytes stack frame, 32 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 64 bytes cumulative stack size
ptxas info    : Function properties for helper
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
"""


def of(ptxas: str, **kw):
    sizes = {"threads": 384, "smem_bytes": 200_000, "num_barriers": 12} | kw
    return resources_report.resources(ptxas, target="sm_90a", **sizes)


def test_registers_and_spills_come_from_ptxas():
    report = resources_report.parse_ptxas(CLEAN)
    assert report == resources_report.PtxasReport(168, 0, 0, 0)


def test_spills_of_called_functions_count_too():
    report = resources_report.parse_ptxas(SPILLING)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (36, 48)
    assert report.stack_bytes == 64


def test_lost_performance_is_a_remark():
    (remark,) = resources_report.parse_ptxas(SPILLING).remarks
    assert remark.startswith("(C7510) Potential Performance Loss: wgmma.mma_async")


def test_unreadable_report_is_our_bug():
    with pytest.raises(errors.InternalError, match="cannot be parsed"):
        resources_report.parse_ptxas("ptxas fatal   : no input")


@pytest.mark.parametrize(
    "threads, limit", [(128, 255), (256, 255), (384, 168), (512, 128), (1024, 64)]
)
def test_registers_are_bounded_by_the_blocks_share(threads, limit):
    assert resources_report.register_limit("sm_90a", threads) == limit


@pytest.mark.parametrize(
    "threads, registers, smem_bytes, blocks",
    [
        (128, 32, 0, 16),  # registers: 65536 / (32 * 128); threads: 2048 / 128
        (128, 16, 0, 16),  # threads
        (128, 168, 0, 3),  # registers
        (128, 32, 110_000, 2),  # SMEM
        (32, 16, 0, 16),  # a block takes at least four warps' worth
        (1024, 255, 0, 0),  # does not fit at all
    ],
)
def test_occupancy_is_the_tightest_limit(threads, registers, smem_bytes, blocks):
    got = resources_report.occupancy_blocks_per_sm(
        "sm_90a",
        threads_per_block=threads,
        registers_per_thread=registers,
        smem_bytes=smem_bytes,
    )
    assert got == blocks


def test_tmem_bounds_occupancy_where_there_is_tmem():
    got = resources_report.occupancy_blocks_per_sm(
        "sm_100a", threads_per_block=128, registers_per_thread=32, tmem_columns=256
    )
    assert got == 2


def test_planned_figures_are_the_callers():
    resources = of(CLEAN)
    assert resources.smem_bytes == 200_000
    assert resources.num_barriers == 12
    assert resources.threads_per_block == 384


def test_table_shows_every_figure_in_one_line_each():
    rows = [line.split("  ", 1) for line in str(of(SPILLING, threads=256)).split("\n")]
    table = {label: value.strip() for label, value in rows}
    assert table["registers per thread"] == "255 of 255"
    assert table["spills per thread"] == "36 B stored, 48 B loaded"
    assert table["SMEM"] == "200000 of 232432 B"
    assert table["ptxas"].startswith("(C7510)")
