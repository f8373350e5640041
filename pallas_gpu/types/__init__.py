# SPDX-License-Identifier: Apache-2.0
"""What kernels handle: memory spaces, references, barriers, block specs, meshes."""

# mypy: implicit-reexport

from jax.extend import source_info_util as _source_info_util

from pallas_gpu import expect as _expect
from pallas_gpu.types.accumulator import (
    ACC,
    WGMMA_COLUMNS,
    WGMMA_ROWS,
    AccumulatorInit,
    AccumulatorRef,
)
from pallas_gpu.types.barrier import (
    BARRIER_BYTES,
    BARRIERS,
    MAX_ARRIVALS,
    MAX_PENDING_BYTES,
    Barrier,
    BarrierRef,
    ClusterBarrier,
)
from pallas_gpu.types.block_spec import (
    BlockDim,
    Blocked,
    BlockSpec,
    BoundedSlice,
    Element,
    Squeezed,
    no_block_spec,
    squeezed,
)
from pallas_gpu.types.copies.partition import CopyPartition
from pallas_gpu.types.copies.reductions import (
    REDUCTIONS,
    CopyReduction,
    signed_reduction,
)
from pallas_gpu.types.cost import CostEstimate
from pallas_gpu.types.elements import kind
from pallas_gpu.types.foreign import foreign_function, is_foreign, refuse_foreign
from pallas_gpu.types.grid_spec import GridSpec, PrefetchScalarGridSpec
from pallas_gpu.types.indexing import ds
from pallas_gpu.types.mesh import CudaMesh, Mesh, WarpMesh
from pallas_gpu.types.not_values import conversion, not_a_value
from pallas_gpu.types.params import (
    AsyncCopyImplementation,
    CompilerParams,
    InterpretParams,
    LoweringSemantics,
    OOBFillMode,
    on_use_of_params,
)
from pallas_gpu.types.profiling.recording import (
    ProfilerSpec,
    Recording,
    SpanNames,
    TraceScope,
)
from pallas_gpu.types.ref import Ref
from pallas_gpu.types.refs import (
    KernelRef,
    RefView,
    access_by_element,
    as_view,
    base_aval,
    describe,
    has_parts,
    stored,
    transpose_ref,
)
from pallas_gpu.types.selection import select
from pallas_gpu.types.spaces.devices import (
    DeviceIdType,
    Devices,
    MulticastRef,
    Owner,
    PeerMemRef,
    split_owner,
)
from pallas_gpu.types.spaces.memory_space import MemoryRef, MemorySpace, ScratchType
from pallas_gpu.types.spaces.nvidia import GMEM, REGS, SMEM, TMEM
from pallas_gpu.types.spaces.resource import (
    Declaration,
    GmemArray,
    Overlay,
    Resource,
    Sharing,
    Storage,
)
from pallas_gpu.types.spaces.semaphore import (
    SEMAPHORE_BYTES,
    SEMAPHORES,
    Semaphore,
    SemaphoreRef,
    SemaphoreType,
)
from pallas_gpu.types.spaces.tmem import TmemStorage
from pallas_gpu.types.spaces.union import RefUnion
from pallas_gpu.types.steps import (
    ClusterStep,
    Im2ColStep,
    Reinterpreted,
    reinterpreted,
    resolve,
)
from pallas_gpu.types.transforms import (
    SwizzleTransform,
    TilingTransform,
    Transform,
    find_swizzle,
    itemsize_bits,
    smem_layout,
)

_expect.explain_with(refuse_foreign)
# The constructor that `dataclasses` writes is no line of the kernel's.
_source_info_util.register_exclusion("<string>")
