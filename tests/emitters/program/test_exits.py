# SPDX-License-Identifier: Apache-2.0
"""What a kernel waits for before it ends."""

import numpy as np

from pallas_gpu.emitters import gmem, tma
from pallas_gpu.layouts import Layout

READS = "nvvm.cp.async.bulk.wait_group 0 read"


def test_at_its_end_a_kernel_waits_for_the_reads_of_its_copies_only(build):
    assert READS in str(build(lambda kb: tma.wait_group(0), []))


def test_a_wait_before_an_access_waits_for_the_writes(build, typed):
    def body(kb, x):
        tma.wait_group(0)
        gmem.store(x, gmem.load(x, Layout.WGMMA))

    text = str(build(body, [typed((64, 64), np.float32)]))
    assert "wait_group 0" in text
    assert READS not in text
