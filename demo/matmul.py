# SPDX-License-Identifier: Apache-2.0
"""The demo's matrix products: `pallas_gpu.ops` for Hopper and for Blackwell."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from demo.kernels import Job
from pallas_gpu import ops


def matmul_job(m: int = 512, n: int = 512, k: int = 256) -> Job:
    """A job for `ops.matmul` in float16; the default has 8 tiles in 4 clusters."""
    rng = np.random.default_rng(5)
    a, b = (
        rng.standard_normal(shape, np.float32).astype(np.float16)
        for shape in ((m, k), (k, n))
    )

    def reference(a, b):
        return a.astype(np.float64) @ b.astype(np.float64)

    largest = np.float16(np.max(np.abs(reference(a, b))))
    return Job(
        "matmul",
        "tensor cores, a producer and two consumers, clusters of two",
        functools.partial(ops.matmul, config=ops.MatmulConfig()),
        (a, b),
        reference,
        # The result is rounded to float16, with an error of half a unit in the last
        # place; the sums are in float32.
        tolerance=float(np.spacing(largest)) / 2 + 1e-4,
    )


def blackwell_matmul_job(m: int = 512, n: int = 512, k: int = 256) -> Job:
    """The same for Blackwell; the default has 8 tiles of 128x256."""
    return dataclasses.replace(
        matmul_job(m, n, k),
        name="matmul on Blackwell",
        what="tcgen05: a warp copies, a warp multiplies, a warpgroup stores from TMEM",
        function=functools.partial(ops.matmul, config=ops.BlackwellMatmulConfig()),
        target="sm_100a",
    )
