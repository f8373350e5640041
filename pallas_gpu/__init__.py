# SPDX-License-Identifier: Apache-2.0
"""GPU kernels from Python on JAX, for Hopper and Blackwell.

    import pallas_gpu as plgpu

A kernel is a function over references; `kernel` or `pallas_call` turns it into a
function over arrays. It runs on a GPU, in an emulator on any machine, and compiles
offline for any target.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

from pallas_gpu import arch as arch
from pallas_gpu import bridge as _bridge  # noqa: F401 - registers its lowerings
from pallas_gpu import composites as _composites  # noqa: F401 - registers its rules
from pallas_gpu import emulator as _emulator  # noqa: F401 - registers its rules
from pallas_gpu import errors as errors
from pallas_gpu import layouts as layouts
from pallas_gpu import lowering as _lowering  # noqa: F401 - registers its rules
from pallas_gpu import offline as offline
from pallas_gpu import testing as testing
from pallas_gpu.bridge import triton as triton
from pallas_gpu.entry.control import loop, num_programs, program_id, when
from pallas_gpu.entry.integers import (
    align_to,
    cdiv,
    next_power_of_2,
    strides_from_shape,
)
from pallas_gpu.entry.interpret import (
    force_gpu_interpret_mode,
    set_gpu_interpret_mode,
)
from pallas_gpu.entry.kernel import kernel
from pallas_gpu.entry.memory.empty import (
    alloc_semaphore,
    empty,
    empty_like,
    empty_ref_like,
)
from pallas_gpu.entry.run_state import run_state
from pallas_gpu.entry.scoped import get_global, run_scoped, with_scoped
from pallas_gpu.entry.warp import warp_map
from pallas_gpu.layouts import Layout, Replicated, TiledLayout, Tiling
from pallas_gpu.layouts import TmemLayout as TMEMLayout
from pallas_gpu.pipeline.dynamic import dynamic_scheduling_loop
from pallas_gpu.pipeline.emit import emit_pipeline
from pallas_gpu.pipeline.loops import NDLoopInfo, nd_loop, planar_snake
from pallas_gpu.pipeline.pallas_call import pallas_call
from pallas_gpu.pipeline.warp_specialized import (
    PipelinePipeline,
    emit_pipeline_warp_specialized,
)
from pallas_gpu.primitives.atomics import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
)
from pallas_gpu.primitives.cluster import async_store_smem, cluster_ref
from pallas_gpu.primitives.copies.im2col import im2col_ref
from pallas_gpu.primitives.copies.prefetch import async_prefetch
from pallas_gpu.primitives.cp_async import wait_gmem_to_smem
from pallas_gpu.primitives.debug import debug_check, debug_print, print_layout
from pallas_gpu.primitives.grids.griddepcontrol import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
)
from pallas_gpu.primitives.grids.launch_control import (
    TryClusterCancelResult,
    query_cluster_cancel,
    try_cluster_cancel,
)
from pallas_gpu.primitives.mbarrier import (
    barrier_arrive,
    barrier_arrive_and_wait,
    barrier_expect,
    barrier_test,
    barrier_wait,
)
from pallas_gpu.primitives.registers import (
    broadcasted_iota,
    layout_cast,
    load,
    max,
    min,
    multiple_of,
    prod,
    set_max_registers,
    store,
    sum,
)
from pallas_gpu.primitives.sync.delay import delay
from pallas_gpu.primitives.sync.semaphore import (
    SemaphoreSignal,
    semaphore_read,
    semaphore_signal,
    semaphore_signal_parallel,
    semaphore_wait,
)
from pallas_gpu.primitives.tensor_cores.mma import mma
from pallas_gpu.primitives.tensor_cores.operand_copy import async_copy_smem_to_tmem
from pallas_gpu.primitives.tensor_cores.scales import async_copy_scales_to_tmem
from pallas_gpu.primitives.tensor_cores.sparsity import (
    async_copy_sparse_metadata_to_tmem,
)
from pallas_gpu.primitives.tensor_cores.tcgen05 import (
    tcgen05_commit_arrive,
    tcgen05_mma,
)
from pallas_gpu.primitives.tensor_cores.tmem import (
    async_load_tmem,
    async_store_tmem,
    commit_tmem,
    wait_load_tmem,
)
from pallas_gpu.primitives.tensor_cores.wgmma import (
    wgmma,
    wgmma_accumulator_load,
    wgmma_wait,
)
from pallas_gpu.primitives.tma import (
    commit_gmem,
    commit_smem,
    commit_smem_to_gmem_group,
    copy_gmem_to_smem,
    copy_smem_to_gmem,
    wait_smem_to_gmem,
)
from pallas_gpu.runtime.export import (
    enable_debug_checks,
    estimate_cost,
    lower_as_mlir,
    pallas_export_experimental,
)
from pallas_gpu.testing.autotune import autotune
from pallas_gpu.types import (
    ACC,
    GMEM,
    REGS,
    SMEM,
    TMEM,
    AsyncCopyImplementation,
    Barrier,
    BlockDim,
    Blocked,
    BlockSpec,
    BoundedSlice,
    ClusterBarrier,
    CompilerParams,
    CopyPartition,
    CostEstimate,
    Element,
    GridSpec,
    InterpretParams,
    LoweringSemantics,
    MemoryRef,
    MemorySpace,
    Mesh,
    OOBFillMode,
    PrefetchScalarGridSpec,
    Ref,
    RefUnion,
    SemaphoreType,
    Squeezed,
    SwizzleTransform,
    TilingTransform,
    Transform,
    WarpMesh,
    ds,
    find_swizzle,
    no_block_spec,
    squeezed,
    transpose_ref,
)
from pallas_gpu.types.foreign import INSTEAD as _INSTEAD
from pallas_gpu.types.foreign import PUBLIC_NAMES as _PUBLIC_NAMES
from pallas_gpu.types.indexing import Slice
from pallas_gpu.types.spaces.sparse_format import (
    compress_1_of_2,
    compress_2_of_4,
    compress_4_of_8,
    format_tcgen05_sparse_metadata,
)

if _typing.TYPE_CHECKING:
    from pallas_gpu import ops as ops

# Upstream's other names for the same things.
InterpretGPUParams = InterpretParams
WGMMAAccumulatorRef = ACC
ANY = GMEM
dslice = ds
wgmma_accumulator_deref = wgmma_accumulator_load

__version__ = "0.1.0"

__all__ = [
    # Entry points
    "kernel",
    "pallas_call",
    "emit_pipeline",
    "emit_pipeline_warp_specialized",
    "PipelinePipeline",
    "run_scoped",
    "with_scoped",
    "get_global",
    "run_state",
    "empty",
    "empty_like",
    "empty_ref_like",
    "offline",
    "ops",
    "testing",
    "triton",
    "autotune",
    "estimate_cost",
    "lower_as_mlir",
    "pallas_export_experimental",
    # Control flow and positions
    "when",
    "loop",
    "warp_map",
    "nd_loop",
    "dynamic_scheduling_loop",
    "try_cluster_cancel",
    "query_cluster_cancel",
    "TryClusterCancelResult",
    "NDLoopInfo",
    "planar_snake",
    "program_id",
    "num_programs",
    "ds",
    "dslice",
    "Slice",
    "transpose_ref",
    "cdiv",
    "align_to",
    "next_power_of_2",
    "strides_from_shape",
    "multiple_of",
    "debug_print",
    "debug_check",
    "enable_debug_checks",
    "print_layout",
    # Copies
    "async_prefetch",
    "async_store_smem",
    "cluster_ref",
    "im2col_ref",
    "copy_gmem_to_smem",
    "copy_smem_to_gmem",
    "commit_gmem",
    "commit_smem",
    "commit_smem_to_gmem_group",
    "wait_gmem_to_smem",
    "wait_smem_to_gmem",
    # Barriers
    "barrier_arrive",
    "barrier_arrive_and_wait",
    "barrier_expect",
    "barrier_test",
    "barrier_wait",
    # Semaphores
    "SemaphoreType",
    "alloc_semaphore",
    "semaphore_signal",
    "semaphore_signal_parallel",
    "SemaphoreSignal",
    "semaphore_wait",
    "semaphore_read",
    "delay",
    # Dependent launches
    "griddepcontrol_launch_dependents",
    "griddepcontrol_wait",
    # Registers
    "load",
    "store",
    "layout_cast",
    "broadcasted_iota",
    "set_max_registers",
    "max",
    "min",
    "prod",
    "sum",
    # Atomic operations
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    # Tensor cores
    "mma",
    "wgmma",
    "wgmma_wait",
    "wgmma_accumulator_load",
    "wgmma_accumulator_deref",
    "tcgen05_mma",
    "tcgen05_commit_arrive",
    "async_copy_scales_to_tmem",
    "async_copy_smem_to_tmem",
    "async_copy_sparse_metadata_to_tmem",
    "format_tcgen05_sparse_metadata",
    "compress_1_of_2",
    "compress_2_of_4",
    "compress_4_of_8",
    "async_load_tmem",
    "async_store_tmem",
    "wait_load_tmem",
    "commit_tmem",
    "ACC",
    "WGMMAAccumulatorRef",
    # Types
    "Ref",
    "MemorySpace",
    "MemoryRef",
    "GMEM",
    "ANY",
    "SMEM",
    "TMEM",
    "TMEMLayout",
    "REGS",
    "RefUnion",
    "Barrier",
    "ClusterBarrier",
    "BlockSpec",
    "BlockDim",
    "Blocked",
    "Element",
    "BoundedSlice",
    "Squeezed",
    "squeezed",
    "no_block_spec",
    "GridSpec",
    "PrefetchScalarGridSpec",
    "Mesh",
    "WarpMesh",
    "Transform",
    "TilingTransform",
    "SwizzleTransform",
    "find_swizzle",
    "layouts",
    "Layout",
    "TiledLayout",
    "Tiling",
    "Replicated",
    # Parameters
    "CompilerParams",
    "CostEstimate",
    "InterpretParams",
    "InterpretGPUParams",
    "force_gpu_interpret_mode",
    "set_gpu_interpret_mode",
    "LoweringSemantics",
    "AsyncCopyImplementation",
    "OOBFillMode",
    "CopyPartition",
    "arch",
    "errors",
]

_PUBLIC_NAMES.update(__all__)


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__version__"])


# To a type checker this function would mean that every name exists.
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> _typing.Any:
        # ops is written on the names above, so it is imported when it is first used.
        if name == "ops":
            return _importlib.import_module("pallas_gpu.ops")
        known = _INSTEAD.get(name)
        hint = "" if known is None else f"; instead: {known}"
        raise AttributeError(
            f"module 'pallas_gpu' has no attribute {name!r}{hint}",
            name=name,
            obj=_sys.modules[__name__],
        )
