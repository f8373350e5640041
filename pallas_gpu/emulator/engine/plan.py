# SPDX-License-Identifier: Apache-2.0
"""The plan of a jaxpr, built once: steps over numbered slots.

Calls (`jit`, `custom_jvp_call` …) are inlined. The remaining steps are of four kinds: a
scalar operation in NumPy, a run of pure equations compiled by JAX, an effect with a
rule, a loop or branch with effects inside. References are resolved to windows here, so
that a step only adds starts.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax, errors
from pallas_gpu.emulator.engine import scalars, segments
from pallas_gpu.emulator.engine.steps import (
    Const,
    ControlStep,
    EffectStep,
    FailStep,
    Location,
    Plan,
    RefTemplate,
    ScalarStep,
    Slot,
    slots_read,
)
from pallas_gpu.primitives import _operands
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.walk import bodies

# Calls that are equivalent to the jaxpr in their parameters.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}

# By the jaxpr itself: jaxprs are equal only where they are the same object.
_CACHE: collections.OrderedDict[Any, Plan] = collections.OrderedDict()
_CACHE_SIZE = 1024


def plan_of(jaxpr: Any) -> Plan:
    """Returns the plan of a jaxpr, made once for each jaxpr object."""
    plan = _CACHE.get(jaxpr)
    if plan is None:
        plan = _CACHE[jaxpr] = _Builder(jaxpr).build()
        if len(_CACHE) > _CACHE_SIZE:
            _CACHE.popitem(last=False)
    return plan


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its consts, closed or not."""
    if isinstance(jaxpr, _jax.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def is_pure(eqn: Any) -> bool:
    """True for an equation that JAX alone can evaluate."""
    if registry.operation(eqn.primitive) is not None:
        # Our primitives without an effect have a lowering for the CPU.
        return not eqn.effects
    if eqn.effects:
        return False
    if any(isinstance(v.aval, _jax.AbstractRef) for v in eqn.invars):
        return False
    inner = bodies(eqn)
    if registry.rule(eqn.primitive, registry.RuleKind.EMULATE) and not inner:
        return False
    return all(is_pure(inner_eqn) for body in inner for inner_eqn in body.jaxpr.eqns)


class _Builder:
    def __init__(self, jaxpr: Any):
        self.jaxpr, self.consts = opened(jaxpr)
        self.size = 0
        self.steps: list[Any] = []
        # Pure equations of the current run, as (eqn, operands, slots).
        self.pending: list[tuple[Any, list[Any], list[Slot]]] = []
        self.pending_slots: set[int] = set()

    def build(self) -> Plan:
        names: dict[Any, Any] = {}
        for var in self.jaxpr.invars:
            names[var] = self._slot(var.aval)
        for var, const in zip(self.jaxpr.constvars, self.consts, strict=True):
            names[var] = Const(const)
        self._equations(self.jaxpr.eqns, names)
        self._flush()
        outs = tuple(self._read(v, names) for v in self.jaxpr.outvars)
        self._drop_unread(outs)
        return Plan(self.size, self.steps, outs)

    def _slot(self, aval: Any) -> Slot:
        self.size += 1
        return Slot(self.size - 1, aval)

    def _read(self, var: Any, names: dict[Any, Any]) -> Any:
        if isinstance(var, _jax.Literal):
            value = np.asarray(var.val, getattr(var.aval, "dtype", None))
            return Const(value[()] if value.ndim == 0 else value)
        return names[var]

    def _equations(self, eqns: Sequence[Any], names: dict[Any, Any]) -> None:
        for eqn in eqns:
            ins = [self._read(v, names) for v in eqn.invars]
            call = _CALLS.get(eqn.primitive.name)
            if call is not None and call in eqn.params:
                results = self._inline(eqn.params[call], ins)
            else:
                results = self._equation(eqn, ins)
            names.update(zip(eqn.outvars, results, strict=True))

    def _inline(self, jaxpr: Any, ins: list[Any]) -> list[Any]:
        jaxpr, consts = opened(jaxpr)
        names: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        names.update(zip(jaxpr.constvars, map(Const, consts), strict=True))
        self._equations(jaxpr.eqns, names)
        return [self._read(v, names) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Any]) -> list[Slot]:
        outs = [self._slot(v.aval) for v in eqn.outvars]
        if is_pure(eqn):
            self._pure(eqn, ins, outs)
            return outs
        self._flush()
        try:
            self.steps.append(self._effect(eqn, ins, outs))
        except errors.PallasGpuError as error:
            self.steps.append(FailStep(error.with_location(_jax.where(eqn))))
        return outs

    def _pure(self, eqn: Any, ins: list[Any], outs: list[Slot]) -> None:
        waits = any(isinstance(x, Slot) and x.index in self.pending_slots for x in ins)
        fn = None if waits else scalars.function(eqn)
        if fn is not None:
            self.steps.append(ScalarStep(fn, tuple(ins), outs[0].index))
            return
        self.pending.append((eqn, ins, outs))
        self.pending_slots.update(s.index for s in outs)

    def _flush(self) -> None:
        if self.pending:
            self.steps.append(self.pending)
            self.pending = []
            self.pending_slots = set()

    def _effect(self, eqn: Any, ins: list[Any], outs: list[Slot]) -> Any:
        indices = tuple(s.index for s in outs)
        rule = registry.rule(eqn.primitive, registry.RuleKind.EMULATE)
        if rule is None:
            raise errors.NotModelledError(
                f"the emulator does not model {eqn.primitive.name}",
                expected="an operation of the coverage table",
                hint="run the kernel on a GPU, or compute this outside the kernel",
            )
        if bodies(eqn):
            return ControlStep(rule, tuple(ins), indices, eqn.params, Location(eqn))
        params = {k: v for k, v in eqn.params.items() if k != "tree"}
        return EffectStep(
            rule, _operands_of(eqn, ins), params, indices, (True,) * len(indices),
            not eqn.primitive.multiple_results, Location(eqn),
        )  # fmt: skip

    def _drop_unread(self, outs: tuple[Any, ...]) -> None:
        """Records which results of effects are read, and compiles pure runs."""
        read = {x.index for x in outs if isinstance(x, Slot)}
        steps: list[Any] = []
        for step in reversed(self.steps):
            if isinstance(step, list):
                step = segments.compile_run(step, read, self.jaxpr.debug_info)
                if step is None:
                    continue
                steps.append(step)
                read.update(step.ins)
                continue
            if isinstance(step, EffectStep):
                step.used = tuple(i in read for i in step.outs)
            steps.append(step)
            read.update(slots_read(step))
        self.steps = steps[::-1]


def _operands_of(eqn: Any, ins: list[Any]) -> Any:
    """Returns the operands of an equation as a pytree of templates."""
    if eqn.primitive is _jax.get_p:
        return {"ref": _template(_state_ref(eqn, ins[0], ins[1:]))}
    if eqn.primitive in (_jax.swap_p, _jax.addupdate_p):
        ref = _template(_state_ref(eqn, ins[0], ins[2:]))
        return {"ref": ref, "value": ins[1]}
    if "tree" not in eqn.params:
        return list(ins)
    tree = _operands.unflatten(eqn.params["tree"], [_index_or_self(x) for x in ins])
    return jax.tree.map(
        _template, tree, is_leaf=lambda x: isinstance(x, _operands.RefOperand)
    )


def _state_ref(eqn: Any, ref: Any, leaves: list[Any]) -> Any:
    transforms = jax.tree.unflatten(
        eqn.params["tree"], [_index_or_self(x) for x in leaves]
    )
    return _operands.RefOperand(ref, tuple(transforms))


def _index_or_self(x: Any) -> Any:
    """Returns the number of a constant index, so that it is static in windows."""
    if isinstance(x, Const) and scalars.is_scalar(x.value):
        return _Index(x.value) if x.value.dtype != np.bool_ else x
    return x


class _Index(int):
    """A constant that is an index in a window and a value elsewhere."""

    value: Any

    def __new__(cls, value: Any):
        self = super().__new__(cls, int(value))
        self.value = value
        return self


def _template(leaf: Any) -> Any:
    if isinstance(leaf, _operands.RefOperand):
        return RefTemplate(leaf.ref, leaf.window(leaf.ref.shape))
    if isinstance(leaf, _Index):
        return Const(leaf.value)
    return leaf
