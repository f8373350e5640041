# SPDX-License-Identifier: Apache-2.0
"""Products of more columns than an instruction has, and loads that reduce."""

from __future__ import annotations

import pytest

import pallas_gpu as plgpu
from tests.support.tensor_products import Product, check_body

PART = 64


@pytest.mark.parametrize("b_stored", [False, True], ids=["along N", "along K"])
@pytest.mark.parametrize("n", [256, 512])
def test_all_columns_of_tensor_memory(n, b_stored):
    case = Product(n=n, k=32, b_stored=b_stored, swizzle=64)

    def body(a, b, out, a_smem, b_smem, acc, loaded, done):
        plgpu.copy_gmem_to_smem(a, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b, b_smem, loaded)
        plgpu.barrier_wait(loaded)
        right = b_smem.T if b_stored else b_smem
        plgpu.tcgen05_mma(acc, a_smem, right, done, accumulate=False)
        plgpu.barrier_wait(done)
        for start in range(0, n, PART):
            part = plgpu.ds(start, PART)
            out[:, part] = plgpu.async_load_tmem(acc.at[:, part])

    check_body(body, case)
