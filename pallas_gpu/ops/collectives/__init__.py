# SPDX-License-Identifier: Apache-2.0
"""Collectives over several devices, as kernels that reach into each other's memory."""

from pallas_gpu.ops.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    rotate,
)
from pallas_gpu.ops.collectives.devices import unreachable
from pallas_gpu.ops.collectives.products import (
    all_gather_matmul,
    matmul_reduce_scatter,
)

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "rotate",
    "unreachable",
]
