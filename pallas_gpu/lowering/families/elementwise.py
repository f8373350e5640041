# SPDX-License-Identifier: Apache-2.0
"""lax's elementwise operations: a check and two rules for every row of the table."""

from __future__ import annotations

import functools
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
from pallas_gpu.lowering.families.shapes import broadcast
from pallas_gpu.lowering.inference.collect import Node, without_arrays
from pallas_gpu.lowering.rules import emits_and_relates, find_primitive
from pallas_gpu.primitives import _registry as registry


def _params_of(ctx: RuleContext, row: Row) -> dict[str, Any]:
    """Returns the emitter's parameters, with enumerations as numbers."""
    given = ctx.eqn.params
    params = {k: getattr(given[k], "value", given[k]) for k in row.params}
    allowed = ctx.kernel.params.compiler_params.approx_math
    if row.approx is not None and _approximates(row, ctx.op, allowed):
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


# --- rules ----------------------------------------------------------------------------


def _rule(row: Row, on: RuleContext | Node, *operands: Any) -> Any:
    """Of arrays, which have one layout, and of scalars."""
    (aval,) = on.op.results
    if isinstance(on, Node) and not aval.shape:
        return without_arrays(on)[0]
    # lax admits a scalar predicate or bound for a whole array.
    same = [wide(on, i, x, tuple(aval.shape)) for i, x in enumerate(operands)]
    if isinstance(on, Node):
        approximates = _approximates(row, on.op, on.network.approx_math)
        cycles = row.cost(np.dtype(operands[row.typed_by].dtype), approximates)
        return on.alike(same, aval, cycles_per_element=cycles)
    params = _params_of(on, row)
    if row.name == "exp" and on.kernel.layouts.infers and not params:
        params["summed"] = _is_summed(on)
    alike = on.kernel.layouts.alike(on, same)
    return elementwise.apply(row.name, *alike, to=vals.numpy_dtype(aval), **params)


def wide(on: RuleContext | Node, i: int, x: Any, shape: tuple[int, ...]) -> Any:
    """Returns an operand broadcast to the shape of the result."""
    if x.shape == shape or (isinstance(on, Node) and not x.shape):
        return x
    slot, dims = f"broadcast {i}", range(len(shape) - len(x.shape), len(shape))
    aval = jax.ShapeDtypeStruct(shape, x.dtype)
    made = broadcast(on, x, aval, tuple(dims), slot)
    return made if isinstance(on, Node) else on.result(made, slot)


def converted(on: RuleContext | Node, x: Any, dtype: np.dtype, slot: str) -> Any:
    """Returns an operand of another operation with its elements converted."""
    if x.dtype == dtype:
        return x
    if isinstance(on, Node):
        cycles = table.lookup("convert_element_type").cost(x.dtype, False)
        aval = jax.ShapeDtypeStruct(x.shape, dtype)
        return on.alike([x], aval, [slot], slot, cycles_per_element=cycles)
    return on.result(elementwise.astype(on.operand(x, slot), dtype), slot)


def _is_summed(ctx: RuleContext) -> bool:
    """Whether sums of the result's elements are all that uses it."""
    if not ctx.out_aval.shape or dtypes.combining(ctx.out_aval.dtype) != np.dtype(
        ctx.out_aval.dtype
    ):
        return False
    return all(op is not None and op.name == "reduce_sum" for op in ctx.readers)


# --- the rules of all rows ------------------------------------------------------------


def enter_rules(rows: Iterable[Row]) -> None:
    """Registers the rules of some rows.

    Raises:
      InternalError: lax has no such primitive, or the primitive no such parameter; or
        rules are already registered for it.
    """
    for row in rows:
        primitive = _primitive(row)
        emits_and_relates(primitive)(_of(row))
        registry.checks(primitive)(functools.partial(_check, row))


def _of(row: Row) -> Callable[..., Any]:
    return lambda *args: _rule(row, *args)


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


# `name` is of `checkpoint_name`, which only a backward pass would use.
@emits_and_relates("stop_gradient", "copy", "name")
def _identity(on: RuleContext | Node, x: Any) -> Any:
    return x
