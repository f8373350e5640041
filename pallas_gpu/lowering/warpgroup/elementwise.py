# SPDX-License-Identifier: Apache-2.0
"""Elementwise operations on whole arrays.

An operation keeps lax's name until its arrays have layouts: the emitters' table gives
the same operation different instructions for different types and parameters, and
inference only has to know that all arrays of it lie alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.shapes import spread
from pallas_gpu.lowering.lax import elementwise as lane_rules
from pallas_gpu.lowering.rules import warpgroup
from pallas_gpu.mosaic import logical

# Attributes: types of operands and result with their signs; lax's other parameters.
DTYPES, PARAMS = "dtypes", "params"


def emit(
    name: str,
    operands: Sequence[Any],
    dtype: np.dtype,
    shape: Sequence[int],
    **params: int | bool,
) -> vals.Vector:
    """Emits an elementwise operation.

    Args:
      name: lax's name.
      operands: vectors of one shape, and scalars, which stand for splats.
      dtype, shape: of the result.
      params: lax's parameters that matter.
    """
    names = [*(x.dtype.name for x in operands), dtype.name]
    i64 = ir.IntegerType.get_signless(64)
    attributes = {
        DTYPES: ir.ArrayAttr.get([ir.StringAttr.get(n) for n in names]),
        PARAMS: ir.DictAttr.get(
            {k: ir.IntegerAttr.get(i64, int(v)) for k, v in params.items()}
        ),
    }
    op = ir.Operation.create(
        logical.ELEMENTWISE + name,
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


def _make_rule(name: str, kept: tuple[str, ...]):
    scalar_rule = lane_rules.make_rule(name, kept)

    def rule(ctx: RuleContext, *operands: Any) -> Any:
        if not ctx.out_aval.shape:
            return scalar_rule(ctx, *operands)
        dtype = vals.numpy_dtype(ctx.out_aval)
        params = lane_rules.params_of(ctx, kept)
        if ctx.approx_math:
            params["approx_math"] = True
        shape = ctx.out_aval.shape
        return emit(name, [spread(x, shape) for x in operands], dtype, shape, **params)

    return rule


for _name, _kept in lane_rules.TABLE.items():
    if lane_rules.available(_name):
        warpgroup(_name)(_make_rule(_name, _kept))

# What `emit` can emit, without the prefix.
OPERATIONS = (*filter(lane_rules.available, lane_rules.TABLE), "convert_element_type")


@warpgroup("convert_element_type")
def _convert(ctx: RuleContext, x: Any) -> Any:
    if vals.is_scalar(x):
        return lane_rules.convert(ctx, x)
    return convert(x, vals.numpy_dtype(ctx.out_aval))
