# SPDX-License-Identifier: Apache-2.0
"""The stages after the complete module: serialization and offline compilation.

Importing this module adds them to the stages of NVIDIA's machine.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_gpu import arch
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering import launch, slow
from pallas_gpu.lowering.machine import Build
from pallas_gpu.program.walk import walk
from pallas_gpu.runtime import offline_compiler, worker
from pallas_gpu.runtime.resources_report import Resources
from pallas_gpu.runtime.serialize import serialize


def serialize_module(build: Build) -> Build:
    """Serializes the module, which `barriers` has verified; it is not modified."""
    options = build.params.compiler_params
    serialized = serialize(
        build.module,
        keep_locations=options.line_info,
        verify=False,
        ir_version=options.ir_version,
    )
    return build.replace(serialized=serialized)


def compile_offline(build: Build) -> Build:
    """Compiles the bytes to PTX and SASS, without a GPU.

    Raises:
      OfflineUnavailableError: CUDA packages are missing.
      CompilationError: the module does not compile, or exceeds the time limit.
    """
    compiled = compiled_module(build)
    _warn_of_spills(build, compiled.resources)
    return build.replace(compiled=compiled)


def compiled_module(
    build: Build, using: worker.Worker | None = None
) -> offline_compiler.CompiledModule:
    """Compiles a serialized build, in a given worker or that of this process.

    Raises:
      OfflineUnavailableError: CUDA packages are missing.
      CompilationError: the module does not compile, or exceeds the time limit.
    """
    params, target = build.params, build.target
    assert isinstance(target, arch.GpuTarget)
    return offline_compiler.compile_module(
        build.serialized,
        name=build.name,
        target=target,
        operand_avals=[
            *_operand_avals(params),
            *(aval for aval, _ in params.work_operands),
        ],
        result_avals=[*params.out_avals, *params.work_results],
        smem_bytes=build.plan.smem_bytes,
        num_barriers=build.plan.barriers,
        tmem_columns=build.plan.tmem_columns,
        threads=launch.threads_of(params),
        using=using,
    )


def _warn_of_spills(build: Build, used: Resources) -> None:
    if not (used.spill_store_bytes or used.spill_load_bytes):
        return
    slow.warn(
        f"kernel {build.name} spills registers",
        f"{used.spill_store_bytes} bytes stored and {used.spill_load_bytes} bytes "
        "loaded by each thread",
        f"{used.registers_per_thread} registers per thread on {used.target}",
        "process smaller blocks, or use more warpgroups: num_threads",
        lambda: next((s.where for s in walk(build.params.jaxpr) if s.where), None),
    )


def _operand_avals(params: CallParams) -> list[Any]:
    avals = []
    for i in range(params.num_inputs):
        aval = params.jaxpr.invars[i].aval
        lead = tuple(axis.size for axis in params.batch if axis.batched[i])
        avals.append(jax.ShapeDtypeStruct((*lead, *aval.shape), aval.dtype))
    return avals


launch.NVIDIA.passes.update(serialize=serialize_module, compile=compile_offline)
