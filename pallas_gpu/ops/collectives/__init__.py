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
from pallas_gpu.ops.collectives.experts import Dispatched, combine, dispatch
from pallas_gpu.ops.collectives.products import (
    all_gather_matmul,
    matmul_reduce_scatter,
)
from pallas_gpu.ops.collectives.ring_attention import merge, ring_attention

__all__ = [
    "Dispatched",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "combine",
    "dispatch",
    "matmul_reduce_scatter",
    "merge",
    "reduce_scatter",
    "ring_attention",
    "rotate",
    "unreachable",
]


def __dir__() -> list[str]:
    return sorted(__all__)
