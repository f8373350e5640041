# SPDX-License-Identifier: Apache-2.0
"""The equations of a received body, evaluated over this package's references.

A load of SMEM is postponed until something uses its value: a matrix product reads its
operands from SMEM, without registers in between. It is not postponed past an equation
that may write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors, types
from pallas_gpu.bridge.rules import LAZY, RULES
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry


class Unread:
    """The contents of a reference that have not been loaded yet.

    Attributes:
      view: the part of the reference.
    """

    def __init__(self, view: types.RefView, eqn: _jax.JaxprEqn):
        self.view = view
        self._eqn = eqn
        self._value: Any = None

    @property
    def is_pending(self) -> bool:
        """Whether the contents are still those of the reference."""
        return self._value is None

    def read(self) -> Any:
        """Returns the value, which is loaded the first time."""
        if self._value is None:
            with _jax.at_line_of(self._eqn):
                self._value = self.view.get()
        return self._value


class Transposed:
    """The transpose of a value, or of one that has not been loaded yet.

    Attributes:
      operand: what is transposed.
    """

    def __init__(self, operand: Any, eqn: _jax.JaxprEqn):
        self.operand = operand
        self._eqn = eqn
        self._value: Any = None

    def read(self) -> Any:
        """Returns the transposed value."""
        if self._value is None:
            with _jax.at_line_of(self._eqn):
                (self._value,) = _jax.bind_again(self._eqn, [read(self.operand)])
        return self._value


def read(value: Any) -> Any:
    """Returns a value that may have been postponed."""
    return value.read() if isinstance(value, Unread | Transposed) else value


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates jaxprs of one body.

    Attributes:
      axes: see `rules.Evaluation`.
    """

    axes: tuple[int, ...]

    def evaluate(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr and returns its results.

        Args:
          jaxpr: open or closed.
          operands: values and references for its inputs, without consts.

        Raises:
          UnsupportedError: an equation has no counterpart in this package.
        """
        consts = _jax.consts_of(jaxpr)
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        known = dict(zip(inputs, [*consts, *operands], strict=True))
        last = _last_uses(jaxpr)

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else known[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            with _jax.at_line_of(eqn):
                if _may_write(eqn):
                    for var, value in known.items():
                        if last.get(var, -1) >= i:
                            _load(value)
                results = self._located(eqn, [value_of(x) for x in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(value_of(x)) for x in jaxpr.outvars]

    def _located(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
        try:
            return self._equation(eqn, operands)
        except errors.PallasGpuError as error:
            error.with_location(_jax.where_now())
            raise

    def _equation(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name not in LAZY:
            operands = [read(x) for x in operands]
        ours = registry.PRIMITIVES.get(name)
        if ours is not None and ours.primitive is eqn.primitive:
            return _ours(eqn, operands)
        if name in RULES:
            return RULES[name](self, eqn, operands)
        if any(types.base_aval(x) is not None for x in operands):
            raise _unsupported(eqn)
        return _jax.bind_again(eqn, operands)


def _load(value: Any) -> None:
    """Loads what a value depends on, before it is overwritten."""
    while isinstance(value, Transposed):
        value = value.operand
    read(value)


def _last_uses(jaxpr: _jax.Jaxpr) -> dict[Any, int]:
    """Returns for each variable the number of the last equation that uses it."""
    last = {x: i for i, eqn in enumerate(jaxpr.eqns) for x in _variables(eqn.invars)}
    return last | dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, _jax.Literal)]


def _may_write(eqn: _jax.JaxprEqn) -> bool:
    return any(not isinstance(e, _jax.ReadEffect) for e in eqn.effects)


def _ours(eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    """Binds an operation of this package to the references of this trace."""
    params = dict(eqn.params)
    if "tree" not in params:  # with a body of its own
        raise _unsupported(eqn)
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
    return ops.RefOperand(base.ref, (*base.transforms, *operand.transforms))


def _unsupported(eqn: _jax.JaxprEqn) -> errors.UnsupportedError:
    name = eqn.primitive.name
    return errors.UnsupportedError(
        f"the operation {name} is not supported in a body of pl.pallas_call",
        expected="operations on arrays, and " + ", ".join(sorted(RULES)),
        got=f"{name} on {', '.join(str(v.aval) for v in eqn.invars)}",
        hint=HINTS.get(name, "write the kernel with plgpu.kernel or plgpu.pallas_call"),
        where=_jax.where_now(),
    )


HINTS: dict[str, str] = {
    **dict.fromkeys(
        ("semaphore_read", "semaphore_signal", "semaphore_wait"),
        "declare a barrier, plgpu.Barrier, in scratch_shapes; use plgpu.barrier_arrive "
        "and plgpu.barrier_wait",
    ),
}
