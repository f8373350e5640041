# SPDX-License-Identifier: Apache-2.0
"""From a jaxpr to a program: calls inlined, references resolved to windows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax, errors
from pallas_gpu.primitives import _operands
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import references as references  # describes JAX's accesses
from pallas_gpu.program import simple
from pallas_gpu.program.bodies import bodies
from pallas_gpu.program.nodes import (
    Access,
    Constant,
    Fault,
    Kind,
    Op,
    Operand,
    Region,
    Value,
)

# Calls that are equivalent to the jaxpr in their parameters.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
_KINDS = {
    "scan": Kind.FOR,
    "parallel_loop": Kind.FOR,
    "staged_loop": Kind.FOR,
    "while": Kind.WHILE,
    "cond": Kind.IF,
    "run_scoped": Kind.SCOPE,
    "warp_map": Kind.WARPS,
}

Names = dict[Any, Operand]


def region_of(jaxpr: Any) -> Region:
    """Returns the program of a jaxpr, made once for each jaxpr object.

    Several threads may call it at a time.
    """
    if isinstance(jaxpr, _jax.ClosedJaxpr) and not jaxpr.consts:
        jaxpr = jaxpr.jaxpr
    region = _REGIONS.get(jaxpr)
    if region is None:
        region = _REGIONS[jaxpr] = _Builder(jaxpr).build()
    return region


# As long as the jaxpr exists, to which its region does not refer.
_REGIONS: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its consts, closed or not."""
    if isinstance(jaxpr, _jax.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def variables_of(jaxpr: Any) -> list[Any]:
    """Returns the variables that the inputs of a jaxpr's program are.

    The last ones are those of references and values that are captured while tracing.
    """
    jaxpr, consts = opened(jaxpr)
    given = dict(zip(jaxpr.constvars, consts, strict=False))
    captured = [
        var
        for var in jaxpr.constvars
        if isinstance(var.aval, _jax.AbstractRef)
        or var not in given
        or _jax.is_tracer(given[var])
    ]
    return [*jaxpr.invars, *captured]


class _Builder:
    def __init__(self, jaxpr: Any):
        self._jaxpr, self._consts = opened(jaxpr)
        self._variables = variables_of(jaxpr)
        self._within = weakref.ref(self._jaxpr)
        self._calls: tuple[Any, ...] = ()
        self._size = 0
        self._ops: list[Op] = []
        self._known: dict[Any, tuple[Value, ...]] = {}

    def build(self) -> Region:
        names: Names = {}
        inputs = tuple(self._value(var.aval) for var in self._variables)
        names.update(zip(self._variables, inputs, strict=True))
        for var, value in zip(self._jaxpr.constvars, self._consts, strict=False):
            if var not in names:
                names[var] = _constant(value)
        self._equations(self._jaxpr, names)
        results = tuple(_read(v, names) for v in self._jaxpr.outvars)
        return Region(inputs, tuple(self._ops), results, self._size)

    def _value(self, aval: Any) -> Value:
        self._size += 1
        return Value(self._size - 1, aval)

    def _equations(self, jaxpr: Any, names: Names) -> None:
        for eqn in simple.needed(jaxpr):
            ins = tuple(_read(v, names) for v in eqn.invars)
            call = CALLS.get(eqn.primitive.name)
            results: Sequence[Operand]
            if call is not None and call in eqn.params:
                results = self._inline(eqn, eqn.params[call], ins)
            else:
                results = self._op(eqn, ins)
            names.update(zip(eqn.outvars, results, strict=True))

    def _inline(self, eqn: Any, called: Any, ins: tuple[Operand, ...]) -> list[Operand]:
        jaxpr, consts = opened(called)
        names: Names = dict(zip(jaxpr.invars, ins, strict=True))
        names.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))
        outer = self._within, self._calls
        self._within, self._calls = weakref.ref(jaxpr), (*self._calls, eqn)
        self._equations(jaxpr, names)
        self._within, self._calls = outer
        return [_read(v, names) for v in jaxpr.outvars]

    def _op(self, eqn: Any, ins: tuple[Operand, ...]) -> tuple[Operand, ...]:
        if (same := simple.same(eqn, ins)) is not None:
            return (same,)
        kind = _KINDS.get(eqn.primitive.name, Kind.PLAIN)
        operation = registry.operation(eqn.primitive)
        is_pure = kind is Kind.PLAIN and operation is None
        key = simple.key(eqn, ins) if is_pure else None
        if key in self._known:
            return self._known[key]
        results = tuple(self._value(v.aval) for v in eqn.outvars)
        operands: Any = ins
        try:
            if kind is Kind.PLAIN:
                operands = _operands_of(eqn, ins, operation)
        except errors.PallasGpuError as error:
            operands = Fault(error.with_location(_jax.where(eqn)))
        params = {k: v for k, v in eqn.params.items() if k != "tree"}
        op = Op(
            kind, eqn.primitive, ins, operands, operation,
            _accesses(operation, operands), results, params,
            *_bodies(kind, eqn, ins), eqn, self._calls, self._within,
        )  # fmt: skip
        self._ops.append(op)
        if key is not None:
            self._known[key] = results
        return results


def _read(var: Any, names: Names) -> Operand:
    if isinstance(var, _jax.Literal):
        value = np.asarray(var.val, getattr(var.aval, "dtype", None))
        return Constant(value[()] if value.ndim == 0 else value)
    return names[var]


def _constant(value: Any) -> Constant:
    return Constant(np.asarray(value)[()])


# --- regions --------------------------------------------------------------------------

Bodies = tuple[
    tuple[Region, ...],
    tuple[tuple[Operand | None, ...], ...],
    tuple[tuple[int, int], ...],
]


def _bodies(kind: Kind, eqn: Any, ins: tuple[Operand, ...]) -> Bodies:
    """Returns the regions of an operation, their entries and the carries."""
    if kind is Kind.PLAIN:
        return (), (), ()
    named = {id(atom): x for atom, x in zip(eqn.invars, ins, strict=True)}
    found = bodies(eqn)
    regions = tuple(region_of(body.jaxpr) for body in found)
    entries = []
    for body, region in zip(found, regions, strict=True):
        given = [named.get(id(x)) for x in body.inputs]
        captured = len(region.inputs) - len(given)
        entries.append((*given, *(None,) * captured))
    first, carried = 0, 0
    if kind is Kind.FOR:
        first, carried = _jax.scan_arity(eqn.params)
    elif kind is Kind.WHILE:
        first, carried = eqn.params["body_nconsts"], len(eqn.outvars)
    carries = tuple((first + i, i) for i in range(carried))
    return regions, tuple(entries), carries


# --- operands -------------------------------------------------------------------------


def _operands_of(
    eqn: Any, ins: tuple[Operand, ...], operation: registry.Operation | None
) -> Any:
    """Returns the operands of an equation as a pytree with accesses."""
    if operation is None:
        return list(ins)
    if eqn.primitive in _INDICES_OF:
        first = _INDICES_OF[eqn.primitive]
        leaves = map(_index_or_self, ins[first:])
        transforms = jax.tree.unflatten(eqn.params["tree"], list(leaves))
        ref = _operands.RefOperand.of(ins[0], tuple(transforms))
        value = {} if first == 1 else {"value": ins[1]}
        return {"ref": _access("ref", ref, operation), **value}
    if "tree" not in eqn.params:
        return list(ins)
    tree = _operands.unflatten(eqn.params["tree"], [_index_or_self(x) for x in ins])
    return _named(tree, operation)


# Where the indices of JAX's accesses begin among the operands.
_INDICES_OF = {_jax.get_p: 1, _jax.swap_p: 2, _jax.addupdate_p: 2}


def _named(operands: Any, operation: registry.Operation) -> Any:
    match operands:
        case dict():
            return {name: _access(name, x, operation) for name, x in operands.items()}
        case list():
            return [_named(x, operation) for x in operands]
    return _access("", operands, operation)


def _access(name: str, operand: Any, operation: registry.Operation) -> Any:
    """Returns an operand with accesses and constants at its leaves."""
    if isinstance(operand, _operands.RefOperand):
        return Access(
            operand.ref, operand.window(operand.ref.shape), operand.transforms,
            operand.viewed, _as_operands(operand.owner), operation, name,
        )  # fmt: skip
    return _as_operands(operand)


def _as_operands(tree: Any) -> Any:
    """Returns a pytree with constants where indices may have been meant."""
    if tree is None or isinstance(tree, Value):
        return tree
    return jax.tree.map(lambda x: x.constant if isinstance(x, _Index) else x, tree)


def _accesses(
    operation: registry.Operation | None, operands: Any
) -> tuple[Access, ...]:
    """Returns the accesses among the operands that an operation reads or writes."""
    if operation is None or not operation.accesses or isinstance(operands, Fault):
        return ()
    # Several of one kind at once are a list.
    found = [
        named[name]
        for named in (operands if isinstance(operands, list) else [operands])
        for name in operation.accesses
    ]
    return tuple(x for x in found if isinstance(x, Access))


def _index_or_self(x: Operand) -> Any:
    """Returns the number of a constant index, so that it is static in windows."""
    if isinstance(x, Constant) and x.shape == () and x.dtype.kind in "iu":
        return _Index(x)
    return x


class _Index(int):
    """A constant that is an index in a window and a value elsewhere."""

    constant: Constant

    def __new__(cls, constant: Constant):
        self = super().__new__(cls, int(constant.value))
        self.constant = constant
        return self
