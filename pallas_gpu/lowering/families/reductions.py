# SPDX-License-Identifier: Apache-2.0
"""Reductions over axes of an array."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_gpu.lowering import agreement, scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.families import elementwise, shapes
from pallas_gpu.lowering.inference import relations
from pallas_gpu.lowering.inference.constraints import is_vector
from pallas_gpu.lowering.inference.network import Key, Network
from pallas_gpu.lowering.rules import (
    expands,
    find_primitive,
    infers,
    lane,
    warpgroup,
)
from pallas_gpu.mosaic import elementwise as on_registers
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes, table
from pallas_gpu.mosaic.elements.convert import convert_value
from pallas_gpu.mosaic.moves import reductions
from pallas_gpu.primitives import _registry as registry

# lax's primitives.


KINDS: dict[str, reductions.Kind] = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}


# MLIR's names, which encode the sign of integers.
_COMBINING: dict[tuple[str, str], str] = {
    ("max", "float"): "maximumf",
    ("max", "signed"): "maxsi",
    ("max", "unsigned"): "maxui",
    ("max", "bool"): "or",
    ("min", "float"): "minimumf",
    ("min", "signed"): "minsi",
    ("min", "unsigned"): "minui",
    ("min", "bool"): "and",
}


# MLIR's names: the kind, and whether integers are unsigned.
_KINDS: dict[str, tuple[reductions.Kind, bool]] = {
    "add": ("add", False),
    "mul": ("mul", False),
    "and": ("and", False),
    "or": ("or", False),
    "xor": ("xor", False),
    "maximumf": ("max", False),
    "maxsi": ("max", False),
    "maxui": ("max", True),
    "minimumf": ("min", False),
    "minsi": ("min", False),
    "minui": ("min", True),
}


def _make_lane(kind: reductions.Kind):
    def rule(ctx: RuleContext, x: Any) -> Any:
        axes = tuple(ctx.eqn.params["axes"])
        if not axes:
            return x
        source = shapes.placed(on_registers.astype(x, dtypes.combining(x.dtype)))
        if len(axes) < len(source.shape):
            source = agreement.linear(ctx.kernel, source)
        room = scratch.for_reduction(ctx.kernel, source, axes)
        result = reductions.reduce(kind, source, axes, room)
        return on_registers.astype(result, x.dtype)

    return rule


def _make_warpgroup(kind: reductions.Kind):
    def rule(ctx: RuleContext, x: Any) -> Any:
        axes = list(ctx.eqn.params["axes"])
        if not axes:
            return x
        given, dtype = x.dtype, dtypes.combining(x.dtype)
        x = elementwise.convert(x, dtype)
        combining = _COMBINING.get((kind, dtypes.kind(dtype)), kind)
        attribute = ir.Attribute.parse(f"#vector.kind<{combining}>")
        # The op requires an initial value; our reductions have none and ignore it.
        zero = vals.constant(0, dtype)
        if ctx.out_aval.shape:
            start = shapes.splat(zero, ctx.out_aval.shape).value
        else:
            start = logical.to_element(zero.value, dtype)
        result = vector.multi_reduction(attribute, x.value, start, axes)
        if ctx.out_aval.shape:
            return elementwise.convert(vals.Vector(result, dtype), given)
        scalar = logical.from_element(result, dtype)
        return regs.Splat(convert_value(scalar, dtype, given), given, ())

    return rule


def _make_check(kind: reductions.Kind):
    def check(op: Any, mesh: Any) -> None:
        dtype = np.dtype(op.inputs[0].dtype)
        if dtype != dtypes.BOOL:
            table.lookup(kind).require_combining(dtype)

    return check


for _name, _kind in KINDS.items():
    registry.checks(find_primitive(_name))(_make_check(_kind))
    lane(_name)(_make_lane(_kind))
    warpgroup(_name)(_make_warpgroup(_kind))


@infers("vector.multi_reduction")
def _infer(network: Network, op: ir.Operation, key: Key) -> None:
    axes = tuple(ir.DenseI64ArrayAttr(op.attributes["reduction_dims"]))
    operand, result = op.operands[0], op.results[0]
    shape = network.vector_type(result.type)[0] if is_vector(result) else ()
    variable = network.variable(
        op, operand.type, key, result=shape, relation=relations.Reduce(axes)
    )
    network.consume(op, 0, variable)
    if is_vector(result):
        network.produce(result, variable)


@expands("vector.multi_reduction")
def _expand(expansion: Expansion, op: Any) -> None:
    kind, unsigned = _combining(op)
    axes = tuple(ir.DenseI64ArrayAttr(op.attributes["reduction_dims"]))
    source = expansion.placed(op, 0)
    if unsigned:
        dtype = dtypes.named(f"uint{dtypes.stored_bits(source.dtype)}")
        source = regs.with_sign(source, dtype)
    room = scratch.for_reduction(expansion.kernel, source, axes)
    result = reductions.reduce(kind, source, axes, room)
    if isinstance(op.result.type, ir.VectorType):
        expansion.set(op.result, result)
    else:
        assert isinstance(result, regs.Splat)
        expansion.dead.append(op.operation)
        logical.replace_element(op.result, result.value, expansion.dead)
        return
    expansion.dead.append(op.operation)


def _combining(op: Any) -> tuple[reductions.Kind, bool]:
    """Returns the reduction's kind, and whether its integers are unsigned."""
    name = str(op.attributes["kind"]).removeprefix("#vector.kind<").removesuffix(">")
    return _KINDS[name]
