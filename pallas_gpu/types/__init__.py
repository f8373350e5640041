# SPDX-License-Identifier: Apache-2.0
"""What kernels handle: memory spaces, references, barriers, block specs, meshes."""

from pallas_gpu.types.barrier import Barrier
from pallas_gpu.types.block_spec import Blocked, BlockSpec, Element, GridSpec, Squeezed
from pallas_gpu.types.memory_space import GMEM, REGS, SMEM, TMEM, MemorySpace, ScratchType
from pallas_gpu.types.mesh import Mesh
from pallas_gpu.types.params import (
    CompilerParams,
    InterpretParams,
    LoweringSemantics,
    OOBFillMode,
)
from pallas_gpu.types.refs import BarrierRef, KernelRef, base_aval, describe
from pallas_gpu.types.transforms import (
    SwizzleTransform,
    TilingTransform,
    Transform,
    find_swizzle,
    itemsize_bits,
    smem_layout,
    smem_window,
)
from pallas_gpu.types.views import Axis, View, resolve

__all__ = [
    "GMEM",
    "REGS",
    "SMEM",
    "TMEM",
    "Axis",
    "Barrier",
    "BarrierRef",
    "BlockSpec",
    "Blocked",
    "CompilerParams",
    "Element",
    "GridSpec",
    "InterpretParams",
    "KernelRef",
    "LoweringSemantics",
    "MemorySpace",
    "Mesh",
    "OOBFillMode",
    "ScratchType",
    "Squeezed",
    "SwizzleTransform",
    "TilingTransform",
    "Transform",
    "View",
    "base_aval",
    "describe",
    "find_swizzle",
    "itemsize_bits",
    "resolve",
    "smem_layout",
    "smem_window",
]
