# SPDX-License-Identifier: Apache-2.0
"""Elementwise operations: the emitters' table, register by register."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lowering.expansion.walk import Expansion, is_array
from pallas_gpu.lowering.inference.constraints import is_vector, vector_operands
from pallas_gpu.lowering.inference.network import Network
from pallas_gpu.lowering.rules import expands, infers
from pallas_gpu.lowering.warpgroup.elementwise import DTYPES, OPERATIONS, PARAMS
from pallas_gpu.mosaic import elementwise, logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes

_NAMES = tuple(logical.ELEMENTWISE + name for name in OPERATIONS)


@infers(*_NAMES)
def _infer(network: Network, op: ir.Operation, key: int) -> None:
    """All arrays of an elementwise operation have one layout."""
    positions = vector_operands(op)
    (result,) = op.results
    if not is_vector(result):
        return
    if all(op.operands[i] in network.deferred for i in positions):
        network.defer(result, "made")
        return
    variable = network.variable(op, result.type, key, computes=True)
    for i in positions:
        network.consume(op, i, variable)
    network.produce(result, variable)


@expands(*_NAMES)
def _expand(expansion: Expansion, op: Any) -> None:
    name = op.operation.name.removeprefix(logical.ELEMENTWISE)
    *operand_dtypes, dtype = (dtypes.named(a.value) for a in op.attributes[DTYPES])
    shape = tuple(op.result.type.shape)
    operands = [
        _operand(expansion, op, i, operand_dtype, shape)
        for i, operand_dtype in enumerate(operand_dtypes)
    ]
    if name == "convert_element_type":
        result = elementwise.astype(operands[0], dtype)
    else:
        result = elementwise.apply(name, *operands, **_params(op))
    expansion.set(op.result, result)
    expansion.dead.append(op.operation)


def _operand(
    expansion: Expansion, op: Any, i: int, dtype: np.dtype, shape: tuple[int, ...]
) -> regs.Array:
    value = op.operands[i]
    if is_array(value):
        return expansion.operand(op, i, dtype)
    return regs.Splat(value, dtype, shape)


def _params(op: Any) -> dict[str, Any]:
    params = {a.name: a.attr for a in op.attributes[PARAMS]}
    return {k: ir.IntegerAttr(v).value for k, v in params.items()}
