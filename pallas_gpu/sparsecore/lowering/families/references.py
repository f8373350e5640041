# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of references, scopes, and gathers within VMEM."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

from pallas_gpu import _jax, errors, resources
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.sparsecore.emitters import conversions, memory
from pallas_gpu.sparsecore.emitters.values import Array, Handle, elements_of
from pallas_gpu.sparsecore.lowering.families.control import Border
from pallas_gpu.sparsecore.lowering.state import array_type, emits, masks
from pallas_gpu.sparsecore.primitives import gathers
from pallas_gpu.sparsecore.types import SEMAPHORES, VMEM_SHARED, SemaphoreType

_SEMAPHORES = {SemaphoreType.DMA: "dma_semaphore", SemaphoreType.REGULAR: "semaphore"}


def _elements(ctx: Any, part: memory.Part) -> int:
    """Returns the elements of a register, for an access to memory."""
    dtype = part.handle.dtype
    tiling = part.handle.tiling or ctx.kernel.params.compiler_params.tiling
    if dtype.itemsize < 4 and part.handle.space == "smem":
        raise errors.UnsupportedError(
            f"a scalar of {dtype.name} in SMEM",
            expected="elements of 32 bits",
            got=f"{dtype.name}{list(part.handle.shape)}",
            hint="declare SMEM of int32 or float32, and convert the array before the "
            "call",
        )
    if dtype.itemsize < 4 and tiling == "compact":
        raise errors.UnsupportedError(
            f"vectors of {dtype.name} in VMEM under the compact tiling",
            expected="elements of 32 bits, or tiling='sparsecore'",
            got=f"{dtype.name}{list(part.shape)}, whose neighbours in memory are "
            "elements of another row",
            hint="declare plsc.VMEM(shape, dtype, tiling='sparsecore'), or pass that "
            "to plsc.CompilerParams; or keep the array as int32 and use plsc.bitcast",
        )
    return conversions.register_elements(dtype, ctx.kernel.target.lanes)


# --- whole registers and scalars ------------------------------------------------------


@emits(_jax.get_p)
def _get(ctx: Any, ref: memory.Part) -> Array:
    return memory.load(ref, _elements(ctx, ref))


@emits(_jax.swap_p)
def _swap(ctx: Any, ref: memory.Part, value: Any) -> Array | None:
    elements = _elements(ctx, ref)
    before = memory.load(ref, elements) if ctx.is_read else None
    memory.store(ref, value, elements)
    return before


@emits(_jax.addupdate_p)
def _addupdate(ctx: Any, ref: memory.Part, value: Any) -> None:
    memory.store(ref, value, _elements(ctx, ref), add=True)


# --- positions of each lane -----------------------------------------------------------


def _whole(part: memory.Part) -> Handle:
    """Returns the array that the indices of lanes refer to: a slice is its own."""
    handle = part.handle
    view = memory.view(part)
    return dataclasses.replace(handle, memref=view, shape=part.shape)


@emits(gathers.load_gather_p)
def _load_gather(ctx: Any, ref: memory.Part, indices: Any, mask: Any) -> Array:
    handle = _whole(ref)
    count, elements = len(indices[0].parts), elements_of(indices[0].parts[0])
    parts = [
        memory.load_indexed(handle, row, mask=m)
        for *row, m in zip(
            *(i.parts for i in indices), masks(ctx, mask, count, elements), strict=True
        )
    ]
    return Array(indices[0].shape, handle.dtype, tuple(parts))


@emits(gathers.store_scatter_p)
def _store_scatter(
    ctx: Any, ref: memory.Part, indices: Any, value: Any, mask: Any, *, add: bool
) -> None:
    handle = _whole(ref)
    wide = masks(ctx, mask, len(value.parts), elements_of(value.parts[0]))
    for x, m, *row in zip(value.parts, wide, *(i.parts for i in indices), strict=True):
        memory.store_indexed(handle, row, x, mask=m, add=add)


@emits(gathers.load_expanded_p)
def _load_expanded(ctx: Any, ref: memory.Part, mask: Any) -> Array:
    (wide,) = masks(ctx, mask, 1, _elements(ctx, ref))
    return Array(mask.shape, ref.handle.dtype, (memory.load_expanded(ref, wide),))


@emits(gathers.store_compressed_p)
def _store_compressed(
    ctx: Any, ref: memory.Part, value: Any, mask: Any, *, add: bool
) -> None:
    (wide,) = masks(ctx, mask, 1, _elements(ctx, ref))
    memory.store_compressed(ref, value.value, wide, add=add)


# --- scopes ---------------------------------------------------------------------------


@emits(run_scoped_p)
def _run_scoped(ctx: Any, *captured: Any) -> list[Any]:
    border = Border.of_results(ctx)
    region = tpu.RegionOp(border.types)
    with ir.InsertionPoint(region.body):
        refs = [_declared(ctx, var) for var in resources.scope_refs(ctx.eqn)]
        results = ctx.run(0, [*captured, *refs])
        tpu.yield_(border.pack(results))
    return border.unpack(list(region.results))


def _declared(ctx: Any, var: Any) -> Handle:
    aval, kernel = var.aval, ctx.kernel
    space = aval.memory_space
    if space is VMEM_SHARED:
        return kernel.module.scratch[kernel.plan.shared.index(var)]
    if space is SEMAPHORES:
        return memory.semaphores(aval.shape, _SEMAPHORES[aval.type])
    if space.name not in ("VMEM", "SMEM"):
        raise errors.InternalError(f"{space.name} in a scope")
    return memory.allocate(array_type(aval, kernel.params))
