# SPDX-License-Identifier: Apache-2.0
"""Ready kernels for SparseCores: lookups, sums, counts, sorts and moves of rows.

    from pallas_gpu.sparsecore import ops

Each is a function of arrays that composes with `jax.jit` and `jax.vmap`. `target` is
the chip, and `interpret` that of `plsc.kernel`.
"""

from pallas_gpu.sparsecore.ops.deduplicate import deduplicate
from pallas_gpu.sparsecore.ops.dispatch import dispatch
from pallas_gpu.sparsecore.ops.embedding import embedding_bag, embedding_lookup
from pallas_gpu.sparsecore.ops.histogram import histogram
from pallas_gpu.sparsecore.ops.segments import segment_sum
from pallas_gpu.sparsecore.ops.sorting import sort, top_k

__all__ = [
    "deduplicate",
    "dispatch",
    "embedding_bag",
    "embedding_lookup",
    "histogram",
    "segment_sum",
    "sort",
    "top_k",
]
