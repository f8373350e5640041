# SPDX-License-Identifier: Apache-2.0
"""Loops whose iterations are independent.

Each iteration is an actor of its own: what it accesses is in no order with the accesses
of the others. So those that conflict are reported as races.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import evaluate, ordering
from pallas_gpu.emulator.engine.operations.control import begin_iteration, decided
from pallas_gpu.emulator.engine.steps import ControlStep
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.sparsecore.emulator.cores import Subcore
from pallas_gpu.sparsecore.primitives import loops
from pallas_gpu.sparsecore.types import MACHINE


class _Iterations:
    """The actors of iterations; loops that follow each other have the same.

    Attributes:
      actors: one for each iteration.
      loops: how many loops there were, the time of the actors.
    """

    def __init__(self, thread: Thread):
        self._new = thread.execution.actors.thread
        self.actors: list[int] = []
        self.loops = 0

    def actor(self, number: int) -> int:
        """Returns the actor of an iteration."""
        while len(self.actors) <= number:
            self.actors.append(self._new())
        return self.actors[number]


_ITERATIONS: Key[Thread, _Iterations] = Key("iterations", _Iterations)


@registry.register(loops.parallel_loop_p, registry.RuleKind.EMULATE, MACHINE)
def _parallel_loop(thread: Subcore, step: ControlStep, ins: list[Any]) -> Run:
    params = step.params
    consts = ins[: params["num_consts"]]
    carry = ins[params["num_consts"] : -3]
    lower, upper, stride = (int(decided(x)) for x in ins[-3:])
    if stride <= 0:
        raise errors.ArgumentError(
            "parallel_loop: the step is not positive", expected="1 or more", got=stride
        )
    (body,) = step.plans
    # Inside another iteration its own actors would take those of others for known.
    inner = bool(thread.iteration_name)
    iterations = _Iterations(thread) if inner else _ITERATIONS.of(thread)
    iterations.loops += 1
    outer = thread.actor, thread.iteration_name
    before = thread.release()
    after = thread.clock
    for number, index in enumerate(range(lower, upper, stride)):
        begin_iteration(thread, step, number)
        thread.actor = iterations.actor(number)
        thread.clock = {**before, thread.actor: iterations.loops}
        thread.iteration_name = f"iteration {number} of a parallel_loop in {outer[1]}"
        carry = yield from evaluate.run(
            thread, body, [*consts, *carry, np.int32(index)]
        )
        ordering.join(after, thread.clock)
    thread.actor, thread.iteration_name = outer
    thread.clock = after
    return carry
