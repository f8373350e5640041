# SPDX-License-Identifier: Apache-2.0
"""From the kernel primitive's parameters to a module of Mosaic GPU MLIR."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import _jax, arch, resources, types, walk
from pallas_gpu.entry import check
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering import context as ctx_lib
from pallas_gpu.lowering import expansion, inference
from pallas_gpu.lowering import values as vals
from pallas_gpu.mosaic import mbarrier
from pallas_gpu.mosaic.module import KernelBuilder, LaunchSpec


@dataclasses.dataclass(frozen=True)
class LoweredKernel:
    """A module and what the planner knows of it."""

    name: str
    module: ir.Module
    plan: resources.Plan
    target: arch.Target
    threads: int


# Called with a stage's name, the kernel's name and a function that gives the text.
Observer = Callable[[str, str, Callable[[], str]], None]


def lower(
    params: CallParams, target: arch.Target, observe: Observer | None = None
) -> LoweredKernel:
    """Lowers one kernel; stages on the way are shown to the observer.

    Raises:
      OutOfResources: the kernel does not fit the target.
      UnsupportedError: an operation has no rule.
      TargetError: an operation needs a feature that the target does not have.
      LayoutError: register layouts do not fit.
    """
    options = params.compiler_params
    if os.environ.get("PALLAS_GPU_LINEINFO", "0") == "1" and not options.line_info:
        options = dataclasses.replace(options, line_info=True)
        params = dataclasses.replace(params, compiler_params=options)
    check.require_features(params.jaxpr, target)
    warpgroups = params.mesh.warpgroups
    plan = resources.plan(
        params.jaxpr,
        target,
        params.name,
        options.reduction_scratch_bytes,
        warpgroups,
    )
    spec = LaunchSpec(
        name=_symbol(params.name),
        grid=(ctx_lib.total_blocks(params), 1, 1),
        cluster=(math.prod(params.mesh.cluster), 1, 1),
        threads=types.mesh.WARPGROUP_THREADS * warpgroups,
        smem_bytes=plan.smem_bytes,
        num_buffers=len(params.jaxpr.invars),
        arch=target.compute_capability,
    )
    builder = KernelBuilder(spec)
    with builder:
        kernel = ctx_lib.KernelState(params, target, builder, plan, {})
        _prologue(kernel)
        ctx_lib.lower_jaxpr(kernel, params.jaxpr, _handles(kernel))
        builder.sync_before_exit()
        if "layouts" in kernel.semantics.stages:
            _give_layouts(kernel, observe)
        builder.set_smem_bytes(kernel.plan.smem_bytes)
    module = builder.finish()
    return LoweredKernel(params.name, module, kernel.plan, target, spec.threads)


def _give_layouts(kernel: ctx_lib.KernelState, observe: Observer | None) -> None:
    """Turns the warpgroup-level module into the code of a thread."""
    name = kernel.params.name
    kernel.builder.verify()
    if observe is not None:
        observe("warpgroup", name, lambda: str(kernel.builder.module))
    body = kernel.builder.body
    warpgroups = kernel.params.mesh.warpgroups
    assignment = inference.infer(
        body,
        scratch_bytes=[r // warpgroups for r in kernel.plan.scratch_rooms_bytes],
        cluster=kernel.params.mesh.cluster,
    )
    kernel.plan = kernel.plan.with_room(assignment.scratch_bytes * warpgroups)
    if observe is not None:
        observe("layouts", name, lambda: inference.annotate(body, assignment))
    expansion.expand(kernel, body, assignment)


def _symbol(name: str) -> str:
    cleaned = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return cleaned if cleaned and not cleaned[0].isdigit() else f"kernel_{cleaned}"


def _prologue(kernel: ctx_lib.KernelState) -> None:
    """Positions on the axes, and every barrier of the kernel, initialised once."""
    ctx_lib.emit_axes(kernel)
    zero = vals.constant(0, ctx_lib.I32)
    declarations = _barriers(kernel.params.jaxpr, kernel.plan)
    for slot, barrier in declarations.items():
        kernel.state[slot] = zero
        for i in range(barrier.size):
            offset = types.BARRIER_BYTES * (slot + i)
            pointer = kernel.builder.smem_pointer(
                kernel.plan.barrier_offset_bytes + offset
            )
            mbarrier.init(pointer, _arrivals(kernel.params.mesh, barrier))
    if declarations:
        kernel.builder.sync_after_init()


def _arrivals(mesh: types.Mesh, barrier: types.Barrier) -> int:
    """Returns the arrivals of a phase: a cluster barrier gets those of many CTAs."""
    if not isinstance(barrier, types.ClusterBarrier):
        return barrier.num_arrivals
    sizes = dict(zip(mesh.cluster_names, mesh.cluster, strict=True))
    return barrier.num_arrivals * math.prod(sizes[a] for a in barrier.collective_axes)


def _barriers(jaxpr: _jax.Jaxpr, plan: resources.Plan) -> dict[int, types.Barrier]:
    """Returns the barrier declarations of a kernel by their slots."""
    found: dict[int, types.Barrier] = {}
    for site in walk.walk(jaxpr):
        if site.eqn.primitive is ctx_lib.run_scoped_p:
            for i, var in enumerate(resources.scope_refs(site.eqn)):
                slot = plan.barrier_slots.get((site.place, i))
                if slot is not None:
                    found.setdefault(slot, var.aval.barrier)
    return found


def _handles(kernel: ctx_lib.KernelState) -> Sequence[Any]:
    params = kernel.params
    batch = [kernel.axes["batch", i] for i in range(len(params.batch))]
    handles = []
    for i, var in enumerate(params.jaxpr.invars):
        is_input = i < params.num_inputs
        levels = [
            (index, axis.size)
            for index, axis in zip(batch, params.batch, strict=True)
            if not is_input or axis.batched[i]
        ]
        shape = (*(size for _, size in levels), *var.aval.shape)
        lead = tuple(index for index, _ in levels)
        handles.append(vals.GmemHandle(i, shape, vals.numpy_dtype(var.aval), lead))
    return [kernel.semantics.gmem_handle(kernel, handle) for handle in handles]
