# SPDX-License-Identifier: Apache-2.0
"""wgmma: accumulators as register state, calls, waits and reads."""

from __future__ import annotations

from typing import Any

import jax

from pallas_gpu import arch
from pallas_gpu.emitters import elementwise
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.tensor_cores import wgmma
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.registers.placement import place_registers
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.inference.network import Variable
from pallas_gpu.lowering.references import Reference
from pallas_gpu.lowering.rules import emits, emits_and_relates
from pallas_gpu.primitives.tensor_cores import wgmma as primitives

# --- accumulators ---------------------------------------------------------------------


def new_accumulator(ctx: RuleContext, i: int, aval: Any) -> vals.AccumulatorHandle:
    """Adds an accumulator of zeros to the register state."""
    dtype, shape = vals.numpy_dtype(aval), tuple(aval.shape)
    zero = elementwise.scalar(0, dtype)
    zeros = _as_accumulator(zero, shape)
    handle = vals.AccumulatorHandle((ctx.eqn, i), shape, dtype, zeros)
    ctx.kernel.state[handle.key] = zeros
    return handle


def _as_accumulator(value: Any, shape: tuple[int, ...]) -> regs.RegisterArray:
    """Returns a value as the register state of an accumulator."""
    placement = place_registers(Layout.WGMMA, shape)
    if isinstance(value, regs.Deferred):
        value = vals.as_shape(value, shape).materialize(placement)
    grouped = regs.regroup(value, placement)
    assert isinstance(grouped, regs.RegisterArray)
    return grouped


@emits_and_relates(primitives.accumulator_load_p)
def _accumulator_load(on: RuleContext | Node, acc: Any, *, wait_n: int | None) -> Any:
    return read_accumulator(on, acc, wait_n)


def read_accumulator(on: RuleContext | Node, ref: Any, wait_n: int | None) -> Any:
    """Returns the values of an accumulator or of a part of its columns."""
    if isinstance(on, Node):
        aval = jax.ShapeDtypeStruct(ref.window.shape, ref.buffer.dtype)
        return on.make(accumulator(on, aval), aval)
    if wait_n is not None:
        wgmma.wait(wait_n)
    kernel, handle = on.kernel, ref.handle
    fenced = wgmma.fence_accumulator(kernel.state[handle.key])
    kernel.state[handle.key] = kernel.settled[handle.key] = fenced
    # The check pass refuses dynamic parts and transposes.
    if ref.window.sizes == handle.ref_shape:
        return fenced
    return wgmma.accumulator_slice(fenced, ref.window.starts, ref.window.sizes)


def write_accumulator(
    ctx: RuleContext, handle: vals.AccumulatorHandle, value: Any
) -> None:
    """Stores to a whole accumulator; the check pass refuses a part."""
    kernel = ctx.kernel
    # What nothing has been multiplied into yet, or since it was read, no product under
    # way writes. Loops and branches make new values of it.
    value_now = kernel.state[handle.key]
    if value_now is not handle.zeros and value_now is not kernel.settled.get(
        handle.key
    ):
        wgmma.wait(0)
    value = ctx.operand(value, "stored")
    stored = _as_accumulator(value, handle.ref_shape)
    kernel.state[handle.key] = kernel.settled[handle.key] = stored


def accumulator(node: Node, aval: Any) -> Variable:
    """Adds a variable for an accumulator."""
    fixed = place_registers(Layout.WGMMA, tuple(aval.shape))
    return node.variable(aval, "accumulator", fixed=fixed)


# --- products -------------------------------------------------------------------------


@emits_and_relates(primitives.wgmma_p)
def _wgmma(on: RuleContext | Node, acc: Any, a: Any, b: Any) -> None:
    """Adds a product to an accumulator or to a part of its columns."""
    if isinstance(on, Node):
        on.network.uses_wgmma = True
        accumulator(on, jax.ShapeDtypeStruct(acc.window.shape, acc.buffer.dtype))
        if isinstance(a, Symbol):
            left = place_registers(wgmma.left_layout(a.bits), a.shape)
            on.take(a, on.variable(a, "left operand", fixed=left), "a")
        else:
            on.use(on.part(a), "a")
        on.use(on.part(b), "b")
        return
    if isinstance(a, Reference):
        a = on.view(a)
    else:
        a = on.operand(a, "a")
        if isinstance(a, regs.Deferred):
            a = a.materialize(wgmma.left_layout(dtypes.bits(a.dtype)))
    b = on.view(b)
    handle: vals.AccumulatorHandle = acc.handle
    whole = on.kernel.state[handle.key]
    starts, sizes = acc.window.starts, acc.window.sizes
    if sizes == handle.ref_shape:
        result = wgmma.mma(whole, a, b)
    else:
        part = wgmma.mma(wgmma.accumulator_slice(whole, starts, sizes), a, b)
        result = wgmma.accumulator_update(whole, starts, part)
    on.kernel.state[handle.key] = result


@emits(primitives.wgmma_wait_p)
def _wgmma_wait(ctx: RuleContext, *, n: int) -> None:
    if ctx.kernel.target.has(arch.Feature.WGMMA):
        wgmma.wait(n)


# --- optimization barriers ------------------------------------------------------------


@emits_and_relates("optimization_barrier")
def _optimization_barrier(on: RuleContext | Node, *values: Any) -> list[Any]:
    if isinstance(on, Node):
        return [_kept(on, i, x) if x.shape else x for i, x in enumerate(values)]
    alike = [on.operand(x, i) for i, x in enumerate(values)]
    return list(wgmma.optimization_barrier(alike))


def _kept(node: Node, i: int, x: Symbol) -> Symbol:
    variable = node.variable(x, f"operand {i}")
    node.take(x, variable, i)
    return node.make(variable, x, i)
