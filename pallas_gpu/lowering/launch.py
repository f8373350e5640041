# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs as a machine: its stages, the launch, prologue and epilogue."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from pallas_gpu import arch, errors, resources, types
from pallas_gpu.checks import equations
from pallas_gpu.emitters import elementwise, gmem, mbarrier, smem
from pallas_gpu.emitters.devices import peers
from pallas_gpu.emitters.elements import arith
from pallas_gpu.emitters.module import KernelBuilder, LaunchSpec
from pallas_gpu.emitters.program import passes
from pallas_gpu.emitters.tensor_cores import tmem
from pallas_gpu.entry import expand
from pallas_gpu.entry.call import CallParams
from pallas_gpu.layouts.registers.placement import describe
from pallas_gpu.layouts.window import Window
from pallas_gpu.lowering import context as ctx_lib
from pallas_gpu.lowering import inference, pressure, scratch, workspace
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.choice.assigned import Assigned
from pallas_gpu.lowering.choice.authored import Authored
from pallas_gpu.lowering.context import KernelState
from pallas_gpu.lowering.inference import collect, listing
from pallas_gpu.lowering.inference.network import Memory
from pallas_gpu.lowering.machine import Build, register_machine
from pallas_gpu.lowering.passes import contiguous, undefined
from pallas_gpu.lowering.references import I32
from pallas_gpu.lowering.traits import multicasts, shares_smem
from pallas_gpu.memory import fences
from pallas_gpu.memory.sharing import inferred_members
from pallas_gpu.primitives.grids import griddepcontrol
from pallas_gpu.program import text
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import facts_of
from pallas_gpu.program.walk import uses

# The machine that compiles for `arch.GpuTarget`.
MACHINE = "nvidia"
_WARPGROUP = types.LoweringSemantics.Warpgroup


# --- the machine's stages -------------------------------------------------------------


def plan_memory(build: Build) -> Build:
    """Plans SMEM, TMEM and barriers.

    Raises:
      TargetError: an operation needs a feature that the target does not have.
      OutOfResources: the kernel does not fit the target.
    """
    params, target = build.params, _gpu(build.target)
    equations.require_features(params.jaxpr, target)
    return build.replace(plan=expand.planned(params, target))


def lower_operations(build: Build) -> Build:
    """Lowers the operations of the program in order, by their rules.

    Raises:
      UnsupportedError: an operation has no rule, or none for this target.
      OutOfResources: the operations need more scratch than there is SMEM.
    """
    params, target, layouts = build.params, _gpu(build.target), build.layouts
    builder = KernelBuilder(_launch_spec(params, target, build.plan))
    with builder:
        if not isinstance(layouts, Authored):
            launched = _launched_blocks(params, target, build.plan)
            resident = resources.residency(build.plan, target, params.mesh)
            blocks = min(resident.ctas_per_sm, -(-launched // target.sm_count))
            threads = threads_of(params)
            limit = pressure.register_limit(layouts, target, threads, blocks)
            if limit is not None:
                builder.limit_registers(limit)
            layouts = Assigned(layouts)
        kernel = KernelState(params, target, builder, build.plan, layouts)
        _prologue(kernel)
        handles = [_handle(kernel, i) for i in range(len(params.jaxpr.invars))]
        try:
            ctx_lib.lower_region(kernel, region_of(params.jaxpr), handles)
        except errors.OutOfResources as error:
            error.hint = scratch.what_to_do(build.plan, params, error)
            raise
        _epilogue(kernel)
    return build.replace(module=builder.module, launch=builder, plan=kernel.plan)


def _launch_spec(
    params: CallParams, target: arch.GpuTarget, plan: resources.Plan
) -> LaunchSpec:
    mesh, block = params.mesh, None
    grid: Any = (_launched_blocks(params, target, plan), 1, 1)
    cluster: Any = (math.prod(mesh.cluster), 1, 1)
    if isinstance(mesh, types.CudaMesh):
        (grid, cluster), block = mesh.along_axes(), mesh.block
    return LaunchSpec(
        name=_symbol(params.name),
        grid=tuple(grid),
        cluster=tuple(cluster),
        threads=threads_of(params),
        block=block,
        smem_bytes=plan.smem_bytes,
        num_buffers=len(params.jaxpr.invars)
        + len(params.work_operands)
        + len(params.workspace),
        multicasts=any(True for _ in multicasts(params.jaxpr)),
        devices=0 if params.devices is None else params.devices.size,
        arch=target.compute_capability,
        shares_smem=shares_smem(params.jaxpr, math.prod(mesh.cluster)),
        waits_for_grids=uses(params.jaxpr, griddepcontrol.wait_p),
    )


def _launched_blocks(
    params: CallParams, target: arch.GpuTarget, plan: resources.Plan
) -> int:
    """Returns the number of blocks of the launch.

    Under dynamic scheduling it is that of the resident ones, which claim the positions
    of the others. A block more would only start late, and one less would leave room.
    """
    blocks = params.mesh.blocks * math.prod(axis.size for axis in params.batch)
    if not params.is_dynamic or params.batch:
        return blocks
    resident = resources.residency(plan, target, params.mesh)
    return min(blocks, resident.clusters * resident.ctas_per_cluster)


def threads_of(params: CallParams) -> int:
    """Returns the number of threads of a block."""
    return types.mesh.WARPGROUP_THREADS * params.mesh.warpgroups


def infer_layouts(build: Build) -> Build:
    """Infers the layouts of the arrays of a program, or leaves them to the author.

    Raises:
      LayoutError: no assignment satisfies all operations.
    """
    if build.params.compiler_params.lowering_semantics is not _WARPGROUP:
        return build.replace(layouts=Authored())
    params = build.params
    region = region_of(params.jaxpr)
    network = collect.collect(
        region,
        [_gmem_array(params, i) for i in range(len(params.jaxpr.invars))],
        dict(zip(params.mesh.cluster_names, params.mesh.cluster, strict=True)),
        facts=lambda: facts_of(region, params.mesh.axes),
        free=inferred_members(params.jaxpr, params.compiler_params.lowering_semantics),
        lead=lambda var: params.lead(workspace.array(params, var)),
        approx_math=params.compiler_params.approx_math,
    )
    warpgroups = params.mesh.warpgroups
    layouts = inference.infer(
        network,
        scratch_bytes=[r // warpgroups for r in build.plan.scratch_rooms_bytes],
        free_bytes=build.plan.scratch_free_bytes // warpgroups,
        byte_matrices=smem.has_byte_matrices(_gpu(build.target).compute_capability),
    )
    plan = build.plan.with_room(layouts.scratch_bytes * warpgroups)
    return build.replace(layouts=layouts, plan=plan)


def _gmem_array(params: CallParams, i: int) -> Memory:
    """Returns what inference knows of an operand or a result."""
    aval = params.jaxpr.invars[i].aval
    lead = tuple(size for _, size in _levels(params, i))
    shape, number = (*lead, *aval.shape), inference.digest("buffer", str(i))
    dtype = vals.numpy_dtype(aval)
    return Memory(
        types.GMEM, shape, dtype, len(lead), lambda: number, "GMEM array", None
    )


def _levels(params: CallParams, i: int) -> list[tuple[int, int]]:
    """Returns level and size of the batch axes that an operand or a result has."""
    is_input = i < params.num_inputs
    return [
        (level, axis.size)
        for level, axis in enumerate(params.batch)
        if not is_input or axis.batched[i]
    ]


def program_text(build: Build) -> str:
    """Returns the program that has been emitted, with layouts."""
    notes: dict[Any, list[str]] = {}
    if _is_inferred(build):
        for step, rows in listing.rows_of(build.layouts):
            notes.setdefault(step.node.op, [layout for _, _, layout in rows])
    else:
        for op, made in build.layouts.made.items():
            notes[op] = [describe(layout) for layout in made.values()]
    region = region_of(build.params.jaxpr)
    return text.text(region, build.name, lambda op: "; ".join(notes.get(op, [])))


def _if_inferred(
    text_of: Callable[[Build], str],
) -> Callable[[Build], str | None]:
    """Returns a function that returns None of a build without inferred layouts."""
    return lambda build: text_of(build) if _is_inferred(build) else None


def _is_inferred(build: Build) -> bool:
    return isinstance(build.layouts, inference.Assignment)


# The layouts of values beside their lines, and the program with its layouts.
layouts_text = _if_inferred(lambda build: listing.listing(build.layouts))
annotated_text = _if_inferred(program_text)


def drop_repeated_barriers(build: Build) -> Build:
    """Removes redundant consecutive barriers."""
    shell = build.launch
    if shell is None:
        spec = _launch_spec(build.params, _gpu(build.target), build.plan)
        shell = KernelBuilder.reopen(spec, build.module)
    return build.replace(module=shell.finish())


def _gpu(target: arch.Target) -> arch.GpuTarget:
    assert isinstance(target, arch.GpuTarget)
    return target


# --- prologue -------------------------------------------------------------------------


def _symbol(name: str) -> str:
    """Returns a name as an identifier of PTX (PTX ISA, "Identifiers"), of ASCII only.

    LLVM's NVPTX backend aborts the process at other characters.
    """
    cleaned = re.sub(r"[^0-9A-Za-z_]", "_", name)
    return cleaned if cleaned and not cleaned[0].isdigit() else f"kernel_{cleaned}"


def _prologue(kernel: KernelState) -> None:
    """Emits the positions on the axes, and the initialisation of every barrier."""
    ctx_lib.emit_axes(kernel)
    _emit_device_axes(kernel)
    for axis in kernel.params.enclosing:
        kernel.axes[axis.name] = _position_around(kernel, axis.operand)
    counts: list[int] = []
    for slot, (barrier, copies) in kernel.plan.declared.items():
        # The bits are the parities of the next waits. The parity of the phase before
        # the first is 1: a wait for it returns at once.
        parities = -1 if barrier.initially_complete else 0
        for key in barrier.parity_keys(slot):
            kernel.state[key] = elementwise.scalar(parities, I32)
        arrivals = barrier.phase_arrivals(kernel.params.mesh)
        counts += [arrivals] * (barrier.size * copies)
    if counts:
        mbarrier.init_each(kernel.plan.barrier_offset_bytes, counts)
    if kernel.plan.tmem_columns:
        # Its barrier makes the initialised mbarriers visible, too.
        kernel.tmem = tmem.allocate(
            kernel.builder.smem_pointer(kernel.plan.tmem_address_offset_bytes),
            kernel.plan.tmem_columns,
            collective=kernel.plan.collective_tmem,
            barriers=kernel.plan.barriers > 0,
        )
    elif kernel.plan.barriers or kernel.builder.spec.shares_smem:
        kernel.builder.sync_after_init()


def _emit_device_axes(kernel: KernelState) -> None:
    """Emits the positions of the device on the axes of its mesh."""
    devices, builder = kernel.params.devices, kernel.builder
    if devices is None:
        return
    for (name, size), stride in zip(devices.axes, devices.strides, strict=True):
        index = peers.rank()
        if stride > 1:
            index = arith.divui(index, builder.i32(stride))
        if size * stride < devices.size:
            index = arith.remui(index, builder.i32(size))
        kernel.axes[name] = index if size > 1 else builder.i32(0)


def _position_around(kernel: KernelState, operand: int) -> Any:
    """Emits the load of the position on an axis that encloses the launch."""
    handle = _handle(kernel, operand)
    pointer = kernel.builder.buffers[handle.buffer_index]
    whole = Window.whole(handle.shape)
    view = gmem.GmemView(pointer, handle.buffer_index, handle.dtype, whole)
    return gmem.load_scalar(view.slice([*handle.lead, 0], [None] * len(handle.shape)))


def _handle(kernel: KernelState, i: int) -> vals.GmemHandle:
    """Returns the part of an operand or a result at the block's batch position."""
    params = kernel.params
    var, is_input = params.jaxpr.invars[i], i < params.num_inputs
    levels = [(kernel.axes["batch", level], size) for level, size in _levels(params, i)]
    shape = (*(size for _, size in levels), *var.aval.shape)
    lead = tuple(index for index, _ in levels)
    buffer = i if is_input else i + len(params.work_operands)
    return vals.GmemHandle(buffer, shape, vals.numpy_dtype(var.aval), lead)


def _epilogue(kernel: KernelState) -> None:
    """Emits the end of the body, and sets the SMEM size of the block."""
    plan, builder = kernel.plan, kernel.builder
    if plan.tmem_columns:
        tmem.free(
            builder.smem_pointer(plan.tmem_address_offset_bytes),
            plan.tmem_columns,
            collective=plan.collective_tmem,
        )
    # A pair frees its TMEM behind a barrier of the cluster.
    if not plan.collective_tmem:
        # A body of MLIR waits itself for what it wants to be complete.
        is_author = isinstance(kernel.params.mesh, types.CudaMesh)
        awaits = kernel.traits.awaits_other_ctas or is_author
        builder.sync_before_exit(is_relaxed=awaits)
    builder.set_smem_bytes(plan.smem_bytes)


# `runtime/` adds the stages that process the finished module.
register_machine(
    MACHINE,
    results=undefined.warn,
    composites=lambda b: b.replace(params=expand.expanded(b.params, b.target)),
    fences=lambda b: b.with_body(
        fences.with_fences(b.params.jaxpr, b.params.mesh, b.params.compiler_params)
    ),
    ranges=lambda b: b.with_body(contiguous.with_ranges(b.params.jaxpr)),
    plan=plan_memory,
    layouts=infer_layouts,
    rules=lower_operations,
    host=lambda b: b.replace(module=passes.lower_host_work(b.module, b.name)),
    cse=lambda b: b.replace(module=passes.share_subexpressions(b.module)),
    barriers=drop_repeated_barriers,
)
