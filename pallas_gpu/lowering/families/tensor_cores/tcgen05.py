# SPDX-License-Identifier: Apache-2.0
"""tcgen05: products with an accumulator in TMEM, and their commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import errors, types
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.lowering import memrefs
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.memory import smem_view
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families.mbarrier import barrier_index, barrier_pointer
from pallas_gpu.lowering.families.tensor_cores import signs
from pallas_gpu.lowering.families.tmem import constrain, packed, require, tmem_view
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.constraints import array_of
from pallas_gpu.lowering.inference.network import Key, Network, Use
from pallas_gpu.lowering.rules import expands, infers, lane, relates, uniform, warpgroup
from pallas_gpu.mosaic import dialect
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.tensor_cores import tcgen05
from pallas_gpu.primitives.tensor_cores import tcgen05 as primitives

_HALF_ROWS, _ROWS = 64, 128
# The attribute that says which operands there are.
_COUNTS = "operandSegmentSizes"


@lane(primitives.tcgen05_mma_p)
def _mma_lane(ctx: RuleContext, *invals: Any) -> list[Any]:
    return _multiply(ctx, invals, tcgen05.mma)


@warpgroup(primitives.tcgen05_mma_p)
def _mma_warpgroup(ctx: RuleContext, *invals: Any) -> list[Any]:
    operands = ctx.operands(invals)

    def multiply(
        acc: Any,
        a: Any,
        b: Any,
        accumulate: bool | ir.Value,
        scaled: Any,
        metadata: Any,
        *,
        collective: bool,
    ) -> None:
        if isinstance(accumulate, bool):
            accumulate = dtypes.constant(accumulate, dtypes.BOOL)
        a_scale, b_scale = scaled or (None, None)
        if metadata is not None:
            held = [acc, a, b, accumulate, a_scale, b_scale, metadata]
            product = _sparse_product(held, collective=collective)
        else:
            product = dialect.ops.tcgen05_mma(
                acc,
                a,
                b,
                accumulate,
                a_scale=a_scale,
                b_scale=b_scale,
                collective=collective,
            )
        signs.mark(product, {1: operands["a"].ref.dtype, 2: operands["b"].ref.dtype})

    return _multiply(ctx, invals, multiply)


def _sparse_product(operands: Sequence[ir.Value | None], *, collective: bool) -> Any:
    """The dialect's operation, which requires as many indices as elements of a.

    That is the form of 8 and 16 bits alone.
    """
    counts = [int(x is not None) for x in operands]
    attributes = {
        _COUNTS: ir.DenseI32ArrayAttr.get(counts),
        "collective": ir.BoolAttr.get(collective),
    }
    held = [x for x in operands if x is not None]
    return ir.Operation.create("pallas_gpu.sparse_tcgen05_mma", [], held, attributes)


def _multiply(
    ctx: RuleContext, invals: Sequence[Any], multiply: Callable[..., None]
) -> list[Any]:
    operands = ctx.operands(invals)
    parts = [ctx.part(operands[name]) for name in ("acc", "a", "b")]
    accumulate = operands["accumulate"]
    if not isinstance(accumulate, bool):
        accumulate = vals.scalar_value(accumulate)
    scaled = None
    if operands["a_scale"] is not None:
        scaled = tuple(ctx.part(operands[name]) for name in ("a_scale", "b_scale"))
    metadata = operands["a_sparse_metadata"]
    if metadata is not None:
        metadata = ctx.part(metadata)
    multiply(*parts, accumulate, scaled, metadata, collective=_is_collective(ctx))
    if operands["barrier"] is not None:
        _commit(ctx, operands["barrier"])
    return []


@relates(primitives.tcgen05_mma_p)
def _relate(node: Node, *_: Any) -> list[Any]:
    operands = node.operands
    collective = node.params["collective_axis"] is not None
    accumulator, left = node.part(operands["acc"]), node.part(operands["a"])
    half = accumulator.window.sizes[0] == _HALF_ROWS
    constrain(
        node, accumulator, "accumulator", lambda: _accumulator(accumulator, collective)
    )
    if left.space is types.TMEM:
        _check_left(node, left)
        constrain(node, left, "left operand", lambda: packed(left))
    else:
        node.use(left, "mma", role="left operand")
    pieces = 2 if half and not collective else 1
    right = node.part(operands["b"])
    node.use(right, "mma", role="right operand", pieces=pieces)
    both = TmemLayout.scales_m64_collective if collective and half else None
    for name, role, make in (
        ("a_scale", "scales of the left operand", TmemLayout.scales),
        ("b_scale", "scales of the right operand", both or TmemLayout.scales),
        ("a_sparse_metadata", "metadata", TmemLayout.sparse_metadata),
    ):
        if operands[name] is not None:
            constrain(node, node.part(operands[name]), role, make)
    return []


@uniform(primitives.tcgen05_commit_arrive_p)
def _commit_arrive(ctx: RuleContext, *invals: Any) -> list[Any]:
    _commit(ctx, ctx.operands(invals)["barrier"])
    return []


def _commit(ctx: RuleContext, barrier: Any) -> None:
    index = barrier_index(barrier.ref, barrier.transforms)
    pointer = barrier_pointer(ctx, barrier.ref, index)
    tcgen05.commit_arrive(pointer, collective=_is_collective(ctx))


def _is_collective(ctx: RuleContext) -> bool:
    """Whether the operation is one of a pair of CTAs."""
    return ctx.eqn.params["collective_axis"] is not None


@expands("mosaic_gpu.tcgen05_mma", "pallas_gpu.sparse_tcgen05_mma")
def _expand_mma(expansion: Expansion, op: Any) -> None:
    accumulator, left, right, accumulate = list(op.operands)[:4]
    *scales, metadata = (
        None if i is None else tmem_view(expansion, op.operands[i]) for i in _more(op)
    )
    a_scale, b_scale = scales
    scaled = None
    if a_scale is not None and b_scale is not None:
        scaled = a_scale, b_scale
    part = memrefs.resolve(left)
    in_tmem = part is not None and part.space is types.TMEM
    a = tmem_view(expansion, left) if in_tmem else smem_view(expansion, left)
    tcgen05.mma(
        tmem_view(expansion, accumulator),
        signs.restored(op, 1, a),
        signs.restored(op, 2, smem_view(expansion, right)),
        _static(accumulate),
        scaled,
        metadata,
        collective=ir.BoolAttr(op.attributes["collective"]).value,
    )
    expansion.dead.append(op.operation)


def _static(accumulate: ir.Value) -> bool | ir.Value:
    if not dtypes.is_constant(accumulate):
        return accumulate
    return bool(accumulate.owner.attributes["value"].value)


def _more(op: Any) -> list[int | None]:
    """The numbers of the operands a_scale, b_scale and a_sparse_metadata.

    Before them are the accumulator, a, b and accumulate.
    """
    counts = list(ir.DenseI32ArrayAttr(op.attributes[_COUNTS]))
    return [sum(counts[:i]) if n else None for i, n in enumerate(counts)][4:]


@infers("mosaic_gpu.tcgen05_mma", "pallas_gpu.sparse_tcgen05_mma")
def _infer_mma(network: Network, op: ir.Operation, key: Key) -> None:
    collective = ir.BoolAttr(op.attributes["collective"]).value
    accumulator, left = array_of(network, op, 0), array_of(network, op, 1)
    half = accumulator.window.sizes[0] == _HALF_ROWS
    require(
        network, op, 0, "accumulator", lambda: _accumulator(accumulator, collective)
    )
    if left.space is types.TMEM:
        _check_left(op, left)
        require(network, op, 1, "left operand", lambda: packed(left))
    else:
        use = Use(op, "mma", left, network.weight, role="left operand")
        network.use_memory(use)
    right = array_of(network, op, 2)
    pieces = 2 if half and not collective else 1
    network.use_memory(
        Use(op, "mma", right, network.weight, role="right operand", pieces=pieces)
    )
    both = TmemLayout.scales_m64_collective if collective and half else None
    made = (
        ("scales of the left operand", TmemLayout.scales),
        ("scales of the right operand", both or TmemLayout.scales),
        ("metadata", TmemLayout.sparse_metadata),
    )
    for i, (role, make) in zip(_more(op), made, strict=True):
        if i is not None:
            require(network, op, i, role, make)


def _accumulator(part: Any, collective: bool) -> TmemLayout:
    """One element per column; the layout of 64 rows depends on one or two CTAs."""
    if part.window.sizes[0] != _HALF_ROWS:
        return TmemLayout.default()
    if collective:
        return TmemLayout.m64_collective(part.window.sizes[1])
    return TmemLayout.half_lane(part.window.sizes[1])


def _check_left(op: Any, part: Any) -> None:
    window = part.window
    if window.sizes[0] != _ROWS:
        raise errors.UnsupportedError(
            f"tcgen05_mma: a left operand in TMEM cannot have {window.sizes[0]} rows",
            expected=f"{_ROWS} rows",
            got=f"shape {window.shape}",
            hint="pass the left operand in SMEM",
            where=sources.where(op),
        )
