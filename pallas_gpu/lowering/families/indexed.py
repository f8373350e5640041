# SPDX-License-Identifier: Apache-2.0
"""Accesses with an index for each element: index arrays, strides, reshapes, masks.

Indices, mask and value have the layout of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.emitters import cluster, indexed
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.registers import default_placement, spread_layout
from pallas_gpu.layouts import WGStridedLayout
from pallas_gpu.layouts.registers.placement import Placement, place_registers
from pallas_gpu.layouts.smem.access_plan import Kind
from pallas_gpu.lowering import notes, slow
from pallas_gpu.lowering.choice import agreement
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import shapes
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.network import Variable
from pallas_gpu.lowering.references import i32
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives.indexed import load_indexed_p, store_indexed_p

# --- what an equation accesses --------------------------------------------------------


def rank_of(
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


def placed_access(
    ctx: RuleContext,
    invals: Sequence[Any],
    ref: str,
    *extra: str,
    layout: Any = None,
    default: Placement | None = None,
) -> tuple[indexed.Elements, tuple[Any, ...], Placement | None]:
    """Returns the elements that an equation accesses, other operands, and their layout.

    Args:
      ref: name of the reference.
      extra: names of the other operands, which may be absent.
      layout: the layout that the author has given, or None.
      default: the layout if nothing determines one; None for that of the shape.
    """
    params, infers = ctx.eqn.params, ctx.kernel.layouts.infers
    operands = ctx.operands(invals)
    shape, dtype = tuple(params["shape"]), np.dtype(params["dtype"])
    mask, others = operands["mask"], [operands[name] for name in extra]
    rank = rank_of(ctx, params["cta_axes"], operands["cta"])
    given = agreement.preferred([mask, *others, *operands["indices"]])
    usual = _default_placement(shape, dtype)
    if default is not None and given == usual:
        given = None
    if layout is not None and shape:
        given = place_registers(layout, shape)
    placement = ctx.target("access") if infers else given or default or usual

    def alike(x: Any, slot: str) -> Any:
        if infers and x is not None:
            return ctx.operand(x, slot)
        if x is None or placement is None:
            return x
        # In the default layout, nobody has chosen that of the access.
        return agreement.in_layout(
            ctx.kernel, x, placement, repeats_chosen=given is None
        )

    indices = [alike(x, f"index {i}") for i, x in enumerate(operands["indices"])]
    elements = indexed.Elements(
        ctx.view(operands[ref]),
        params["view_shape"],
        dtype,
        tuple(indices),
        alike(mask, "mask"),
        params["adjacent"],
        params.get("mask_edges"),
        rank,
    )
    return elements, tuple(map(alike, others, extra)), placement


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
    like = jax.ShapeDtypeStruct(shape, params["dtype"])
    variable = node.variable(like, fixed=fixed)
    named = [(f"index {i}", x) for i, x in enumerate(operands["indices"])]
    named += [(name, operands[name]) for name in ("mask", *extra)]
    for name, x in named:
        if x is not None and x.shape:
            node.take(x, variable, name)
    node.make(variable, like, "access")
    return variable


def _default_placement(shape: tuple[int, ...], dtype: np.dtype) -> Placement | None:
    """Returns the layout of an access for which nothing determines one."""
    if not shape:
        return None
    placement = default_placement(shape, dtypes.bits(dtype))
    if isinstance(placement, WGStridedLayout):
        return place_registers(spread_layout(shape), shape)
    return placement


@emits_and_relates(load_indexed_p)
def _load(on: RuleContext | Node, *invals: Any, layout: Any) -> Any:
    if isinstance(on, Node):
        variable, (aval,) = related_access(on, "src", "other"), on.op.results
        if variable is None:
            return on.scalar(aval)
        loaded: Any = on.make(variable, aval, "loaded")
        return loaded if layout is None else shapes.related_cast(on, loaded, layout)
    elements, (other,), placement = placed_access(
        on, invals, "src", "other", layout=layout
    )
    _note(elements, placement, "load")
    loaded = indexed.load(elements, placement, other)
    return loaded if layout is None else on.operand(loaded)


@emits_and_relates(store_indexed_p)
def _store(on: RuleContext | Node, *invals: Any) -> None:
    if isinstance(on, Node):
        related_access(on, "dst", "value")
        return
    elements, (value,), placement = placed_access(on, invals, "dst", "value")
    _note(elements, placement, "store")
    with on.in_order():
        indexed.store(elements, placement, value)


def _note(elements: indexed.Elements, layout: Placement | None, kind: Kind) -> None:
    notes.take(
        lambda: slow.by_element(
            elements.view, layout, kind, indexed.adjacent_elements(elements, layout)
        )
    )
