# SPDX-License-Identifier: Apache-2.0
"""lax's elementwise operations: a check and four rules for every row of the table.

An operation keeps lax's name until its arrays have layouts: the table maps one
operation to different instructions for different types and parameters, and inference
needs only that all of its arrays have the same layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.agreement import agreed
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.expansion.walk import Expansion, is_array
from pallas_gpu.lowering.families.shapes import broadcast_to
from pallas_gpu.lowering.inference import constraints
from pallas_gpu.lowering.inference.network import Key, Network
from pallas_gpu.lowering.rules import (
    expands,
    find_primitive,
    infers,
    lane,
    uniform,
    warpgroup,
)
from pallas_gpu.mosaic import elementwise, logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes, table
from pallas_gpu.mosaic.elements.row import Row
from pallas_gpu.primitives import _registry as registry

# Attributes: types of operands and result with their signs; lax's other parameters.
_DTYPES, _PARAMS = "dtypes", "params"
_REDUCTION = "vector.multi_reduction"


def _params_of(ctx: RuleContext, row: Row) -> dict[str, Any]:
    """Returns the emitter's parameters, with enumerations as numbers."""
    given = ctx.eqn.params
    params = {k: getattr(given[k], "value", given[k]) for k in row.params}
    exact = given.get("accuracy") is lax.AccuracyMode.HIGHEST
    if ctx.approx_math and row.approx is not None and not exact:
        params["approx_math"] = True
    return params


# --- checks ---------------------------------------------------------------------------


def _check(row: Row, op: Any, mesh: Any) -> None:
    """Refuses dtypes when the kernel is traced, before emulation and lowering alike."""
    row.case(np.dtype(op.inputs[row.typed_by].dtype))


# --- Lane -----------------------------------------------------------------------------


def _on_registers(row: Row, ctx: RuleContext, *operands: Any) -> Any:
    """The rule for arrays that have layouts, and for scalars."""
    shape = ctx.out_aval.shape
    # lax admits a scalar predicate or bound for a whole array.
    operands = tuple(vals.as_shape(x, shape) for x in operands)
    dtype = vals.numpy_dtype(ctx.out_aval)
    operands = agreed(ctx.kernel, operands)
    return elementwise.apply(row.name, *operands, to=dtype, **_params_of(ctx, row))


# --- Warpgroup ------------------------------------------------------------------------


def _on_arrays(row: Row, ctx: RuleContext, *operands: Any) -> Any:
    """The rule for arrays whose layouts are inferred."""
    shape = ctx.out_aval.shape
    if not shape:
        return _on_registers(row, ctx, *operands)
    dtype = vals.numpy_dtype(ctx.out_aval)
    wide = [broadcast_to(x, shape) for x in operands]
    return emit(row.name, wide, dtype, shape, **_params_of(ctx, row))


def emit(
    name: str,
    operands: Sequence[Any],
    dtype: np.dtype,
    shape: Sequence[int],
    **params: int | bool,
) -> vals.Vector:
    """Emits an elementwise operation of the warpgroup-level module.

    Args:
      name: lax's name.
      operands: vectors of one shape, and scalars, which are broadcast.
      dtype, shape: of the result.
      params: the parameters of lax that affect the result.
    """
    row = table.lookup(name)
    names = [*(x.dtype.name for x in operands), dtype.name]
    i64 = ir.IntegerType.get_signless(64)
    attributes = {
        _DTYPES: ir.ArrayAttr.get([ir.StringAttr.get(n) for n in names]),
        _PARAMS: ir.DictAttr.get(
            {k: ir.IntegerAttr.get(i64, int(v)) for k, v in params.items()}
        ),
    }
    op = ir.Operation.create(
        logical.OWN + row.name,
        [logical.vector_type(dtype, shape)],
        [x.value for x in operands],
        attributes,
    )
    return vals.Vector(op.result, dtype)


def convert(x: vals.Vector, dtype: np.dtype) -> vals.Vector:
    """Converts the elements of an array."""
    if x.dtype == dtype:
        return x
    return emit("convert_element_type", [x], dtype, x.shape)


# --- inference ------------------------------------------------------------------------


def _infer(row: Row, network: Network, op: ir.Operation, key: Key) -> None:
    """All arrays of the operation have one layout."""
    positions = constraints.vector_operands(op)
    (result,) = op.results
    if not constraints.is_vector(result):
        return
    if all(op.operands[i] in network.deferred for i in positions):
        network.defer(result, "made")
        return
    dtype = logical.dtype_of(op.operands[row.typed_by].type)
    approx_math = _PARAMS in op.attributes and "approx_math" in _params(op)
    cycles = row.cost(dtype, approx_math)
    variable = network.variable(op, result.type, key, cycles_per_element=cycles)
    for i in positions:
        network.consume(op, i, variable)
    network.produce(result, variable)


# --- expansion ------------------------------------------------------------------------


def _expand(row: Row, expansion: Expansion, op: Any) -> None:
    *operand_dtypes, dtype = (dtypes.named(a.value) for a in op.attributes[_DTYPES])
    shape = tuple(op.result.type.shape)
    operands = [
        _operand(expansion, op, i, operand_dtype, shape)
        for i, operand_dtype in enumerate(operand_dtypes)
    ]
    params = _params(op)
    if row.name == "exp" and "approx_math" not in params:
        params["summed"] = _is_only_summed(op.result)
    result = elementwise.apply(row.name, *operands, to=dtype, **params)
    expansion.set(op.result, result)
    expansion.dead.append(op.operation)


def _is_only_summed(value: ir.Value) -> bool:
    """Whether sums of an array's elements are all that uses it."""
    users = [use.owner for use in value.uses]
    return all(
        user.name == "vector.multi_reduction"
        and "<add>" in str(user.attributes["kind"])
        for user in users
    )


def _operand(
    expansion: Expansion, op: Any, i: int, dtype: np.dtype, shape: tuple[int, ...]
) -> regs.Array:
    value = op.operands[i]
    if is_array(value):
        return expansion.operand(op, i, dtype)
    return regs.Splat(value, dtype, shape)


def _params(op: Any) -> dict[str, Any]:
    params = {a.name: a.attr for a in op.attributes[_PARAMS]}
    return {k: ir.IntegerAttr(v).value for k, v in params.items()}


# --- the rules of all rows ------------------------------------------------------------


def enter_rules(rows: Iterable[Row]) -> None:
    """Registers the rules of some rows.

    Raises:
      InternalError: lax has no such primitive, or the primitive no such parameter; or
        rules are already registered for it.
    """
    for row in rows:
        primitive = _primitive(row)
        operation = logical.OWN + row.name
        lane(primitive)(_of(row, _on_registers))
        warpgroup(primitive)(_of(row, _on_arrays))
        registry.checks(primitive)(_of(row, _check))
        infers(operation)(_of(row, _infer))
        expands(operation)(_of(row, _expand))


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


@uniform("stop_gradient")
def _stop_gradient(ctx: RuleContext, x: Any) -> Any:
    return x


@uniform("copy")
def _copy(ctx: RuleContext, x: Any) -> Any:
    return x
