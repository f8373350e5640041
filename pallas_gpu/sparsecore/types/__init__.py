# SPDX-License-Identifier: Apache-2.0
"""What kernels for SparseCores handle: meshes, memories, semaphores, references."""

from pallas_gpu.sparsecore.types.chips import SparseCoreInfo, get_sparse_core_info
from pallas_gpu.sparsecore.types.meshes import (
    MACHINE,
    ScalarSubcoreMesh,
    SubcoreMesh,
    SubcoreMeshes,
    VectorSubcoreMesh,
)
from pallas_gpu.sparsecore.types.params import CompilerParams
from pallas_gpu.sparsecore.types.refs import Indices, NamedRows, SparseCoreRef
from pallas_gpu.sparsecore.types.spaces import (
    HBM,
    SEMAPHORES,
    SMEM,
    SPACES,
    VMEM,
    VMEM_SHARED,
    WORD_BYTES,
    Scratch,
    Semaphore,
    SemaphoreRef,
    SemaphoreType,
    Space,
    register_elements,
    require_stored,
)

__all__ = [
    "HBM", "MACHINE", "SEMAPHORES", "SMEM", "SPACES", "VMEM", "VMEM_SHARED",
    "WORD_BYTES", "CompilerParams", "Indices", "NamedRows", "ScalarSubcoreMesh",
    "Scratch", "Semaphore", "SemaphoreRef", "SemaphoreType", "Space",
    "SparseCoreInfo", "SparseCoreRef", "SubcoreMesh", "SubcoreMeshes",
    "VectorSubcoreMesh", "get_sparse_core_info", "register_elements",
    "require_stored",
]  # fmt: skip
