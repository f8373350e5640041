# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and updates of references, loads with a layout, layout casts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.layouts import Layout, WGSplatLayout, to_layout
from pallas_gpu.layouts.registers.linear import THREADS
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext, unflatten_transforms
from pallas_gpu.lowering.expansion.memory import view
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families import elementwise as vectors
from pallas_gpu.lowering.families import wgmma
from pallas_gpu.lowering.families.shapes import as_vector, element, splat_source
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.constraints import array_of
from pallas_gpu.lowering.inference.network import Network, Use, Variable
from pallas_gpu.lowering.memory import memory_view
from pallas_gpu.lowering.rules import (
    Decorator,
    expands,
    infers,
    lane,
    uniform,
    warpgroup,
)
from pallas_gpu.lowering.warpgroup import memory
from pallas_gpu.mosaic import dialect, elementwise, gmem, mbarrier, relayout, smem
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic import wgmma as mosaic_wgmma
from pallas_gpu.mosaic.elements import convert, dtypes, table
from pallas_gpu.primitives.registers import layout_cast_p, load_p, set_max_registers_p

# Rows and columns of the smallest tile that the tensor core's layouts cover.
_WGMMA_ROWS, _WGMMA_COLUMNS = 64, 8

# --- reads ----------------------------------------------------------------------------


def read_array(
    ctx: RuleContext, handle: Any, transforms: Any, layout: Any, optimized: bool
):
    """Loads a part of a reference."""
    view = memory_view(ctx, handle, transforms)
    module = smem if isinstance(handle, vals.SmemHandle) else gmem
    if tuple(view.shape) == ():
        return elementwise.scalar(module.load_scalar(view), handle.dtype)
    placement = (
        default_layout(handle, view)
        if layout is None
        else regs.place(layout, tuple(view.shape))
    )
    if module is gmem:
        return gmem.load(view, placement)
    optimized = optimized and deals_evenly(view)
    return smem.load(view, placement, optimized=optimized)


def default_layout(handle: Any, view: Any) -> Any:
    """Returns the layout of a load that asks for none.

    An array tiled for the tensor core gives WGMMA, every other a strided layout.
    """
    shape = tuple(view.shape)
    tiled = isinstance(handle, vals.SmemHandle) and handle.layout.tiling is not None
    if tiled and len(shape) == 2 and _covered_by_wgmma(*shape):
        return regs.place(Layout.WGMMA, shape)
    return regs.default_placement(shape, handle.dtype)


def _covered_by_wgmma(rows: int, columns: int) -> bool:
    return rows % _WGMMA_ROWS == 0 and columns % _WGMMA_COLUMNS == 0


def deals_evenly(view: Any) -> bool:
    """False for odd shapes, whose default layouts may meet bank conflicts."""
    return math.prod(view.shape) % types.mesh.WARPGROUP_THREADS == 0


def read_vector(
    handle: vals.MemrefHandle, transforms: Any, optimized: bool = True
) -> Any:
    """Loads a part of a reference."""
    source = memory.part(handle, transforms)
    stored = dtypes.memory_dtype(handle.dtype)
    if not source.type.shape:
        value = dtypes.bitcast(memref.load(source, []), stored)
        single = convert.convert_value(value, stored, handle.dtype)
        return regs.Splat(single, handle.dtype, ())
    loaded = dialect.ops.vector_load(source, optimized=optimized)
    return vectors.convert(vals.Vector(loaded, stored), handle.dtype)


@lane(load_p)
def _load_lane(ctx: RuleContext, *invals: Any) -> Any:
    src = ctx.operands(invals)["src"]
    params = ctx.eqn.params
    return read_array(
        ctx, src.ref, src.transforms, params["layout"], params["optimized"]
    )


@warpgroup(load_p)
def _load_warpgroup(ctx: RuleContext, *invals: Any) -> Any:
    src = ctx.operands(invals)["src"]
    params = ctx.eqn.params
    loaded = read_vector(src.ref, src.transforms, params["optimized"])
    return _cast_vector(loaded, params["layout"])


@infers("mosaic_gpu.vector_load")
def _infer_load(network: Network, op: ir.Operation, key: int) -> None:
    use = _access(network, op, 0)
    variable = network.variable(op, op.results[0].type, key, access=use)
    _note_access(variable, use)
    network.produce(op.results[0], variable)


@expands("mosaic_gpu.vector_load")
def _expand_load(expansion: Expansion, op: Any) -> None:
    source = view(expansion, op.operands[0])
    placement = expansion.assignment.result(op.result)
    if placement is None:
        placement = regs.default_placement(tuple(source.shape), source.dtype)
    if isinstance(source, gmem.GmemView):
        array = gmem.load(source, placement)
    else:
        optimized = _is_optimized(op) and deals_evenly(source)
        array = smem.load(source, placement, optimized=optimized)
    expansion.set(op.result, array)
    expansion.dead.append(op.operation)


def _is_optimized(op: Any) -> bool:
    if "optimized" not in op.attributes:
        return True
    return ir.BoolAttr(op.attributes["optimized"]).value


# --- writes ---------------------------------------------------------------------------


def write_array(ctx: RuleContext, handle: Any, transforms: Any, value: Any) -> None:
    """Stores into a part of a reference, in order with the warpgroup's accesses."""
    view = memory_view(ctx, handle, transforms)
    automatic = not ctx.kernel.params.compiler_params.unsafe_no_auto_barriers
    module = smem if isinstance(handle, vals.SmemHandle) else gmem
    if automatic:
        # Another warp may still read what this store overwrites.
        mbarrier.meet()
    if tuple(view.shape) == ():
        module.store_scalar(view, vals.scalar_value(value))
    else:
        if isinstance(value, regs.Deferred):
            value = value.materialize(default_layout(handle, view))
        if module is gmem:
            gmem.store(view, value)
        else:
            smem.store(view, value, optimized=deals_evenly(view))
    if automatic:
        mbarrier.meet()


def write_vector(ctx: RuleContext, handle: Any, transforms: Any, value: Any) -> None:
    """Stores into a part of a reference, in order with the warpgroup's accesses."""
    target = memory.part(handle, transforms)
    automatic = not ctx.kernel.params.compiler_params.unsafe_no_auto_barriers
    stored = dtypes.memory_dtype(handle.dtype)
    if automatic:
        # Another warp may still read what this store overwrites.
        mbarrier.meet()
    if not target.type.shape:
        single = convert.convert_value(vals.scalar_value(value), handle.dtype, stored)
        ctx.mark_scope(memref.store(element(single, stored), target, []))
    else:
        vector = as_vector(value, tuple(target.type.shape))
        dialect.ops.vector_store(vectors.convert(vector, stored).value, target)
    if automatic:
        mbarrier.meet()


@infers("mosaic_gpu.vector_store")
def _infer_store(network: Network, op: ir.Operation, key: int) -> None:
    use = _access(network, op, 1)
    variable = network.variable(op, op.operands[0].type, key, access=use)
    _note_access(variable, use)
    network.consume(op, 0, variable)


@expands("mosaic_gpu.vector_store")
def _expand_store(expansion: Expansion, op: Any) -> None:
    target = view(expansion, op.operands[1])
    array = expansion.placed(op, 0)
    array = regs.with_sign(array, target.dtype)
    if isinstance(target, gmem.GmemView):
        gmem.store(target, array)
    else:
        # The author chooses no layout for a store and cannot accept bank conflicts: it
        # has them where no layout is free of them, for inference makes them dear.
        smem.store(target, array, optimized=False)
    expansion.dead.append(op.operation)


def _access(network: Network, op: ir.Operation, i: int) -> Use:
    part = array_of(network, op, i)
    optimized = math.prod(part.window.sizes) % THREADS == 0
    if "optimized" in op.attributes:
        optimized &= ir.BoolAttr(op.attributes["optimized"]).value
    use = Use(op, "store" if i else "load", part, network.weight, optimized)
    network.use_memory(use)
    return use


def _note_access(variable: Variable, use: Use) -> None:
    cell = variable.source
    in_smem = use.part.space is types.SMEM
    cell.loads.add(use.part.bits)
    cell.in_smem |= in_smem
    cell.in_gmem |= not in_smem
    cell.transposed |= use.part.window.is_transposed


@infers("memref.load", "memref.store")
def _infer_element(network: Network, op: ir.Operation, key: int) -> None:
    i = 0 if op.name == "memref.load" else 1
    part = network.part(op.operands[i])
    if part is not None:
        use = Use(op, "store" if i else "load", part, network.weight)
        network.use_memory(use)


@expands("memref.load")
def _expand_load_element(expansion: Expansion, op: Any) -> None:
    source = view(expansion, op.operands[0])
    module = smem if isinstance(source, smem.SmemView) else gmem
    op.result.replace_all_uses_with(module.load_scalar(source))
    expansion.dead.append(op.operation)


@expands("memref.store")
def _expand_store_element(expansion: Expansion, op: Any) -> None:
    value, ref = op.operands[0], op.operands[1]
    target = view(expansion, ref)
    module = smem if isinstance(target, smem.SmemView) else gmem
    module.store_scalar(target, dtypes.bitcast(value, target.dtype))
    expansion.dead.append(op.operation)


# --- JAX's reads and writes of references ---------------------------------------------


def _enter_rules(
    semantics: Callable[[Any], Decorator],
    *,
    read: Callable[[RuleContext, Any, Any, Any], Any],
    write: Callable[[RuleContext, Any, Any, Any], None],
    read_accumulator: Callable[[RuleContext, Any, Any, int | None], Any],
    write_accumulator: Callable[[RuleContext, Any, Any], None],
    add: Callable[[Any, Any], Any],
) -> None:
    """Enters the rules of get, swap and addupdate.

    Args:
      semantics: `lane` or `warpgroup`.
      read: `(ctx, handle, transforms, like) -> array`; `like` is a value that the
        array will meet, or None.
      write: `(ctx, handle, transforms, value)`.
      read_accumulator, write_accumulator: the same for accumulators.
      add: adds two values of one type.
    """

    def load(ctx: RuleContext, handle: Any, transforms: Any, like: Any) -> Any:
        if isinstance(handle, vals.AccumulatorHandle):
            return read_accumulator(ctx, handle, transforms, 0)
        return read(ctx, handle, transforms, like)

    def store(ctx: RuleContext, handle: Any, transforms: Any, value: Any) -> None:
        if isinstance(handle, vals.AccumulatorHandle):
            write_accumulator(ctx, handle, value)
        else:
            write(ctx, handle, transforms, value)

    @semantics(_jax.get_p)
    def _get(ctx: RuleContext, handle: Any, *leaves: Any) -> Any:
        transforms = unflatten_transforms(ctx.eqn.params["tree"], leaves)
        return load(ctx, handle, transforms, None)

    @semantics(_jax.swap_p)
    def _swap(ctx: RuleContext, handle: Any, value: Any, *leaves: Any) -> Any:
        transforms = unflatten_transforms(ctx.eqn.params["tree"], leaves)
        old = load(ctx, handle, transforms, value) if ctx.result_is_read else None
        store(ctx, handle, transforms, value)
        return old

    @semantics(_jax.addupdate_p)
    def _addupdate(ctx: RuleContext, handle: Any, value: Any, *leaves: Any) -> list:
        transforms = unflatten_transforms(ctx.eqn.params["tree"], leaves)
        old = load(ctx, handle, transforms, value)
        store(ctx, handle, transforms, add(old, value))
        return []


def _read_like(ctx: RuleContext, handle: Any, transforms: Any, like: Any) -> Any:
    return read_array(ctx, handle, transforms, getattr(like, "layout", None), True)


def _add_vectors(old: Any, value: Any) -> Any:
    if vals.is_scalar(old):
        total = table.emit("add", old.dtype, old.value, vals.scalar_value(value))
        return regs.Splat(total, old.dtype, ())
    return vectors.emit("add", [old, value], old.dtype, old.shape)


_enter_rules(
    lane,
    read=_read_like,
    write=write_array,
    read_accumulator=wgmma.read_lane_accumulator,
    write_accumulator=wgmma.write_lane_accumulator,
    add=functools.partial(elementwise.apply, "add"),
)
_enter_rules(
    warpgroup,
    read=lambda ctx, handle, transforms, like: read_vector(handle, transforms),
    write=write_vector,
    read_accumulator=wgmma.read_warpgroup_accumulator,
    write_accumulator=wgmma.write_warpgroup_accumulator,
    add=_add_vectors,
)


# --- layout casts ---------------------------------------------------------------------


@lane(layout_cast_p)
def _layout_cast_lane(ctx: RuleContext, x: Any) -> Any:
    if vals.is_scalar(x):
        return x
    layout = regs.place(ctx.eqn.params["layout"], x.shape)
    room = None
    if isinstance(x, regs.RegisterArray) and not isinstance(layout, WGSplatLayout):
        room = scratch.for_relayout(ctx.kernel, x, layout)
    return relayout.layout_cast(x, layout, room)


@warpgroup(layout_cast_p)
def _layout_cast_warpgroup(ctx: RuleContext, x: Any) -> Any:
    return _cast_vector(x, ctx.eqn.params["layout"])


def _cast_vector(x: Any, layout: Any) -> Any:
    if layout is None or vals.is_scalar(x):
        return x
    description = to_layout(layout)
    if isinstance(description, WGSplatLayout):
        if splat_source(x) is not None:
            return x
        raise errors.LayoutError(
            "Only a splat has a splat layout",
            expected="a layout with a place for each element",
            got=f"WG_SPLAT for shape {x.shape}",
            hint="cast to another layout",
        )
    attribute = dialect.to_attribute(description)
    return vals.Vector(dialect.ops.layout_cast(x.value, attribute), x.dtype)


@infers("mosaic_gpu.layout_cast")
def _infer_layout_cast(network: Network, op: ir.Operation, key: int) -> None:
    operand, result = op.operands[0], op.results[0]
    shape, _ = network.vector_type(result.type)
    layout = dialect.from_attribute(op.attributes["new_layout"])
    if isinstance(layout, WGSplatLayout) and network.deferred.get(operand) == "splat":
        network.defer(result, "splat")
        return
    try:
        placement = regs.place(layout, shape)
    except errors.LayoutError as error:
        raise errors.LayoutError(
            f"layout_cast: an array of shape {shape} has no such layout",
            expected=error.expected,
            got=error.got,
            hint=f"{error.what}: cast to a layout that fits the shape, or leave the "
            "layout_cast out",
            where=sources.where(op),
        ) from None
    if isinstance(placement, WGSplatLayout):
        made_by = operand.owner
        maker = sources.named(made_by.operation) if _is_op(made_by) else "a loop"
        raise errors.LayoutError(
            "layout_cast to WG_SPLAT: the elements of the array may differ",
            expected="a splat: a scalar broadcast to a shape",
            got=f"an array of shape {shape} from {maker}",
            hint="leave the layout_cast out: splats take every layout by themselves",
            where=sources.where(op),
        )
    variable = network.variable(op, result.type, key, fixed=placement)
    network.consume(op, 0, variable)
    network.produce(result, variable)


def _is_op(owner: object) -> bool:
    return not isinstance(owner, ir.Block)


@expands("mosaic_gpu.layout_cast")
def _expand_layout_cast(expansion: Expansion, op: Any) -> None:
    expansion.set(op.result, expansion.operand(op, 0))
    expansion.dead.append(op.operation)


# --- numbers of registers -------------------------------------------------------------


@uniform(set_max_registers_p)
def _set_max_registers(ctx: RuleContext) -> list[Any]:
    ctx.kernel.target.require(arch.Feature.SETMAXNREG, "set_max_registers")
    params = ctx.eqn.params
    mosaic_wgmma.set_max_registers(params["n"], params["action"])
    return []
