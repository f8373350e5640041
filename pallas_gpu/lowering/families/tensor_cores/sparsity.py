# SPDX-License-Identifier: Apache-2.0
"""Copies of the metadata of sparse operands to TMEM."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.tensor_cores import sparsity
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives.tensor_cores import sparsity as primitives


# It copies contiguous bytes.
@emits(primitives.async_copy_sparse_metadata_to_tmem_p, smem="pointer", tmem="mma")
def _copy(ctx: RuleContext, smem: Any, tmem: Any, *, collective_axis: Any) -> None:
    collective = collective_axis is not None
    sparsity.copy_to_tmem(ctx.view(smem), ctx.view(tmem), collective=collective)
