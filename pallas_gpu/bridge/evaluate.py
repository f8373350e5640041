# SPDX-License-Identifier: Apache-2.0
"""The equations of a received body, evaluated over this package's references."""

from __future__ import annotations

from typing import Any

import jax

from pallas_gpu import _jax, errors, types
from pallas_gpu.bridge.control import require_values
from pallas_gpu.bridge.rules import RULES, Evaluation
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.bodies import bodies
from pallas_gpu.program.rewrite import is_followed


class Evaluator(Evaluation):
    """Evaluates jaxprs of one body, in which nothing stays a call.

    Raises UnsupportedError for an equation without a counterpart in this package.
    """

    def is_replaced(self, eqn: _jax.JaxprEqn) -> bool:
        return True

    def results(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any] | None:
        name = eqn.primitive.name
        ours = registry.PRIMITIVES.get(name)
        if ours is not None and ours.primitive is eqn.primitive:
            return _ours(eqn, operands)
        if name in RULES:
            return RULES[name](self, eqn, operands)
        if is_followed(eqn):
            require_values(eqn, operands)
            return None
        if any(types.base_aval(x) is not None for x in operands):
            raise _unsupported(eqn)
        return None


def _ours(eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    """Binds an operation of this package to the references of this trace."""
    params = dict(eqn.params)
    if "tree" not in params:
        if bodies(eqn):
            raise _unsupported(eqn)
        with _jax.trace_without_ref_rules():
            return _jax.bind_again(eqn, operands)
    given = ops.unflatten(params.pop("tree"), operands)
    whole = jax.tree.map(_joined, given, is_leaf=_is_operand)
    results = ops.bind(eqn.primitive, whole, **params)
    if not eqn.primitive.multiple_results:
        return [results]
    return [] if results is None else list(results)


def _is_operand(x: Any) -> bool:
    return isinstance(x, ops.RefOperand)


def _joined(operand: Any) -> Any:
    """Returns an operand whose reference may be a view as one with all its steps."""
    if not _is_operand(operand) or not isinstance(operand.ref, _jax.TransformedRef):
        return operand
    base = ops.operand(operand.ref)
    return ops.RefOperand(
        base.ref, (*base.transforms, *operand.transforms), operand.owner or base.owner
    )


def _unsupported(eqn: _jax.JaxprEqn) -> errors.UnsupportedError:
    name = eqn.primitive.name
    return errors.UnsupportedError(
        f"the operation {name} is not supported in a body of pl.pallas_call",
        expected="operations on arrays, and " + ", ".join(sorted(RULES)),
        got=f"{name} on {', '.join(str(v.aval) for v in eqn.invars)}",
        hint="write the kernel with plgpu.kernel or plgpu.pallas_call",
    )
