# SPDX-License-Identifier: Apache-2.0
"""wgmma: accumulators as register state, calls, waits and reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import arch, errors, types
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.memory import smem_view
from pallas_gpu.lowering.expansion.walk import Expansion, is_array
from pallas_gpu.lowering.families.shapes import integers
from pallas_gpu.lowering.families.tensor_cores import signs
from pallas_gpu.lowering.inference import relations, sources
from pallas_gpu.lowering.inference.constraints import array_of, is_vector
from pallas_gpu.lowering.inference.network import Key, Network, Use
from pallas_gpu.lowering.rules import expands, infers, lane, uniform, warpgroup
from pallas_gpu.mosaic import dialect, logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.tensor_cores import wgmma
from pallas_gpu.primitives.tensor_cores import wgmma as primitives

# --- accumulators ---------------------------------------------------------------------


def new_accumulator(ctx: RuleContext, i: int, aval: Any) -> vals.AccumulatorHandle:
    """Adds an accumulator of zeros to the register state."""
    dtype, shape = vals.numpy_dtype(aval), tuple(aval.shape)
    zero = vals.constant(0, dtype)
    zeros = ctx.kernel.semantics.accumulator(zero, shape)
    handle = vals.AccumulatorHandle((ctx.eqn, i), shape, dtype, zeros)
    ctx.kernel.state[handle.key] = zeros
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
    kernel = ctx.kernel
    fenced = kernel.semantics.fenced(kernel.state[handle.key])
    kernel.state[handle.key] = kernel.settled[handle.key] = fenced
    starts, sizes = columns(handle, transforms)
    if sizes == handle.ref_shape:
        return fenced
    return kernel.semantics.columns(fenced, starts, sizes)


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
    stored = kernel.semantics.accumulator(value, handle.ref_shape)
    kernel.state[handle.key] = kernel.settled[handle.key] = stored


def columns(
    handle: vals.AccumulatorHandle, transforms: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns starts and sizes of a part of an accumulator."""
    # The check pass refuses dynamic parts and transposes.
    window = types.resolve(handle.ref_shape, transforms)
    return window.starts, window.sizes


@uniform(primitives.accumulator_load_p)
def _accumulator_load(ctx: RuleContext, *invals: Any) -> Any:
    acc = ctx.operands(invals)["acc"]
    return read_accumulator(ctx, acc.ref, acc.transforms, ctx.eqn.params["wait_n"])


@infers("vector.insert_strided_slice")
def _infer_update(network: Network, op: ir.Operation, key: Key) -> None:
    """A part replaces registers of the whole, whose layout is unchanged."""
    sizes, _ = network.vector_type(op.operands[0].type)
    shape, _ = network.vector_type(op.operands[1].type)
    starts = integers(op.attributes["offsets"])
    part = network.results.get(op.operands[0])
    variable = network.variable(
        op,
        op.operands[1].type,
        key,
        result=sizes,
        relation=relations.Slice(shape, starts, sizes),
        in_flight=part is not None and part.variable.in_flight,
    )
    network.consume(op, 0, variable, "target")
    network.consume(op, 1, variable)
    network.produce(op.results[0], variable, "source")


@expands("vector.insert_strided_slice")
def _expand_update(expansion: Expansion, op: Any) -> None:
    starts = integers(op.attributes["offsets"])
    part, whole = expansion.placed(op, 0), expansion.placed(op, 1)
    expansion.set(op.result, wgmma.accumulator_update(whole, starts, part))
    expansion.dead.append(op.operation)


# --- products -------------------------------------------------------------------------


@lane(primitives.wgmma_p)
def _wgmma_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    def in_registers(a: Any) -> Any:
        if not isinstance(a, regs.Deferred):
            return a
        return a.materialize(wgmma.left_layout(dtypes.bits(a.dtype)))

    return _accumulate(ctx, invals, in_registers, wgmma.mma)


@warpgroup(primitives.wgmma_p)
def _wgmma_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)
    kinds = {
        i: operand.ref.dtype if hasattr(operand, "ref") else operand.dtype
        for i, operand in ((1, operands["a"]), (2, operands["b"]))
    }

    def multiply(acc: Any, a: Any, b: Any) -> Any:
        result = dialect.ops.wgmma(acc.value, a, b)
        signs.mark(result.owner, kinds)
        return vals.Vector(result, acc.dtype)

    return _accumulate(ctx, invals, operator.attrgetter("value"), multiply)


def _accumulate(
    ctx: RuleContext,
    invals: Sequence[Any],
    in_registers: Callable[[Any], Any],
    multiply: Callable[[Any, Any, Any], Any],
) -> list[Any]:
    """Adds a product to an accumulator or to a part of its columns.

    Args:
      in_registers: converts a left operand in registers to the form for `multiply`.
      multiply: `(accumulator, a, b) -> accumulator`.
    """
    operands, semantics = ctx.operands(invals), ctx.kernel.semantics
    acc, a, b = operands["acc"], operands["a"], operands["b"]
    if hasattr(a, "ref"):
        a = ctx.part(a)
    else:
        a = in_registers(a)
    b = ctx.part(b)
    handle: vals.AccumulatorHandle = acc.ref
    state = ctx.kernel.state
    whole = state[handle.key]
    starts, sizes = columns(handle, acc.transforms)
    if sizes == handle.ref_shape:
        state[handle.key] = multiply(whole, a, b)
        return []
    product = multiply(semantics.columns(whole, starts, sizes), a, b)
    state[handle.key] = semantics.with_columns(whole, starts, product)
    return []


@infers("mosaic_gpu.wgmma")
def _infer_wgmma(network: Network, op: ir.Operation, key: Key) -> None:
    network.uses_wgmma = True
    layout = _operand_layout(network, op, 0, Layout.WGMMA)
    accumulator = network.variable(
        op,
        op.operands[0].type,
        key,
        role="accumulator",
        fixed=layout,
        in_flight=True,
    )
    network.consume(op, 0, accumulator)
    network.produce(op.results[0], accumulator)
    if is_vector(op.operands[1]):
        _, bits = network.vector_type(op.operands[1].type)
        left = _operand_layout(network, op, 1, wgmma.left_layout(bits))
        variable = network.variable(
            op, op.operands[1].type, key, role="left operand", fixed=left
        )
        network.consume(op, 1, variable)
    else:
        view = array_of(network, op, 1)
        network.use_memory(Use(op, "a", view, network.weight))
    view = array_of(network, op, 2)
    network.use_memory(Use(op, "b", view, network.weight))


def _operand_layout(network: Network, op: ir.Operation, i: int, layout: Layout):
    """Returns the only layout that wgmma supports for an operand."""
    shape, _ = network.vector_type(op.operands[i].type)
    try:
        return place(layout, shape)
    except errors.LayoutError as error:
        what = "accumulator" if i == 0 else "left operand"
        raise errors.LayoutError(
            f"wgmma: the {what} does not fit Layout.{layout.name}",
            expected=error.expected,
            got=f"shape {shape}",
            hint="pad the array to whole tiles",
            where=sources.where(op),
        ) from None


@expands("mosaic_gpu.wgmma")
def _expand_wgmma(expansion: Expansion, op: Any) -> None:
    acc = expansion.placed(op, 0)
    left: Any = op.operands[1]
    left = expansion.placed(op, 1) if is_array(left) else smem_view(expansion, left)
    left = signs.restored(op, 1, left)
    right = signs.restored(op, 2, smem_view(expansion, op.operands[2]))
    expansion.set(op.result, wgmma.mma(acc, left, right))
    expansion.dead.append(op.operation)


@uniform(primitives.wgmma_wait_p)
def _wgmma_wait(ctx: RuleContext) -> list[Any]:
    if ctx.kernel.target.has(arch.Feature.WGMMA):
        wgmma.wait(ctx.eqn.params["n"])
    return []


# --- optimization barriers ------------------------------------------------------------


@lane("optimization_barrier")
def _optimization_barrier_lane(ctx: RuleContext, *values: Any) -> list[Any]:
    return list(wgmma.optimization_barrier(values))


@warpgroup("optimization_barrier")
def _optimization_barrier_warpgroup(ctx: RuleContext, *values: Any) -> list[Any]:
    if not values:
        return []
    results = dialect.ops.OptimizationBarrierOp([x.value for x in values]).results
    return [
        regs.Splat(r, x.dtype, ()) if vals.is_scalar(x) else vals.Vector(r, x.dtype)
        for r, x in zip(results, values, strict=True)
    ]


@infers("mosaic_gpu.optimization_barrier")
def _infer_barrier(network: Network, op: ir.Operation, key: Key) -> None:
    for i, result in enumerate(op.results):
        if is_vector(result):
            variable = network.variable(op, result.type, key, role=f"operand {i}")
            # The barrier orders the accumulator itself: no relayout may precede it.
            network.consume(op, i, variable, rigid=True)
            network.produce(result, variable)


@expands("mosaic_gpu.optimization_barrier")
def _expand_barrier(expansion: Expansion, op: Any) -> None:
    operands = [
        expansion.operand(op, i)
        if is_array(x)
        else regs.splat(x, logical.dtype_of(x.type))
        for i, x in enumerate(op.operands)
    ]
    held = wgmma.optimization_barrier(operands)
    for result, array in zip(op.results, held, strict=True):
        if is_array(result):
            expansion.set(result, array)
        else:
            result.replace_all_uses_with(array.value)  # type: ignore[union-attr]
    expansion.dead.append(op.operation)
