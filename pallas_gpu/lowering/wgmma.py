# SPDX-License-Identifier: Apache-2.0
"""wgmma: accumulators as register state, calls, waits and reads."""

from __future__ import annotations

from typing import Any

from pallas_gpu import arch, types
from pallas_gpu.layouts import Layout
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.memory import memory_view
from pallas_gpu.lowering.rules import lane, uniform
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic import wgmma
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.primitives import wgmma as primitives
from pallas_gpu.primitives.registers import set_max_registers_p


def new_accumulator(ctx: RuleContext, i: int, aval: Any) -> vals.AccumulatorHandle:
    """Enters an accumulator of zeros into the register state."""
    ctx.kernel.target.require(arch.Feature.WGMMA, "an accumulator (ACC)")
    dtype, shape = vals.numpy_dtype(aval), tuple(aval.shape)
    handle = vals.AccumulatorHandle((id(ctx.eqn), i), shape, dtype)
    zeros = vals.as_shape(vals.constant(0, dtype), shape)
    ctx.kernel.state[handle.key] = zeros.materialize(Layout.WGMMA)
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
    # The values pass an empty instruction behind the wait: nothing that uses them can
    # be scheduled before it.
    settled = wgmma.settle(ctx.kernel.state[handle.key])
    ctx.kernel.state[handle.key] = settled
    starts, sizes = columns(handle, transforms)
    if sizes == handle.ref_shape:
        return settled
    return wgmma.accumulator_slice(settled, starts, sizes)


def write_accumulator(
    ctx: RuleContext, handle: vals.AccumulatorHandle, value: Any
) -> None:
    """Stores into a whole accumulator; the check pass refuses a part."""
    wgmma.wait(0)
    placement = regs.place_registers(Layout.WGMMA, handle.ref_shape)
    if isinstance(value, regs.Deferred):
        value = value.materialize(placement)
    ctx.kernel.state[handle.key] = regs.regroup(value, placement)


def columns(
    handle: vals.AccumulatorHandle, transforms: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns starts and sizes of a part of an accumulator."""
    # The check pass refuses what is not static, and transposes.
    window = types.resolve(handle.ref_shape, transforms)
    return window.starts, window.sizes


@lane(primitives.wgmma_p)
def _wgmma(ctx: RuleContext, *invals: Any) -> list[Any]:
    ctx.kernel.target.require(arch.Feature.WGMMA, "wgmma")
    operands = ctx.operands(invals)
    acc, a, b = operands["acc"], operands["a"], operands["b"]
    if hasattr(a, "ref"):
        a = memory_view(ctx, a.ref, a.transforms)
    elif isinstance(a, regs.Deferred):
        bits = dtypes.bits(a.dtype)
        a = a.materialize(Layout.WGMMA if bits == 16 else Layout.WGMMA_8BIT)
    b = memory_view(ctx, b.ref, b.transforms)
    handle: vals.AccumulatorHandle = acc.ref
    state = ctx.kernel.state
    starts, sizes = columns(handle, acc.transforms)
    whole = state[handle.key]
    if sizes == handle.ref_shape:
        state[handle.key] = wgmma.mma(whole, a, b)
        return []
    part = wgmma.mma(wgmma.accumulator_slice(whole, starts, sizes), a, b)
    state[handle.key] = wgmma.accumulator_update(whole, starts, part)
    return []


@uniform(primitives.wgmma_wait_p)
def _wgmma_wait(ctx: RuleContext) -> list[Any]:
    wgmma.wait(ctx.eqn.params["n"])
    return []


@lane(primitives.accumulator_load_p)
def _accumulator_load(ctx: RuleContext, *invals: Any) -> Any:
    acc = ctx.operands(invals)["acc"]
    return read_accumulator(ctx, acc.ref, acc.transforms, ctx.eqn.params["wait_n"])


@uniform(set_max_registers_p)
def _set_max_registers(ctx: RuleContext) -> list[Any]:
    ctx.kernel.target.require(arch.Feature.SETMAXNREG, "set_max_registers")
    params = ctx.eqn.params
    wgmma.set_max_registers(params["n"], params["action"])
    return []


@lane("optimization_barrier")
def _optimization_barrier(ctx: RuleContext, *values: Any) -> list[Any]:
    return list(wgmma.optimization_barrier(values))
