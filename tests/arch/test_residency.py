# SPDX-License-Identifier: Apache-2.0
"""How many CTAs of a launch a device holds at once."""

from __future__ import annotations

import dataclasses

import pytest

from pallas_gpu import arch
from pallas_gpu.arch.residency import Residency

KIB = 1024


@pytest.mark.parametrize(
    ("smem_bytes", "threads", "ctas"),
    [
        (227 * KIB, 128, 1),
        (114 * KIB, 128, 1),
        # 1 KiB of SMEM is reserved in each block.
        (113 * KIB, 128, 2),
        (0, 1024, 2),
        (0, 384, 5),
        (0, 128, 16),
        (0, 32, 32),
    ],
)
def test_ctas_of_an_sm_share_its_smem_its_threads_and_its_slots(
    smem_bytes, threads, ctas
):
    assert Residency.of(arch.SM_90A, smem_bytes, threads, 1).ctas_per_sm == ctas


def test_a_device_holds_as_many_ctas_as_all_its_sms():
    one = Residency.of(arch.SM_90A, 200 * KIB, 128, 1)
    assert one.clusters == 132
    assert str(one) == "132 SMs of sm_90a, 1 CTA each"
    assert Residency.of(arch.SM_100A, 100 * KIB, 128, 1).clusters == 2 * 148


def test_a_cluster_fits_as_a_whole_or_not_at_all():
    target = dataclasses.replace(arch.SM_90A, gpc_sms=(7,))
    residency = Residency.of(target, 200 * KIB, 128, 2)
    assert residency.clusters == 3
    assert str(residency) == "7 SMs of sm_90a, 1 CTA each, 2 CTAs per cluster"


# cuOccupancyMaxActiveClusters on an H200, for clusters of 1 to 16 CTAs with 200 and
# with 100 KiB of SMEM each.
MEASURED = {
    200: (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7),
    100: (264, 132, 79, 62, 47, 39, 32, 30, 23, 21, 16, 16, 14, 14, 14, 14),
}


@pytest.mark.parametrize("kib", MEASURED)
def test_clusters_stay_in_a_gpc(kib):
    found = tuple(
        Residency.of(arch.SM_90A, kib * KIB, 128, size).clusters
        for size in range(1, 17)
    )
    assert found == MEASURED[kib]
