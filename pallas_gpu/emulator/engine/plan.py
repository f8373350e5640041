# SPDX-License-Identifier: Apache-2.0
"""The plan of a region, built once: a step for each operation.

The steps are of three kinds: a pure operation in NumPy, an effect with a rule, a loop
or branch. A step only adds the starts of its windows.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import errors
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.pure import arithmetic, by_jax
from pallas_gpu.emulator.engine.steps import (
    ArithmeticStep,
    ControlStep,
    EffectStep,
    FailStep,
    Location,
    Plan,
    binder,
    bound,
    slots_read,
)
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program import indices
from pallas_gpu.program.build import region_of
from pallas_gpu.program.nodes import Access, Fault, Kind, Op, Region, Value

# A step of the emulator takes about as long as NumPy for these many elements.
_ELEMENTS_PER_STEP = 4096


def plan_of(jaxpr: Any, machine: str = registry.GPU) -> Plan:
    """Returns the plan of a jaxpr, made once for each jaxpr object.

    Several threads may call it at a time.

    Args:
      jaxpr: the body of a kernel.
      machine: whose rules run it.
    """
    return _plan_of_region(region_of(jaxpr), machine)


def _plan_of_region(region: Region, machine: str) -> Plan:
    plan = _PLANS.get(region)
    if plan is None:
        plan = _PLANS[region] = _Builder(region, machine).build()
    return plan


# As long as the jaxpr exists, to which neither its region nor its plan refers. A plan
# of a small kernel holds 20 KB, and up to 30 KB for each reference with changing
# indices.
_PLANS: weakref.WeakKeyDictionary[Region, Plan] = weakref.WeakKeyDictionary()


class _Builder:
    def __init__(self, region: Region, machine: str):
        self._region, self._machine = region, machine
        self._steps: list[Any] = []
        self._work = 0

    def build(self) -> Plan:
        for op in self._region.ops:
            try:
                self._steps += self._steps_of(op)
            except errors.PallasGpuError as error:
                self._steps.append(FailStep(op, error.with_location(op.where)))
        self._drop_unread()
        region = self._region
        return Plan(region.size, self._steps, region.results, self._work)

    def _steps_of(self, op: Op) -> list[Any]:
        """Returns the steps of an operation: one, or one for each result."""
        rule = registry.rule(op.primitive, registry.RuleKind.EMULATE, self._machine)
        if rule is not None:
            return [self._step(op, rule)]
        row = arithmetic.function(op.equation)
        functions = by_jax.functions(op.equation) if row is None else [row]
        if functions is None:
            raise errors.NotModelledError(
                f"the emulator does not model {op.name}",
                expected="an operation of the coverage table",
                hint="run the kernel on a GPU, or compute this outside the kernel",
            )
        self._count(*op.inputs, *op.results)
        steps = [
            ArithmeticStep(op, fn, op.inputs, out.index)
            for fn, out in zip(functions, op.results, strict=True)
        ]
        if indices.is_index(op.results[0]):
            steps = [_without_wrap(op, step) for step in steps]
        return steps

    def _step(self, op: Op, rule: Callable[..., Any]) -> Any:
        if isinstance(op.operands, Fault):
            return FailStep(op, op.operands.error)
        if op.kind is not Kind.PLAIN:
            plans = tuple(_plan_of_region(r, self._machine) for r in op.regions)
            return ControlStep(rule, op, plans, Location(op))
        if not op.equation.effects:
            # The rule of a primitive without effects is a function of its operands.
            self._count(*op.results)
            run = functools.partial(rule, **op.equation.params)
            return ArithmeticStep(op, run, op.inputs, op.results[0].index)
        self._count(*jax.tree.leaves(op.operands))
        self._work += 1
        return EffectStep(
            rule, op.operands, binder(op.operands), dict(op.params),
            tuple(s.index for s in op.results),
            not op.primitive.multiple_results, Location(op),
        )  # fmt: skip

    def _count(self, *operands: Any) -> None:
        """Counts the work of a step, by its largest operand."""
        sizes = [_elements(x) for x in operands]
        self._work += max(sizes, default=0) // _ELEMENTS_PER_STEP

    def _drop_unread(self) -> None:
        """Removes pure steps whose results are unread, and marks those of effects."""
        read = {x.index for x in self._region.results if isinstance(x, Value)}
        steps: list[Any] = []
        for step in reversed(self._steps):
            match step:
                case ArithmeticStep() if step.out not in read:
                    continue
                case EffectStep():
                    step.params["used"] = tuple(i in read for i in step.outs)
            steps.append(step)
            read.update(slots_read(step))
        self._steps = steps[::-1]


def _without_wrap(op: Op, step: ArithmeticStep) -> ArithmeticStep:
    """Makes a step that computes an index report a result that wraps."""
    exact = indices.WRAPPING.get(op.name)
    if exact is None:
        return step
    compute, ins, out = step.run, step.ins, step.out

    def run(env: list[Any]) -> Any:
        result = compute(env)
        number = exact(*map(int, bound(ins, env)))
        if number != result:
            report(indices.overflow(op.results[0].dtype.name, number, op.where))
        return result

    return ArithmeticStep(op, step.fn, ins, out, run)


def _elements(operand: Any) -> int:
    if isinstance(operand, Access):
        return math.prod(operand.window.sizes)
    return math.prod(getattr(operand, "shape", ()))
