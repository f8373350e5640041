# SPDX-License-Identifier: Apache-2.0
"""Accesses with an index for each element: index arrays, strides, reshapes, masks.

Indices, mask and value have the layout of the result. The operation of the
warpgroup-level module has the memref first, then the other operands in a fixed order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.layouts import WGStridedLayout
from pallas_gpu.layouts.edges import Edges
from pallas_gpu.layouts.registers.placement import Placement, place_registers
from pallas_gpu.lowering import agreement
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import I32, RuleContext, i32
from pallas_gpu.lowering.expansion.memory import view
from pallas_gpu.lowering.expansion.walk import Expansion, is_array
from pallas_gpu.lowering.families import shapes
from pallas_gpu.lowering.inference import constraints
from pallas_gpu.lowering.inference.collect import Node, Symbol
from pallas_gpu.lowering.inference.constraints import array_of
from pallas_gpu.lowering.inference.network import Key, Network, Use, Variable
from pallas_gpu.lowering.rules import expands, infers, lane, relates, warpgroup
from pallas_gpu.mosaic import cluster, elementwise, indexed, logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.registers import default_placement, spread_layout
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives.indexed import load_indexed_p, store_indexed_p

# --- what an equation accesses --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Access:
    """The operands of an equation.

    Attributes:
      ref: reference and steps that select a window.
      indices, mask, extra: values; extra are the operands of one family, or None.
      shape: of the access; () for a single element.
      dtype: of the elements.
      view_shape, adjacent, mask_edges, rank: see `indexed.Elements`.
    """

    ref: Any
    indices: tuple[Any, ...]
    mask: Any
    extra: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    view_shape: tuple[int, ...] | None
    adjacent: tuple[int, int] | None
    mask_edges: Edges | None
    rank: ir.Value | None


def access(ctx: RuleContext, invals: Sequence[Any], ref: str, *extra: str) -> Access:
    """Returns the operands of an equation.

    Args:
      ref: name of the reference.
      extra: names of the family's operands.
    """
    params = ctx.eqn.params
    window = ctx.operands(invals)[ref]
    # Indices are values here, also constant ones, which are numbers in windows.
    operands = ops.unflatten(params["tree"], list(invals))
    return Access(
        window,
        tuple(operands["indices"]),
        operands["mask"],
        tuple(operands[name] for name in extra),
        tuple(params["shape"]),
        np.dtype(params["dtype"]),
        params["view_shape"],
        params["adjacent"],
        params.get("mask_edges"),
        _rank_of(ctx, params["cta_axes"], operands["cta"]),
    )


def _rank_of(
    ctx: RuleContext, axes: Sequence[str], positions: Sequence[Any] | None
) -> ir.Value | None:
    """Returns the rank of a CTA of the cluster; None for the executing CTA.

    Args:
      axes: cluster axes.
      positions: of the CTA on them; None for none.
    """
    if positions is None:
        return None
    mesh = ctx.kernel.params.mesh
    names = list(mesh.cluster_names)
    found = {
        names.index(axis): i32(position)
        for axis, position in zip(axes, positions, strict=True)
    }
    return cluster.rank_at(tuple(mesh.cluster), found)


# --- Lane -----------------------------------------------------------------------------


def lane_elements(ctx: RuleContext, found: Access) -> indexed.Elements:
    """Returns the elements of an access under Lane semantics."""
    return indexed.Elements(
        ctx.part(found.ref),
        found.view_shape,
        found.dtype,
        found.indices,
        found.mask,
        found.adjacent,
        found.mask_edges,
        found.rank,
    )


def lane_access(
    ctx: RuleContext,
    invals: Sequence[Any],
    ref: str,
    *extra: str,
    layout: Any = None,
    default: Placement | None = None,
) -> tuple[Access, Placement | None]:
    """Returns the operands of an equation in one layout, and that layout.

    Args:
      ref, extra: as of `access`.
      layout: the layout that the author has given, or None.
      default: the layout if nothing determines one; None for that of the shape.
    """
    found = access(ctx, invals, ref, *extra)
    if ctx.kernel.layouts is not None:
        return _assigned_access(ctx, found, extra), ctx.target("access")
    arrays = [found.mask, *found.extra, *found.indices]
    given = agreement.preferred(arrays)
    if default is not None and given == _default_placement(found):
        given = None
    if layout is not None and found.shape:
        given = place_registers(layout, found.shape)
    placement = given or default or _default_placement(found)
    if placement is None:
        return found, None

    def alike(x: Any) -> Any:
        # In the default layout, nobody has chosen that of the access.
        return agreement.in_layout(
            ctx.kernel, x, placement, repeats_chosen=given is None
        )

    return dataclasses.replace(
        found,
        indices=tuple(map(alike, found.indices)),
        mask=alike(found.mask),
        extra=tuple(map(alike, found.extra)),
    ), placement


def _assigned_access(ctx: RuleContext, found: Access, extra: Sequence[str]) -> Access:
    return dataclasses.replace(
        found,
        indices=tuple(
            ctx.operand(x, f"index {i}") for i, x in enumerate(found.indices)
        ),
        mask=None if found.mask is None else ctx.operand(found.mask, "mask"),
        extra=tuple(
            None if x is None else ctx.operand(x, name)
            for x, name in zip(found.extra, extra, strict=True)
        ),
    )


def related_access(
    node: Node, ref: str, *extra: str, fixed: Placement | None = None
) -> Variable | None:
    """All arrays of an access have one layout: this one, if it is given.

    Returns:
      The variable; None for the access to a single element.
    """
    operands, params = node.operands, node.params
    reinterpreted = params["view_shape"] is not None
    # Reinterpreted elements have to be adjacent, in row-major order.
    part = node.part(operands[ref])
    node.use(part, "pointer" if reinterpreted else "indexed")
    shape = tuple(params["shape"])
    if not shape:
        return None
    like = Symbol(shape, np.dtype(params["dtype"]), lambda: 0)
    variable = node.variable(like, fixed=fixed)
    named = [(f"index {i}", x) for i, x in enumerate(operands["indices"])]
    named += [(name, operands[name]) for name in ("mask", *extra)]
    for name, x in named:
        if x is not None and x.shape:
            node.take(x, variable, name)
    node.make(variable, like, "access")
    return variable


@relates(load_indexed_p)
def _relate_load(node: Node, *_: Any) -> Symbol:
    (aval,) = node.op.results
    variable = related_access(node, "src", "other")
    if variable is None:
        return node.scalar(aval)
    loaded = node.make(variable, aval, "loaded")
    layout = node.params["layout"]
    return loaded if layout is None else shapes.related_cast(node, loaded, layout)


@relates(store_indexed_p)
def _relate_store(node: Node, *_: Any) -> list[Any]:
    related_access(node, "dst", "value")
    return []


def _default_placement(found: Access) -> Placement | None:
    """Returns the layout of an access for which nothing determines one."""
    if not found.shape:
        return None
    placement = default_placement(found.shape, dtypes.bits(found.dtype))
    if isinstance(placement, WGStridedLayout):
        return place_registers(spread_layout(found.shape), found.shape)
    return placement


@lane(load_indexed_p)
def _load_lane(ctx: RuleContext, *invals: Any) -> Any:
    layout = ctx.eqn.params["layout"]
    found, placement = lane_access(ctx, invals, "src", "other", layout=layout)
    loaded = indexed.load(lane_elements(ctx, found), placement, found.extra[0])
    return loaded if layout is None else ctx.operand(loaded)


@lane(store_indexed_p)
def _store_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    found, placement = lane_access(ctx, invals, "dst", "value")
    with ctx.in_order():
        elements = lane_elements(ctx, found)
        indexed.store(elements, placement, found.extra[0])
    return []


# --- Warpgroup ------------------------------------------------------------------------

# Attributes: which operands there are; dtypes of indices and of the family's operands.
_COUNTS, _DTYPES, _DTYPE, _VIEW = "counts", "dtypes", "dtype", "view_shape"
_ADJACENT, _MASK_EDGES = "adjacent", "mask_edges"


def operation(
    ctx: RuleContext, found: Access, result: np.dtype | None
) -> tuple[list[ir.Type], list[ir.Value], dict[str, ir.Attribute]]:
    """Returns an access as types, operands and attributes of an operation.

    Args:
      result: dtype of the result; None for no result.
    """
    values = [*found.indices]
    counts = [len(values), found.mask is not None, found.rank is not None]
    values += [] if found.mask is None else [found.mask]
    values += [] if found.rank is None else [elementwise.scalar(found.rank, I32)]
    for x in found.extra:
        counts.append(x is not None)
        values += [] if x is None else [x]
    i64 = ir.IntegerType.get_signless(64)
    own: dict[str, ir.Attribute] = {
        _COUNTS: ir.DenseI64ArrayAttr.get([int(n) for n in counts]),
        _DTYPES: ir.ArrayAttr.get([ir.StringAttr.get(x.dtype.name) for x in values]),
        _DTYPE: ir.StringAttr.get(found.dtype.name),
        "rank": ir.IntegerAttr.get(i64, len(found.shape)),
    }
    if found.view_shape is not None:
        own[_VIEW] = ir.DenseI64ArrayAttr.get(list(found.view_shape))
    if found.adjacent is not None:
        own[_ADJACENT] = ir.DenseI64ArrayAttr.get(list(found.adjacent))
    if found.mask_edges is not None:
        own[_MASK_EDGES] = ir.DenseI64ArrayAttr.get(list(found.mask_edges))
    types = []
    if result is not None and found.shape:
        types = [logical.vector_type(result, found.shape)]
    elif result is not None:
        types = [dtypes.mlir_type(result)]
    return types, [ctx.part(found.ref), *(x.value for x in values)], own


def result_of(op: ir.Operation, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    """Returns the result of an access as a value."""
    if shape:
        return vals.Vector(op.result, dtype)
    return regs.Splat(op.result, dtype, ())


@warpgroup(load_indexed_p)
def _load_warpgroup(ctx: RuleContext, *invals: Any) -> Any:
    found = access(ctx, invals, "src", "other")
    op = ir.Operation.create(
        "pallas_gpu.load_indexed", *operation(ctx, found, found.dtype)
    )
    loaded = result_of(op, found.dtype, found.shape)
    layout = ctx.eqn.params["layout"]
    if layout is None:
        return loaded
    return ctx.kernel.semantics.layout_cast(ctx, loaded, layout)


@warpgroup(store_indexed_p)
def _store_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    found = access(ctx, invals, "dst", "value")
    with ctx.in_order():
        ir.Operation.create("pallas_gpu.store_indexed", *operation(ctx, found, None))
    return []


def expanded(
    expansion: Expansion, op: Any
) -> tuple[indexed.Elements, Placement | None, list[regs.Array | None]]:
    """Returns elements, layout, and the family's operands of an access."""
    base = op.operation
    counts = list(ir.DenseI64ArrayAttr(base.attributes[_COUNTS]))
    names = [ir.StringAttr(a).value for a in ir.ArrayAttr(base.attributes[_DTYPES])]
    values = iter(
        _value(expansion, op, i + 1, dtypes.named(name)) for i, name in enumerate(names)
    )
    indices = tuple(next(values) for _ in range(counts[0]))
    mask, rank, *extra = (next(values) if there else None for there in counts[1:])
    view_shape = None
    if _VIEW in base.attributes:
        view_shape = tuple(ir.DenseI64ArrayAttr(base.attributes[_VIEW]))
    mask_edges = None
    if _MASK_EDGES in base.attributes:
        mask_edges = Edges(*ir.DenseI64ArrayAttr(base.attributes[_MASK_EDGES]))
    dtype, adjacent = stored_elements(base)
    assert rank is None or isinstance(rank, regs.Splat)
    elements = indexed.Elements(
        view(expansion, op.operands[0]),
        view_shape,
        dtype,
        indices,
        mask,
        adjacent,
        mask_edges,
        None if rank is None else rank.value,
    )
    return elements, _placement(expansion, op, dtype, [*indices, mask, *extra]), extra


def stored_elements(op: ir.Operation) -> tuple[np.dtype, tuple[int, int] | None]:
    """Returns the dtype of an access, and where its elements are adjacent."""
    adjacent = None
    if _ADJACENT in op.attributes:
        axis, divisor = ir.DenseI64ArrayAttr(op.attributes[_ADJACENT])
        adjacent = axis, divisor
    return dtypes.named(ir.StringAttr(op.attributes[_DTYPE]).value), adjacent


def _value(expansion: Expansion, op: Any, i: int, dtype: np.dtype) -> regs.Array:
    value = op.operands[i]
    if is_array(value):
        return expansion.operand(op, i, dtype)
    return regs.Splat(value, dtype, ())


def _placement(
    expansion: Expansion, op: Any, dtype: np.dtype, arrays: Sequence[Any]
) -> Placement | None:
    base = op.operation
    if ir.IntegerAttr(base.attributes["rank"]).value == 0:
        return None
    for i, value in enumerate(base.operands):
        if is_array(value):
            layout = expansion.assignment.operand(base, i)
            if layout is not None:
                return layout
    if len(base.results) and (layout := expansion.assignment.result(base.results[0])):
        return layout
    for x in arrays:
        if isinstance(x, regs.RegisterArray):
            return x.layout
    shape = next(x.shape for x in arrays if x is not None and x.shape)
    return default_placement(shape, dtypes.bits(dtype))


def infer_access(
    network: Network,
    op: ir.Operation,
    key: Key,
    kind: str,
    fixed: Placement | None = None,
) -> None:
    """All arrays of an access have one layout: this one, if it is given."""
    part = array_of(network, op, 0)
    # Reinterpreted elements have to be adjacent, in row-major order.
    use_kind: Any = "pointer" if _VIEW in op.attributes else kind
    network.use_memory(Use(op, use_kind, part, network.weight))
    positions = constraints.vector_operands(op)
    results = [r for r in op.results if constraints.is_vector(r)]
    if not positions and not results:
        return
    type_ = results[0].type if results else op.operands[positions[0]].type
    variable = network.variable(op, type_, key, fixed=fixed)
    for i in positions:
        network.consume(op, i, variable)
    for result in results:
        network.produce(result, variable)


@infers("pallas_gpu.load_indexed", "pallas_gpu.store_indexed")
def _infer(network: Network, op: ir.Operation, key: Key) -> None:
    infer_access(network, op, key, "indexed")


@expands("pallas_gpu.load_indexed")
def _expand_load(expansion: Expansion, op: Any) -> None:
    elements, placement, (other,) = expanded(expansion, op)
    loaded = indexed.load(elements, placement, other)
    finish(expansion, op, loaded)


def finish(expansion: Expansion, op: Any, result: Any) -> None:
    """Replaces an access by its expansion."""
    base = op.operation
    if len(base.results):
        if is_array(base.results[0]):
            expansion.set(base.results[0], result)
        else:
            base.results[0].replace_all_uses_with(result.value)
    expansion.dead.append(base)


@expands("pallas_gpu.store_indexed")
def _expand_store(expansion: Expansion, op: Any) -> None:
    elements, placement, (value,) = expanded(expansion, op)
    assert value is not None
    indexed.store(elements, placement, value)
    finish(expansion, op, None)
