# SPDX-License-Identifier: Apache-2.0
"""A pipeline: its plan, and its execution by one warpgroup or by several.

The plan says what each block needs and when: `Inputs` and `Outputs` over the steps of a
grid. Step i uses slot i mod n of each ring of n buffers. One warpgroup does everything:
it starts the copies of later steps, waits for those of the current one, runs the body
and starts the copies of its results. In a team another one copies the inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors
from pallas_gpu.entry import control, scope
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.pipeline.blocks import Stream
from pallas_gpu.pipeline.inputs import Inputs
from pallas_gpu.pipeline.memory import Steps, declarations, names
from pallas_gpu.pipeline.outputs import Outputs
from pallas_gpu.pipeline.specialized.ring import Slot
from pallas_gpu.pipeline.streams import Body, Streams
from pallas_gpu.pipeline.team import Team
from pallas_gpu.primitives.tensor_cores.wgmma import wait_for_products
from pallas_gpu.types import values


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A body over the steps of a grid.

    Attributes:
      streams: all inputs and outputs.
      fixed, moving: inputs with buffers whose block is that of all steps, or changes.
      outputs: those with buffers.
      team: the warpgroups; None: one.
    """

    body: Body
    streams: Streams
    fixed: Inputs
    moving: Inputs
    outputs: Outputs
    team: Team | None

    @classmethod
    def of(
        cls,
        body: Body,
        streams: Streams,
        grid: Sequence[Any],
        depth: int,
        team: Team | None = None,
    ) -> Pipeline:
        steps = Steps.of(grid, depth)
        inputs = [s for s in streams.inputs if s.buffered]
        outputs = [s for s in streams.outputs if s.buffered]
        multicast = any(s.spec.collective_axes for s in inputs)
        fixed = [s for s in inputs if not s.axes]
        moving = [s for s in inputs if s.axes]
        automatic = None if team is None else team.automatic
        return cls(
            body,
            streams,
            Inputs(fixed, steps.shared, automatic, multicast),
            Inputs(moving, steps, team, multicast),
            Outputs(outputs, steps, team),
            team,
        )

    def memory(self) -> dict[str, Any]:
        return {
            "fixed": self.fixed.declared(),
            "moving": self.moving.declared(),
            "outputs": self.outputs.declared(),
        }

    def allocate(self, run: Callable[[dict[str, Any]], Any]) -> Any:
        memory, axes = self.memory(), () if self.team is None else self.team.axis
        return scoped(run, (declarations(memory),), {}, axes, names(memory))

    def run(
        self,
        memory: dict[str, Any],
        *,
        context: Callable[..., Any] | None = None,
        init_carry: Any = None,
        first: Any = None,
        last: Any = None,
    ) -> Any:
        """Runs the pipeline; all warpgroups of the block call it.

        Args:
          context: `context(pipeline)` calls `pipeline(init_carry)` once, in each
            warpgroup that computes.
          first, last: whether it is of a sequence of pipelines; see `Inputs.produce`.

        Returns:
          The last carry, without a team and a context.
        """
        fixed = self.fixed.using(memory["fixed"])
        moving = self.moving.using(memory["moving"])
        outputs = dataclasses.replace(self.outputs, memory=memory["outputs"])
        own = dataclasses.replace(self, fixed=fixed, moving=moving, outputs=outputs)

        def fill() -> None:
            fixed.fill()
            moving.fill()

        def produce() -> None:
            fixed.produce(first)
            moving.produce(first)
            if moving.across_ctas:
                control.when(True if last is None else last)(drain)

        def drain() -> None:
            moving.drain()
            fixed.drain()

        def compute() -> Any:
            steps = functools.partial(own._all_steps, fixed.take(0))
            carry = own._within(context, steps, init_carry)
            fixed.release(fixed.released(0), 0)
            outputs.finish()
            return carry

        if self.team is None:
            fill()
            return compute()
        self.team.run(self.body.who, produce, fill, compute)
        return None

    def _within(
        self,
        context: Callable[..., Any] | None,
        steps: Callable[[Any], Any],
        init_carry: Any,
    ) -> Any:
        if context is None:
            return steps(init_carry)
        calls: list[None] = []

        def pipeline(carry: Any = None) -> Any:
            calls.append(None)
            return steps(carry)

        result = scope.call("compute_context", context, pipeline)
        scope.require_none("compute_context", context, result)
        if len(calls) != 1:
            raise errors.KernelError(
                "compute_context does not run the pipeline once",
                expected="one call of its argument",
                got=f"{len(calls)} calls",
                hint="call pipeline(init_carry) once",
                where=scope.location(context),
            )
        return None

    def _all_steps(self, shared: Sequence[Slot], init_carry: Any) -> Any:
        ins, outs, team = self.moving, self.outputs, self.team
        steps, streams = ins.steps, self.streams
        constant = _of_each(self.fixed.streams, [x.buffers for x in shared])

        def iteration(step: Any, state: Any) -> Any:
            carry, visits = state
            slots = ins.take(step)
            outs.wait_for_buffers(step)
            results = outs.refs(step, visits)
            released = ins.released(step)
            indices = steps.indices(step)
            read = _of_each(ins.streams, [slot.buffers for slot in slots])
            buffers = constant | read | _of_each(outs.streams, results)
            operands = streams.operands(buffers, indices)
            if team is not None and team.separate_full:
                full = [slot.full for slot in slots]
                operands += streams.barriers(_of_each(ins.streams, full))
            if team is not None and team.manual_release:
                operands += streams.barriers(_of_each(ins.streams, released))
            carry = self.body.call(indices, operands, carry)
            ins.release(released, step)
            outs.store(results, step)
            visits = outs.after(step, visits)
            ins.refill(step)
            return carry, visits

        with _jax.trace_without_ref_rules():
            state = (init_carry, outs.start())
            if steps.once and not holds_refs(init_carry):
                carry, _ = iteration(jnp.int32(0), state)
            else:
                carry, _ = control.counted_loop(steps.count, iteration, state)
        if ins.delayed:
            # Copies for the next pipeline then overlap the rest of the context.
            wait_for_products()
            ins.release_last()
        return carry


def _of_each(streams: Sequence[Stream], found: Sequence[Any]) -> dict[Stream, Any]:
    return dict(zip(streams, found, strict=True))


def holds_refs(carry: Any) -> bool:
    return any(map(values.is_ref, jax.tree.leaves(carry)))
