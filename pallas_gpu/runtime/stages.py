# SPDX-License-Identifier: Apache-2.0
"""The stages after the complete module: serialization and offline compilation.

Importing this module adds them to the stages of NVIDIA's machine.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from pallas_gpu import arch, compiler, errors
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering import launch, notes, slow
from pallas_gpu.lowering.machine import Build, add_passes
from pallas_gpu.program.nodes import Kind
from pallas_gpu.program.walk import Site, walk
from pallas_gpu.runtime import machine_code, offline_compiler, worker
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
    _warn_of_spills(build, compiled)
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


def lowered_with_notes(build: Build) -> tuple[Build, notes.Notes]:
    """Lowers a kernel after the stage `layouts`, and serializes it.

    Its code carries the numbers of its operations where others have lines.

    Args:
      build: after `layouts`, or a later stage.

    Returns:
      The build after `serialize`, and the notes of what has been emitted.
    """
    options = dataclasses.replace(build.params.compiler_params, line_info=True)
    params = dataclasses.replace(build.params, compiler_params=options)
    with notes.recording() as found:
        numbered = compiler.run(
            build.replace(params=params, module=None, launch=None),
            after="layouts",
            until="serialize",
        )
    return numbered, found


def _warn_of_spills(build: Build, compiled: offline_compiler.CompiledModule) -> None:
    used = compiled.resources
    if not (used.spill_store_bytes or used.spill_load_bytes):
        return
    site, said = None, f"{used.spill_store_bytes} bytes of each thread"
    if compiled.sass is not None:
        spills = machine_code.spilled(compiled.sass)
        if not (spills and spills[0].in_loop):
            # What is stored before a loop, and loaded after it, takes no time.
            return
        worst, site = _in_loop(build, spills[0])
        said = worst.said(site and loop_around(site))
    slow.warn(
        f"kernel {build.name} spills registers: {said}",
        f"{used.registers_per_thread} registers per thread on {used.target}",
        "plgpu.explain estimates the time that this takes, and says what helps",
        lambda: build.params.defined_at if site is None else site.where,
    )


def _in_loop(
    build: Build, worst: machine_code.Spilled
) -> tuple[machine_code.Spilled, Site | None]:
    """Returns the loop that spills most, and the operation in it that does.

    Args:
      worst: the loop, if the code with numbers of operations does not spill: ptxas may
        allocate its registers otherwise.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.PerformanceWarning)
        numbered, found = lowered_with_notes(build)
    code = compiled_module(numbered).sass_with_control
    numbered_spills = machine_code.spilled(code or "")
    if not numbered_spills:
        return worst, None
    worst = numbered_spills[0]
    return worst, spills_at(worst, found, walk(build.params.jaxpr))


def spills_at(
    spills: machine_code.Spilled, found: notes.Notes, sites: Sequence[Site]
) -> Site | None:
    """Returns the operation whose code spills most; None if it is not known."""
    ops = found.numbered()
    of_ops = {op: n for line, n in spills.lines.items() if (op := ops.get(line))}
    known = [site for site in sites if site.op in of_ops and site.op.kind is Kind.PLAIN]
    if spills.in_loop:
        known = [site for site in known if loop_around(site)] or known
    return max(known, key=lambda site: of_ops[site.op], default=None)


def loop_around(site: Site) -> Site | None:
    """Returns the innermost loop around an operation; None outside of loops."""
    loops = [x for x in site.enclosing if x.op.kind in (Kind.FOR, Kind.WHILE)]
    return loops[-1] if loops else None


def _operand_avals(params: CallParams) -> list[Any]:
    avals = []
    for i in range(params.num_inputs):
        aval = params.jaxpr.invars[i].aval
        lead = tuple(axis.size for axis in params.batch if axis.batched[i])
        avals.append(jax.ShapeDtypeStruct((*lead, *aval.shape), aval.dtype))
    return avals


add_passes(launch.MACHINE, serialize=serialize_module, compile=compile_offline)
