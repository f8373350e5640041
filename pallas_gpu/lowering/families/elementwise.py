# SPDX-License-Identifier: Apache-2.0
"""lax's elementwise operations: a check and two rules for every row of the table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import lax

from pallas_gpu import errors
from pallas_gpu.emitters import elementwise
from pallas_gpu.emitters.elements import dtypes, table
from pallas_gpu.emitters.elements.row import Row
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.shapes import related_broadcast
from pallas_gpu.lowering.inference.collect import Node, Symbol, without_arrays
from pallas_gpu.lowering.rules import emits, find_primitive, relates
from pallas_gpu.primitives import _registry as registry


def _params_of(ctx: RuleContext, row: Row) -> dict[str, Any]:
    """Returns the emitter's parameters, with enumerations as numbers."""
    given = ctx.eqn.params
    params = {k: getattr(given[k], "value", given[k]) for k in row.params}
    if row.approx is not None and _approximates(row, ctx.op, ctx.approx_math):
        params["approx_math"] = True
    return params


def _approximates(row: Row, op: Any, approx_math: bool) -> bool:
    """Whether an operation may be an approximation of the hardware."""
    accuracy = op.params.get("accuracy")
    if isinstance(accuracy, lax.AccuracyMode | None):
        return approx_math and accuracy is not lax.AccuracyMode.HIGHEST
    return row.approximates(np.dtype(op.inputs[row.typed_by].dtype), accuracy)


# --- checks ---------------------------------------------------------------------------


def _check(row: Row, op: Any, mesh: Any) -> None:
    """Refuses what no emitter has, before emulation and lowering alike."""
    row.case(np.dtype(op.inputs[row.typed_by].dtype))
    _approximates(row, op, approx_math=False)


# --- emission -------------------------------------------------------------------------


def _on_registers(row: Row, ctx: RuleContext, *operands: Any) -> Any:
    """The rule for arrays that have layouts, and for scalars."""
    shape = ctx.out_aval.shape
    # lax admits a scalar predicate or bound for a whole array.
    same = [wide(ctx, i, x, shape) for i, x in enumerate(operands)]
    dtype = vals.numpy_dtype(ctx.out_aval)
    params = _params_of(ctx, row)
    if row.name == "exp" and ctx.kernel.layouts.infers and not params:
        params["summed"] = _is_summed(ctx)
    alike = ctx.kernel.layouts.alike(ctx, same)
    return elementwise.apply(row.name, *alike, to=dtype, **params)


def wide(ctx: RuleContext, i: int, x: Any, shape: tuple[int, ...]) -> Any:
    """Returns an operand broadcast to the shape of the result."""
    if vals.is_scalar(x) or x.shape == shape:
        return vals.as_shape(x, shape)
    slot = f"broadcast {i}"
    return ctx.result(vals.as_shape(ctx.operand(x, slot), shape), slot)


def _is_summed(ctx: RuleContext) -> bool:
    """Whether sums of the result's elements are all that uses it."""
    if not ctx.out_aval.shape or dtypes.combining(ctx.out_aval.dtype) != np.dtype(
        ctx.out_aval.dtype
    ):
        return False
    return all(op is not None and op.name == "reduce_sum" for op in ctx.readers)


# --- relations ------------------------------------------------------------------------


def _relate(row: Row, node: Node, *operands: Symbol) -> Symbol:
    """All arrays of the operation have one layout."""
    (result,) = node.op.results
    shape = tuple(result.shape)
    if not shape:
        return without_arrays(node)[0]
    wide = [related_wide(node, i, x, shape) for i, x in enumerate(operands)]
    approximates = _approximates(row, node.op, node.network.approx_math)
    cycles = row.cost(np.dtype(operands[row.typed_by].dtype), approximates)
    return node.alike(wide, result, cycles_per_element=cycles)


def related_wide(node: Node, i: int, x: Symbol, shape: tuple[int, ...]) -> Symbol:
    """The relation of `wide`."""
    if not x.shape or x.shape == shape:
        return x
    dims = tuple(range(len(shape) - len(x.shape), len(shape)))
    aval = jax.ShapeDtypeStruct(shape, x.dtype)
    return related_broadcast(node, x, aval, dims, f"broadcast {i}")


def convert_operand(ctx: RuleContext, x: Any, dtype: np.dtype, slot: str) -> Any:
    """Converts the elements of an operand of another operation."""
    if x.dtype == dtype:
        return x
    return ctx.result(elementwise.astype(ctx.operand(x, slot), dtype), slot)


def related_convert(node: Node, x: Symbol, dtype: np.dtype, slot: str) -> Symbol:
    """The relation of `convert_operand`."""
    if x.dtype == dtype:
        return x
    cycles = table.lookup("convert_element_type").cost(x.dtype, False)
    aval = jax.ShapeDtypeStruct(x.shape, dtype)
    return node.alike([x], aval, [slot], slot, cycles_per_element=cycles)


# --- the rules of all rows ------------------------------------------------------------


def enter_rules(rows: Iterable[Row]) -> None:
    """Registers the rules of some rows.

    Raises:
      InternalError: lax has no such primitive, or the primitive no such parameter; or
        rules are already registered for it.
    """
    for row in rows:
        primitive = _primitive(row)
        emits(primitive)(_of(row, _on_registers))
        registry.checks(primitive)(_of(row, _check))
        relates(primitive)(_of(row, _relate))


def _of(row: Row, rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: rule(row, *args)


def _primitive(row: Row) -> Any:
    primitive = find_primitive(row.name)
    # A parameter is an argument of lax's function that is not an operand.
    known = inspect.signature(getattr(lax, row.name)).parameters if row.params else ()
    for param in row.params:
        if param not in known:
            raise errors.InternalError(
                f"The row {row.name!r} of the elementwise table: the primitive has no "
                f"parameter {param!r}",
                expected=list(known),
            )
    return primitive


enter_rules(table.ROWS)


def _identity(ctx: RuleContext | Node, x: Any) -> Any:
    return x


# `name` is of `checkpoint_name`, which only a backward pass would use.
for _alike in ("stop_gradient", "copy", "name"):
    emits(_alike)(_identity)
    relates(_alike)(_identity)
