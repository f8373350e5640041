# SPDX-License-Identifier: Apache-2.0
"""Kernels a level below `plgpu.kernel`: bodies that emit MLIR themselves.

    from pallas_gpu import mosaic as mgpu

reads as `import jax.experimental.mosaic.gpu as mgpu` does. Names are imported when they
are first used: they bring MLIR with them.
"""

from __future__ import annotations

import importlib
from typing import Any

from pallas_gpu.primitives import inline as _inline

_inline.handles_by(lambda: importlib.import_module("pallas_gpu.mosaic.inlined"))

# The file of each public name.
_FILES: dict[str, tuple[str, ...]] = {
    "barriers": ("BarrierRef", "CollectiveBarrierRef", "SemaphoreRef"),
    "clusters": ("get_cluster_ref", "query_cluster_cancel", "try_cluster_cancel"),
    "devices": ("MultimemReductionOp", "supports_cross_device_collectives"),
    "elements": ("bitwidth", "bytewidth"),
    "fragmented_array": (
        *("FragmentedArray", "Rounding", "concatenate"),
        *("copy_tiled", "optimization_barrier"),
    ),
    "kernel": ("ProfilerSpec", "as_gpu_kernel", "as_torch_gpu_kernel"),
    "launch_context": (
        *("AsyncCopyImplementation", "CopyPartition", "GLOBAL_BROADCAST"),
        *("LaunchContext", "LoweringSemantics", "OOBFillMode", "TMAReductionOp"),
    ),
    "layouts": (
        *("FragmentedLayout", "TCGEN05_COL_LAYOUT", "TCGEN05_LAYOUT"),
        *("TCGEN05_ROW_LAYOUT", "TCGEN05_TRANSPOSED_LAYOUT", "TMA_INDICES_4_LAYOUT"),
        *("TMA_INDICES_LAYOUT", "TMEM_NATIVE_LAYOUT", "TiledLayout"),
        *("WGMMA_COL_LAYOUT", "WGMMA_LAYOUT", "WGMMA_LAYOUT_8BIT"),
        *("WGMMA_LAYOUT_UPCAST_2X", "WGMMA_LAYOUT_UPCAST_4X", "WGMMA_ROW_LAYOUT"),
        *("WGMMA_TRANSPOSED_LAYOUT", "WGSplatFragLayout"),
        *("WGStridedFragLayout", "tmem_native_layout"),
    ),
    "memory.memref_shapes": (
        *("memref_fold", "memref_reshape", "memref_slice", "memref_transpose"),
        *("memref_unfold", "memref_unsqueeze", "parse_indices"),
    ),
    "memory.memrefs": ("memref_ptr", "ptr_as_memref"),
    "partition": ("Partition", "Partition1D"),
    "scalars": (
        *("DynamicSlice", "ThreadSubset", "c", "commit_shared", "debug_print", "ds"),
        *("fori", "is_known_divisible", "nanosleep", "single_thread"),
        *("single_thread_predicate", "thread_idx", "tile_shape", "warp_idx"),
        *("warpgroup_barrier", "warpgroup_idx", "when"),
    ),
    "scratch": (
        *("Barrier", "ClusterBarrier", "CtaBarrier", "CtaBarrierRef"),
        *("ShapeDtypeStruct", "TMABarrier", "TMEM", "Union"),
    ),
    "tensor_cores.mma": ("MMALayouts", "mma"),
    "tensor_cores.wgmma": ("WGMMAAccumulator", "wgmma"),
    "transforms": ("MemRefTransform", "TileTransform", "TransposeTransform"),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}
# Public modules.
_MODULES = {
    "profiler": "pallas_gpu.profiler",
    "tcgen05": "pallas_gpu.mosaic.tcgen05",
}

__all__ = sorted([*_FILE_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
