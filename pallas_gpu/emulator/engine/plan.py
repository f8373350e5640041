# SPDX-License-Identifier: Apache-2.0
"""The plan of a jaxpr, built once: steps over numbered slots.

Calls (`jit`, `custom_jvp_call` …) are inlined. The remaining steps are of three kinds:
a pure operation in NumPy, an effect with a rule, a loop or branch. References are
resolved to windows here, so that a step only adds starts.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax, errors
from pallas_gpu.emulator.engine.pure import arithmetic, by_jax, scalars
from pallas_gpu.emulator.engine.steps import (
    ArithmeticStep,
    Const,
    ControlStep,
    EffectStep,
    FailStep,
    Location,
    Plan,
    RefTemplate,
    Slot,
    binder,
    slots_read,
)
from pallas_gpu.primitives import _indices, _operands
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.walk import bodies

# Calls that are equivalent to the jaxpr in their parameters.
_CALLS = {
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

# A step of the emulator takes about as long as NumPy for these many elements.
_ELEMENTS_PER_STEP = 4096


def plan_of(jaxpr: Any) -> Plan:
    """Returns the plan of a jaxpr, made once for each jaxpr object.

    Several threads may call it at a time.
    """
    plan = _PLANS.get(jaxpr)
    if plan is None:
        plan = _PLANS[jaxpr] = _Builder(jaxpr).build()
    return plan


# As long as the jaxpr exists, to which its plan does not refer. A plan of a small
# kernel holds 20 KB, and up to 30 KB for each reference with changing indices.
_PLANS: weakref.WeakKeyDictionary[Any, Plan] = weakref.WeakKeyDictionary()


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its consts, closed or not."""
    if isinstance(jaxpr, _jax.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


class _Builder:
    def __init__(self, jaxpr: Any):
        self.jaxpr, self.consts = opened(jaxpr)
        self.within = self.jaxpr
        self.size = 0
        self.steps: list[Any] = []
        self.work = 0

    def build(self) -> Plan:
        names: dict[Any, Any] = {}
        for var in self.jaxpr.invars:
            names[var] = self._slot(var.aval)
        for var, const in zip(self.jaxpr.constvars, self.consts, strict=True):
            names[var] = _constant(const)
        self._equations(self.jaxpr.eqns, names)
        outs = tuple(self._read(v, names) for v in self.jaxpr.outvars)
        self._drop_unread(outs)
        return Plan(self.size, self.steps, outs, self.work)

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
            elif eqn.primitive.name == "optimization_barrier":
                results = ins
            else:
                results = self._equation(eqn, ins)
            names.update(zip(eqn.outvars, results, strict=True))

    def _inline(self, jaxpr: Any, ins: list[Any]) -> list[Any]:
        jaxpr, consts = opened(jaxpr)
        names: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        names.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))
        outer, self.within = self.within, jaxpr
        self._equations(jaxpr.eqns, names)
        self.within = outer
        return [self._read(v, names) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Any]) -> list[Slot]:
        outs = [self._slot(v.aval) for v in eqn.outvars]
        try:
            self.steps += self._steps(eqn, ins, outs)
        except errors.PallasGpuError as error:
            self.steps.append(FailStep(error.with_location(_jax.where(eqn))))
        return outs

    def _steps(self, eqn: Any, ins: list[Any], outs: list[Slot]) -> list[Any]:
        """Returns the steps of an equation: one, or one for each result."""
        if registry.rule(eqn.primitive, registry.RuleKind.EMULATE) is None:
            row = arithmetic.function(eqn)
            functions = by_jax.functions(eqn) if row is None else [row]
            if functions is not None:
                self._count(*ins, *outs)
                steps = [
                    ArithmeticStep(fn, tuple(ins), out.index)
                    for fn, out in zip(functions, outs, strict=True)
                ]
                if _indices.is_index(self.within, eqn.outvars[0]):
                    steps = [_without_wrap(eqn, step) for step in steps]
                return steps
        return [self._step(eqn, ins, outs)]

    def _step(self, eqn: Any, ins: list[Any], outs: list[Slot]) -> Any:
        indices = tuple(s.index for s in outs)
        rule = registry.rule(eqn.primitive, registry.RuleKind.EMULATE)
        if rule is not None and not eqn.effects and not bodies(eqn):
            # The rule of a primitive without effects is a function of its operands.
            self._count(*outs)
            return ArithmeticStep(
                functools.partial(rule, **eqn.params), tuple(ins), indices[0]
            )
        if rule is None:
            raise errors.NotModelledError(
                f"the emulator does not model {eqn.primitive.name}",
                expected="an operation of the coverage table",
                hint="run the kernel on a GPU, or compute this outside the kernel",
            )
        if bodies(eqn):
            return ControlStep(rule, tuple(ins), indices, eqn.params, Location(eqn))
        params = {k: v for k, v in eqn.params.items() if k != "tree"}
        operands = _operands_of(eqn, ins)
        self._count(*jax.tree.leaves(operands))
        self.work += 1
        return EffectStep(
            rule, operands, binder(operands), params, indices,
            not eqn.primitive.multiple_results, Location(eqn),
        )  # fmt: skip

    def _count(self, *operands: Any) -> None:
        """Counts the work of a step, by its largest operand."""
        sizes = [_elements(x) for x in operands]
        self.work += max(sizes, default=0) // _ELEMENTS_PER_STEP

    def _drop_unread(self, outs: tuple[Any, ...]) -> None:
        """Removes pure steps whose results are unread, and marks those of effects."""
        read = {x.index for x in outs if isinstance(x, Slot)}
        steps: list[Any] = []
        for step in reversed(self.steps):
            match step:
                case ArithmeticStep() if step.out not in read:
                    continue
                case EffectStep():
                    step.params["used"] = tuple(i in read for i in step.outs)
            steps.append(step)
            read.update(slots_read(step))
        self.steps = steps[::-1]


_EXACT: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
}


def _without_wrap(eqn: Any, step: ArithmeticStep) -> ArithmeticStep:
    """Makes a step that computes an index report a result that wraps."""
    exact = _EXACT.get(eqn.primitive.name)
    if exact is None:
        return step
    compute, ins, out = step.run, step.ins, step.out

    def run(env: list[Any]) -> Any:
        result = compute(env)
        number = exact(*[int(x.bind(env)) for x in ins])
        if number != result:
            raise _indices.overflow(
                eqn.outvars[0].aval.dtype.name, number, _jax.where(eqn)
            )
        return result

    return ArithmeticStep(step.fn, ins, out, run)


def _elements(operand: Any) -> int:
    if isinstance(operand, RefTemplate):
        return math.prod(operand.window.sizes)
    return math.prod(getattr(operand, "shape", ()))


def _constant(value: Any) -> Const:
    return Const(np.asarray(value)[()])


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
        return RefTemplate(leaf.ref, leaf.window(leaf.ref.shape), leaf.viewed)
    if isinstance(leaf, _Index):
        return Const(leaf.value)
    return leaf
