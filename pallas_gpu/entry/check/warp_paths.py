# SPDX-License-Identifier: Apache-2.0
"""Which equations in a `warp_map` the four warps execute alike, as far as is known.

A value may vary among the warps if it depends on the warp's index, on memory, or on the
time: whatever one reads, another may read differently. What is captured from outside,
and what is computed from that alone, does not vary. An equation is executed alike if no
branch and no number of iterations around it varies, and none of its scalar operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.walk import bodies


def executed_unevenly(warp_map: _jax.JaxprEqn) -> set[int]:
    """Returns the ids of the equations that the warps may not execute alike."""
    jaxpr = warp_map.params["jaxpr"]
    found = _Paths(warp_map.params["axis_name"])
    captured = [False] * (len(jaxpr.invars) - 1)
    found.run(jaxpr, [*captured, True], False)
    return found.uneven


@dataclasses.dataclass
class _Paths:
    """What is known of the values in a `warp_map`: whether they vary among the warps.

    Attributes:
      axis_name: name of the axis of warps, or None.
      uneven: ids of equations that the warps may not execute alike.
    """

    axis_name: str | None
    uneven: set[int] = dataclasses.field(default_factory=set)

    def run(
        self, jaxpr: _jax.Jaxpr, inputs: Sequence[bool], uneven: bool
    ) -> list[bool]:
        """Returns which results of a jaxpr vary; its equations are visited.

        Args:
          jaxpr: a body.
          inputs: which of its inputs vary.
          uneven: whether the warps may not execute it alike.
        """
        varying = {var for var, v in zip(jaxpr.invars, inputs, strict=True) if v}

        def varies(atom: Any) -> bool:
            return not isinstance(atom, _jax.Literal) and atom in varying

        for eqn in jaxpr.eqns:
            operands = [varies(atom) for atom in eqn.invars]
            if uneven or any(operands):
                self.uneven.add(id(eqn))
            results = self._results(eqn, operands, uneven)
            varying |= {var for var, v in zip(eqn.outvars, results, strict=True) if v}
        return [varies(atom) for atom in jaxpr.outvars]

    def _results(
        self, eqn: _jax.JaxprEqn, operands: list[bool], uneven: bool
    ) -> list[bool]:
        match eqn.primitive.name:
            case "cond":
                return self._branch(eqn, operands, uneven)
            case "while":
                return self._while(eqn, operands, uneven)
            case "scan":
                return self._scan(eqn, operands, uneven)
            case "axis_index":
                return [eqn.params["axis_name"] == self.axis_name]
        inner = bodies(eqn)
        if len(inner) == 1 and len(inner[0].jaxpr.outvars) == len(eqn.outvars):
            known = len(inner[0].jaxpr.invars) == len(operands)
            if known:
                return self.run(inner[0].jaxpr, operands, uneven)
        if inner:
            for body in inner:
                self.run(body.jaxpr, [True] * len(body.jaxpr.invars), True)
            return [True] * len(eqn.outvars)
        operation = registry.operation(eqn.primitive)
        reads = operation is not None and bool(operation.accesses)
        return [reads or any(operands)] * len(eqn.outvars)

    def _branch(
        self, eqn: _jax.JaxprEqn, operands: list[bool], uneven: bool
    ) -> list[bool]:
        uneven |= operands[0]
        each = [self.run(b.jaxpr, operands[1:], uneven) for b in bodies(eqn)]
        return [operands[0] or any(results) for results in zip(*each, strict=True)]

    def _while(
        self, eqn: _jax.JaxprEqn, operands: list[bool], uneven: bool
    ) -> list[bool]:
        condition, body = (b.jaxpr for b in bodies(eqn))
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of_condition, of_body = operands[:n_cond], operands[n_cond : n_cond + n_body]
        carry = operands[n_cond + n_body :]
        # Whether the number of iterations varies.
        ends = False
        while True:
            (end,) = self.run(condition, [*of_condition, *carry], uneven or ends)
            ends |= end
            after = self.run(body, [*of_body, *carry], uneven or ends)
            joined = [ends or a or b for a, b in zip(carry, after, strict=True)]
            if joined == carry:
                return carry
            carry = joined

    def _scan(
        self, eqn: _jax.JaxprEqn, operands: list[bool], uneven: bool
    ) -> list[bool]:
        n_consts, n_carry = _jax.scan_arity(eqn.params)
        (body,) = (b.jaxpr for b in bodies(eqn))
        carry = operands[n_consts : n_consts + n_carry]
        rest = operands[n_consts + n_carry :]
        while True:
            after = self.run(body, [*operands[:n_consts], *carry, *rest], uneven)
            joined = [a or b for a, b in zip(carry, after[:n_carry], strict=True)]
            if joined == carry:
                return [*carry, *after[n_carry:]]
            carry = joined
