# SPDX-License-Identifier: Apache-2.0
"""The memory that an equation reads and writes, as declared by `define`."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import references as references  # describes them


@dataclasses.dataclass(frozen=True)
class Access:
    """One reference that an equation reads or writes.

    Attributes:
      operation: the operation of the equation.
      name: the operand's name.
      ref: the variable of the reference.
      space: its memory space.
      reads, writes: the kinds of access.
    """

    operation: registry.Operation
    name: str
    ref: Any
    space: types.Resource
    reads: bool
    writes: bool


def accesses(eqn: _jax.JaxprEqn) -> list[Access]:
    """Returns the references that an equation itself reads or writes.

    Accesses of jaxprs inside a loop or a branch are not included.
    """
    operation = registry.operation(eqn.primitive)
    if operation is None or not operation.accesses:
        return []
    named = _named_operands(operation, eqn)
    found = []
    # Several of one kind at once are a list.
    for operands in named if isinstance(named, list) else [named]:
        for name in operation.accesses:
            operand = operands[name]
            if not isinstance(operand, ops.RefOperand):
                continue  # absent, or an array in registers
            space = operand.ref.aval.memory_space
            reads, writes = name in operation.reads, name in operation.writes
            found.append(Access(operation, name, operand.ref, space, reads, writes))
    return found


def _named_operands(operation: registry.Operation, eqn: Any) -> Any:
    if operation.name in registry.JAX_PRIMITIVES:
        return {"ref": ops.RefOperand(eqn.invars[0])}
    return ops.unflatten(eqn.params["tree"], list(eqn.invars))
