# SPDX-License-Identifier: Apache-2.0
"""The demo's third kernel: the matrix product of `pallas_gpu.ops`, with data for it."""

from __future__ import annotations

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
        ops.matmul,
        (a, b),
        reference,
        # The result is rounded to float16, with an error of half a unit in the last
        # place; the sums are in float32.
        tolerance=float(np.spacing(largest)) / 2 + 1e-4,
    )
