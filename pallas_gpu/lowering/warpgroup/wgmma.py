# SPDX-License-Identifier: Apache-2.0
"""wgmma on whole arrays: accumulators as register state, calls and reads."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.dialects import vector

from pallas_gpu import arch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import warpgroup
from pallas_gpu.lowering.warpgroup import memory
from pallas_gpu.lowering.warpgroup.shapes import as_vector, splat, static_slice
from pallas_gpu.lowering.wgmma import columns
from pallas_gpu.mosaic import dialect, wgmma
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.primitives import wgmma as primitives


def new_accumulator(ctx: RuleContext, i: int, aval: Any) -> vals.AccumulatorHandle:
    """Enters an accumulator of zeros into the register state."""
    ctx.kernel.target.require(arch.Feature.WGMMA, "an accumulator (ACC)")
    dtype, shape = vals.numpy_dtype(aval), tuple(aval.shape)
    handle = vals.AccumulatorHandle((id(ctx.eqn), i), shape, dtype)
    ctx.kernel.state[handle.key] = splat(vals.constant(0, dtype), shape)
    return handle


def read_accumulator(
    ctx: RuleContext,
    handle: vals.AccumulatorHandle,
    transforms: Any,
    wait_n: int | None,
) -> Any:
    """Returns the values of an accumulator or of a part of its columns."""
    if wait_n is not None:
        wgmma.wait(wait_n)
    whole = ctx.kernel.state[handle.key]
    # The values pass a barrier behind the wait: nothing that uses them can be scheduled
    # before it.
    settled = vals.Vector(dialect.ops.optimization_barrier([whole.value]), whole.dtype)
    ctx.kernel.state[handle.key] = settled
    starts, sizes = columns(handle, transforms)
    if sizes == handle.ref_shape:
        return settled
    return static_slice(settled, starts, sizes)


def write_accumulator(
    ctx: RuleContext, handle: vals.AccumulatorHandle, value: Any
) -> None:
    """Stores into a whole accumulator; the check pass refuses a part."""
    wgmma.wait(0)
    ctx.kernel.state[handle.key] = as_vector(value, handle.ref_shape)


@warpgroup(primitives.wgmma_p)
def _wgmma(ctx: RuleContext, *invals: Any) -> list[Any]:
    ctx.kernel.target.require(arch.Feature.WGMMA, "wgmma")
    operands = ctx.operands(invals)
    acc, a, b = operands["acc"], operands["a"], operands["b"]
    if hasattr(a, "ref"):
        left = memory.part(a.ref, a.transforms)
    else:
        left = a.value
    right = memory.part(b.ref, b.transforms)
    handle: vals.AccumulatorHandle = acc.ref
    state = ctx.kernel.state
    starts, sizes = columns(handle, acc.transforms)
    whole = state[handle.key]
    if sizes == handle.ref_shape:
        product = dialect.ops.wgmma(whole.value, left, right)
        state[handle.key] = vals.Vector(product, whole.dtype)
        return []
    part = static_slice(whole, starts, sizes)
    product = dialect.ops.wgmma(part.value, left, right)
    ones = [1] * len(sizes)
    updated = vector.insert_strided_slice(product, whole.value, list(starts), ones)
    state[handle.key] = vals.Vector(updated, whole.dtype)
    return []


@warpgroup(primitives.accumulator_load_p)
def _accumulator_load(ctx: RuleContext, *invals: Any) -> Any:
    acc = ctx.operands(invals)["acc"]
    return read_accumulator(ctx, acc.ref, acc.transforms, ctx.eqn.params["wait_n"])


@warpgroup("optimization_barrier")
def _optimization_barrier(ctx: RuleContext, *values: Any) -> list[Any]:
    if not values:
        return []
    results = dialect.ops.OptimizationBarrierOp([x.value for x in values]).results
    return [
        regs.Splat(r, x.dtype, ()) if vals.is_scalar(x) else vals.Vector(r, x.dtype)
        for r, x in zip(results, values, strict=True)
    ]
