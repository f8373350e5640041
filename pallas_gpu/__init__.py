# SPDX-License-Identifier: Apache-2.0
"""GPU kernels from Python on JAX, for Hopper and Blackwell.

    import pallas_gpu as plgpu

A kernel is a function over references; `kernel` or `pallas_call` turns it into a
function over arrays. It runs on a GPU, in an emulator on any machine, and compiles
offline for any target.
"""

import importlib as _importlib
import sys as _sys
import types as _types
import typing as _typing

from pallas_gpu import bridge as _bridge  # noqa: F401 - registers its lowerings
from pallas_gpu import composites as _composites  # noqa: F401 - registers its rules
from pallas_gpu import mosaic as _mosaic  # noqa: F401 - registers its handles
from pallas_gpu.primitives import _registry
from pallas_gpu.types.foreign import INSTEAD as _INSTEAD
from pallas_gpu.types.foreign import PUBLIC_NAMES as _PUBLIC_NAMES

# isort: off
# Entry points
from pallas_gpu import arch as arch, errors as errors, layouts as layouts
from pallas_gpu.bridge import triton as triton
from pallas_gpu.bridge.torch import as_torch_kernel as as_torch_kernel
from pallas_gpu.entry.kernel import kernel as kernel
from pallas_gpu.entry.empty import (
    alloc_semaphore as alloc_semaphore,
    empty as empty,
    empty_like as empty_like,
    empty_ref_like as empty_ref_like,
)
from pallas_gpu.entry.run_state import run_state as run_state
from pallas_gpu.entry.scoped import (
    run_scoped as run_scoped,
    with_scoped as with_scoped,
    get_global as get_global,
)
from pallas_gpu.pipeline.emit import emit_pipeline as emit_pipeline
from pallas_gpu.pipeline.pallas_call import pallas_call as pallas_call
from pallas_gpu.pipeline.specialized.ring import Ring as Ring
from pallas_gpu.pipeline.specialized.roles import Roles as Roles
from pallas_gpu.pipeline.specialized.stores import TileStore as TileStore
from pallas_gpu.pipeline.specialized.tiles import TileSchedule as TileSchedule
from pallas_gpu.pipeline.warp_specialized import (
    emit_pipeline_warp_specialized as emit_pipeline_warp_specialized,
    PipelinePipeline as PipelinePipeline,
)
from pallas_gpu.runtime.export import (
    estimate_cost as estimate_cost,
    lower_as_mlir as lower_as_mlir,
    pallas_export_experimental as pallas_export_experimental,
)

# Control flow and positions
from pallas_gpu.entry.control import (
    when as when,
    loop as loop,
    program_id as program_id,
    num_programs as num_programs,
)
from pallas_gpu.entry.integers import (
    cdiv as cdiv,
    align_to as align_to,
    next_power_of_2 as next_power_of_2,
    strides_from_shape as strides_from_shape,
)
from pallas_gpu.entry.warp import warp_map as warp_map
from pallas_gpu.pipeline.dynamic import (
    dynamic_scheduling_loop as dynamic_scheduling_loop,
)
from pallas_gpu.pipeline.loops import (
    nd_loop as nd_loop,
    NDLoopInfo as NDLoopInfo,
    planar_snake as planar_snake,
)
from pallas_gpu.runtime.export import enable_debug_checks as enable_debug_checks
from pallas_gpu.types import ds as ds, transpose_ref as transpose_ref
from pallas_gpu.types.indexing import Slice as Slice

# Operations: those of a family are its `__all__`.
from pallas_gpu.primitives.atomics import *
from pallas_gpu.primitives.cluster import *
from pallas_gpu.primitives.copies.im2col import *
from pallas_gpu.primitives.copies.prefetch import *
from pallas_gpu.primitives.cp_async import *
from pallas_gpu.primitives.debug import *
from pallas_gpu.primitives.devices.multimem import *
from pallas_gpu.primitives.devices.peers import *
from pallas_gpu.primitives.grids.griddepcontrol import *
from pallas_gpu.primitives.grids.launch_control import *
from pallas_gpu.primitives.inline import *
from pallas_gpu.primitives.moves.lanes import *
from pallas_gpu.primitives.mbarrier import *
from pallas_gpu.primitives.registers import *
from pallas_gpu.primitives.sync.delay import *
from pallas_gpu.primitives.sync.semaphore import *
from pallas_gpu.primitives.tensor_cores.mma import *
from pallas_gpu.primitives.tensor_cores.operand_copy import *
from pallas_gpu.primitives.tensor_cores.scales import *
from pallas_gpu.primitives.tensor_cores.sparsity import *
from pallas_gpu.primitives.tensor_cores.tcgen05 import *
from pallas_gpu.primitives.tensor_cores.tmem import *
from pallas_gpu.primitives.tensor_cores.wgmma import *
from pallas_gpu.primitives.tma import *

# Types
from pallas_gpu.layouts import (
    Layout as Layout,
    TiledLayout as TiledLayout,
    Tiling as Tiling,
    Replicated as Replicated,
)
from pallas_gpu.types import (
    Ref as Ref,
    MemorySpace as MemorySpace,
    MemoryRef as MemoryRef,
    GMEM as GMEM,
    SMEM as SMEM,
    TMEM as TMEM,
    REGS as REGS,
    RefUnion as RefUnion,
    ACC as ACC,
    Barrier as Barrier,
    ClusterBarrier as ClusterBarrier,
    SemaphoreType as SemaphoreType,
    DeviceIdType as DeviceIdType,
    PeerMemRef as PeerMemRef,
    BlockSpec as BlockSpec,
    BlockDim as BlockDim,
    Blocked as Blocked,
    Element as Element,
    BoundedSlice as BoundedSlice,
    Squeezed as Squeezed,
    squeezed as squeezed,
    no_block_spec as no_block_spec,
    GridSpec as GridSpec,
    PrefetchScalarGridSpec as PrefetchScalarGridSpec,
    Mesh as Mesh,
    WarpMesh as WarpMesh,
    Transform as Transform,
    TilingTransform as TilingTransform,
    SwizzleTransform as SwizzleTransform,
    find_swizzle as find_swizzle,
)
from pallas_gpu.types.spaces.sparse_format import (
    format_tcgen05_sparse_metadata as format_tcgen05_sparse_metadata,
    compress_1_of_2 as compress_1_of_2,
    compress_2_of_4 as compress_2_of_4,
    compress_4_of_8 as compress_4_of_8,
)

# Parameters
from pallas_gpu.entry.interpret import (
    force_gpu_interpret_mode as force_gpu_interpret_mode,
    set_gpu_interpret_mode as set_gpu_interpret_mode,
)
from pallas_gpu.types import (
    CompilerParams as CompilerParams,
    CostEstimate as CostEstimate,
    InterpretParams as InterpretParams,
    LoweringSemantics as LoweringSemantics,
    AsyncCopyImplementation as AsyncCopyImplementation,
    OOBFillMode as OOBFillMode,
    TraceScope as TraceScope,
    CopyPartition as CopyPartition,
)
# isort: on

# What half of the package and MLIR register: imported when a kernel needs it.
for _module, _what in {
    "pallas_gpu.emulator": (
        *("cpu_lowering", "eager_emulator", "emulator_lowering", "gathering"),
        _registry.RuleKind.EMULATE,
    ),
    "pallas_gpu.lockstep": ("emitted_code",),
    "pallas_gpu.lowering": (_registry.RuleKind.EMIT, _registry.RuleKind.RELATION),
    "pallas_gpu.runtime.register": ("compiler", "cuda_lowering", "nvidia"),
}.items():
    _registry.registered_by(_module, *_what)

# Upstream's names for the same things.
TMEMLayout = layouts.TmemLayout
InterpretGPUParams = InterpretParams
WGMMAAccumulatorRef = ACC
ANY = GMEM
dslice = ds
wgmma_accumulator_deref = wgmma_accumulator_load

if _typing.TYPE_CHECKING:
    from pallas_gpu import offline as offline
    from pallas_gpu import ops as ops
    from pallas_gpu import profiler as profiler
    from pallas_gpu import testing as testing
    from pallas_gpu.emulator.mesh import emulate_mesh as emulate_mesh
    from pallas_gpu.explanation.explain import explain as explain
    from pallas_gpu.testing.autotune import autotune as autotune
    from pallas_gpu.verdict.check import check as check

__version__ = "0.1.0"

# To a type checker this function would mean that every name exists.
if not _typing.TYPE_CHECKING:
    # The rooms of the package are attributes of it, too. Some are written on the names
    # above or need MLIR: they are imported when they are first used.
    _LATER_MODULES = ("offline", "ops", "profiler", "testing")
    _LATER = {
        "autotune": "pallas_gpu.testing.autotune",
        "check": "pallas_gpu.verdict.check",
        "emulate_mesh": "pallas_gpu.emulator.mesh",
        "explain": "pallas_gpu.explanation.explain",
    }
    __all__ = [
        *("arch", "errors", "layouts", "triton", *_LATER_MODULES, *_LATER),
        *(
            name
            for name, value in globals().items()
            if not name.startswith("_") and not isinstance(value, _types.ModuleType)
        ),
    ]
    _PUBLIC_NAMES.update(__all__)

    def __dir__() -> list[str]:
        return sorted([*__all__, "__doc__", "__version__"])

    def __getattr__(name: str) -> _typing.Any:
        if name in _LATER_MODULES:
            return _importlib.import_module(f"pallas_gpu.{name}")
        if name in _LATER:
            globals()[name] = getattr(_importlib.import_module(_LATER[name]), name)
            return globals()[name]
        known = _INSTEAD.get(name)
        hint = "" if known is None else f"; instead: {known}"
        raise AttributeError(
            f"module 'pallas_gpu' has no attribute {name!r}{hint}",
            name=name,
            obj=_sys.modules[__name__],
        )
