# SPDX-License-Identifier: Apache-2.0
"""Kernels for the SparseCores of TPUs: the second machine.

    from pallas_gpu import sparsecore as plsc

A kernel is a function over references that each subcore of a mesh runs. It runs in an
emulator on any machine, and compiles offline for any chip. It has never run on a TPU.
"""

# isort: off
from pallas_gpu.sparsecore.entry.kernel import kernel as kernel
from pallas_gpu.sparsecore.pipeline.blocks import (
    BlockSpec as BlockSpec,
    Indirect as Indirect,
)
from pallas_gpu.sparsecore.pipeline.emit import emit_pipeline as emit_pipeline
from pallas_gpu.sparsecore.pipeline.partition import (
    ARBITRARY as ARBITRARY,
    PARALLEL as PARALLEL,
)
from pallas_gpu.sparsecore.primitives.copies import *
from pallas_gpu.sparsecore.primitives.debug import *
from pallas_gpu.sparsecore.primitives.gathers import *
from pallas_gpu.sparsecore.primitives.loops import *
from pallas_gpu.sparsecore.primitives.packing import *
from pallas_gpu.sparsecore.primitives.scans import *
from pallas_gpu.sparsecore.primitives.scoped import *
from pallas_gpu.sparsecore.primitives.sync import *
from pallas_gpu.sparsecore.types import (
    HBM as HBM,
    SMEM as SMEM,
    VMEM as VMEM,
    VMEM_SHARED as VMEM_SHARED,
    CompilerParams as CompilerParams,
    Indices as Indices,
    ScalarSubcoreMesh as ScalarSubcoreMesh,
    SemaphoreType as SemaphoreType,
    SparseCoreInfo as SparseCoreInfo,
    VectorSubcoreMesh as VectorSubcoreMesh,
    get_sparse_core_info as get_sparse_core_info,
)

# What is the same on every machine.
from pallas_gpu.entry.control import (
    loop as loop,
    num_programs as num_programs,
    program_id as program_id,
    when as when,
)
from pallas_gpu.entry.integers import cdiv as cdiv
from pallas_gpu.entry.empty import empty_ref_like as empty_ref_like
from pallas_gpu.primitives.registers import multiple_of as multiple_of
from pallas_gpu.primitives.sync.delay import delay as delay
from pallas_gpu.types import InterpretParams as InterpretParams, ds as ds

from pallas_gpu.sparsecore.runtime.report import (
    KernelReport as KernelReport,
    compile as compile,
)

# isort: on
from pallas_gpu.sparsecore import emulator as _emulator  # noqa: F401 - runs kernels
from pallas_gpu.sparsecore.runtime import register as _register  # noqa: F401 - TPUs
