# SPDX-License-Identifier: Apache-2.0
"""Which operations of a plan have been executed.

A plan that is observed is a copy, each step of which puts the original in its own place
when it is executed for the first time. So counting costs what the first execution of
each step costs, and a plan that is not observed is not concerned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emulator.engine.steps import (
    ArithmeticStep,
    ControlStep,
    EffectStep,
    FailStep,
    Plan,
)
from pallas_gpu.program.nodes import Op


class Coverage:
    """The executed operations of a plan and of those in it.

    Attributes:
      plan: a copy, to be executed instead.
    """

    def __init__(self, plan: Plan):
        # Operations that have not been executed; a step for each result.
        self._left: dict[int, set[int]] = {}
        self._ops: dict[int, tuple[Op, str | None]] = {}
        self._failing: list[FailStep] = []
        self._copies: dict[int, Plan] = {}
        self.plan = self._observed(plan, None)

    @property
    def total(self) -> int:
        """How many operations there are, without those whose results nobody reads."""
        return len(self._ops)

    @property
    def executed(self) -> int:
        """How many have been executed."""
        return self.total - sum(1 for _ in self.missing())

    def missing(self) -> Iterator[tuple[Op, str | None]]:
        """Yields the operations that have not been executed, and their lines.

        The line of what is around it stands for one of the package's own.
        """
        for key, left in self._left.items():
            if left:
                yield self._ops[key]

    def not_modelled(self) -> Iterator[errors.UnsupportedError]:
        """Yields the errors of operations that cannot be executed."""
        for step in self._failing:
            if isinstance(step.error, errors.UnsupportedError):
                yield step.error

    def _observed(self, plan: Plan, around: str | None) -> Plan:
        copy = self._copies.get(id(plan))
        if copy is None:
            copy = dataclasses.replace(plan, steps=list(plan.steps))
            self._copies[id(plan)] = copy
            for i, step in enumerate(plan.steps):
                copy.steps[i] = self._step(copy.steps, i, step, around)
        return copy

    def _step(self, steps: list[Any], i: int, step: Any, around: str | None) -> Any:
        op = step.op if not isinstance(step, EffectStep) else step.location.op
        key, where = id(op), op.where or around
        self._ops[key] = op, where
        left = self._left.setdefault(key, set())
        left.add(id(step))
        if isinstance(step, FailStep):
            self._failing.append(step)
            return step
        this = id(step)
        if isinstance(step, ControlStep):
            plans = tuple(self._observed(plan, where) for plan in step.plans)
            step = dataclasses.replace(step, plans=plans)
        original = step

        def executed() -> None:
            left.discard(this)
            steps[i] = original

        def rule(*args: Any, **params: Any) -> Any:
            executed()
            return original.rule(*args, **params)

        def run(env: list[Any]) -> Any:
            executed()
            return original.run(env)

        if isinstance(step, ArithmeticStep):
            return dataclasses.replace(step, run=run)
        return dataclasses.replace(step, rule=rule)
