# SPDX-License-Identifier: Apache-2.0
"""What kernels handle: memory spaces, references, barriers, block specs, meshes."""

from jax.extend import source_info_util as _source_info_util

from pallas_gpu.types.accumulator import (
    ACC,
    WGMMA_COLUMNS,
    WGMMA_ROWS,
    AccumulatorInit,
    AccumulatorRef,
)
from pallas_gpu.types.barrier import Barrier, ClusterBarrier
from pallas_gpu.types.block_spec import Blocked, BlockSpec, Element, GridSpec, Squeezed
from pallas_gpu.types.memory_space import (
    GMEM,
    REGS,
    SMEM,
    TMEM,
    MemorySpace,
    ScratchType,
)
from pallas_gpu.types.mesh import Mesh
from pallas_gpu.types.params import (
    CompilerParams,
    InterpretParams,
    LoweringSemantics,
    OOBFillMode,
)
from pallas_gpu.types.refs import BarrierRef, KernelRef, RefView, base_aval, describe
from pallas_gpu.types.transforms import (
    SwizzleTransform,
    TilingTransform,
    Transform,
    find_swizzle,
    itemsize_bits,
    smem_layout,
)
from pallas_gpu.types.window import resolve

# The constructor that `dataclasses` writes is no line of the kernel's.
_source_info_util.register_exclusion("<string>")

__all__ = [
    "ACC",
    "GMEM",
    "REGS",
    "SMEM",
    "TMEM",
    "AccumulatorInit",
    "AccumulatorRef",
    "Barrier",
    "BarrierRef",
    "BlockSpec",
    "Blocked",
    "ClusterBarrier",
    "CompilerParams",
    "Element",
    "GridSpec",
    "InterpretParams",
    "KernelRef",
    "LoweringSemantics",
    "MemorySpace",
    "Mesh",
    "OOBFillMode",
    "RefView",
    "ScratchType",
    "Squeezed",
    "SwizzleTransform",
    "TilingTransform",
    "Transform",
    "WGMMA_COLUMNS",
    "WGMMA_ROWS",
    "base_aval",
    "describe",
    "find_swizzle",
    "itemsize_bits",
    "resolve",
    "smem_layout",
]
