# SPDX-License-Identifier: Apache-2.0
"""The compute warpgroups of a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry import control, scope
from pallas_gpu.pipeline.inputs import take
from pallas_gpu.pipeline.loops import unravel
from pallas_gpu.pipeline.outputs import Outputs
from pallas_gpu.pipeline.producer import Producer
from pallas_gpu.pipeline.specialized.ring import Ring, last_steps, ring_index
from pallas_gpu.pipeline.streams import Body, Streams
from pallas_gpu.primitives import mbarrier, tma
from pallas_gpu.primitives.tensor_cores.wgmma import wait_for_products


@dataclasses.dataclass(frozen=True)
class Compute:
    """What each compute warpgroup does.

    The first one also stores the outputs, when all have written theirs.

    Attributes:
      body: the body.
      streams: all inputs and outputs.
      producer: the inputs and their barriers.
      outputs: the outputs with buffers.
      warpgroups: number of compute warpgroups.
      axis: name of the thread axis.
      last: whether nothing in the kernel reads the results. Then their copies have to
        have read the buffers, not more: a next kernel sees them.
      again: whether the pipeline runs again, with the same buffers.
      leader: index of the first one.
    """

    body: Body
    streams: Streams
    producer: Producer
    outputs: Outputs
    warpgroups: int
    axis: str
    last: bool = False
    again: bool = False
    leader: int = 0

    @property
    def _shared(self) -> bool:
        """Whether several warpgroups write the same outputs."""
        return self.warpgroups > 1 and bool(self.outputs.streams)

    @property
    def _reused(self) -> bool:
        """Whether a next pipeline may use the same buffers."""
        return self.again or not self.last

    def declarations(self) -> dict[str, Any]:
        """Returns the declarations of the outputs' buffers and barriers."""
        found: dict[str, Any] = {"buffers": self.outputs.declarations()}
        if self._shared:
            if self.outputs.moving:
                slots = self.outputs.slots
                found["free"] = types.Barrier(num_barriers=slots)
                found["ready"] = types.Barrier(
                    num_arrivals=self.warpgroups, num_barriers=slots
                )
            found["done"] = types.Barrier(num_arrivals=self.warpgroups)
            if self._reused:
                found["stored"] = types.Barrier()
        return found

    def names(self) -> dict[str, Any]:
        """Returns the names of the declarations, for messages."""
        outputs = [stream.name for stream in self.outputs.streams]
        found: dict[str, Any] = {"buffers": outputs}
        if self._shared:
            of = " of " + ", ".join(outputs)
            found |= {b: b + of for b in self.declarations() if b != "buffers"}
        return found

    def run(
        self,
        read: dict[str, Any],
        written: dict[str, Any],
        context: Callable[..., Any] | None,
    ) -> None:
        """Runs all steps, within the author's context if there is one."""
        inputs = self.producer.inputs
        inputs.wait_for_fixed(read)
        calls: list[None] = []

        def pipeline(carry: Any = None) -> Any:
            calls.append(None)
            return self._all_steps(read, written, carry)

        if context is None:
            pipeline()
        else:
            result = scope.call("compute_context", context, pipeline)
            scope.require_none("compute_context", context, result)
        if len(calls) != 1:
            raise errors.KernelError(
                "compute_context does not run the pipeline once",
                expected="one call of its argument",
                got=f"{len(calls)} calls",
                hint="call pipeline(init_carry) once",
                where=scope.location(context or self.body.function),
            )
        if inputs.fixed:
            mbarrier.barrier_arrive(read["fixed_free"])
        self._finish(written)

    # --- steps ------------------------------------------------------------------------

    def _all_steps(
        self, read: dict[str, Any], written: dict[str, Any], init_carry: Any
    ) -> Any:
        inputs, outputs = self.producer.inputs, self.outputs
        rings = self.producer.rings(read)

        def iteration(step: Any, state: Any) -> Any:
            carry, visits = state
            barriers: list[Any] = []
            if self.producer.separate_full:
                slots = [ring.slot(step) for ring in rings]
                barriers += self.streams.barriers([slot.full for slot in slots])
            else:
                slots = take(rings, step)
            slot = ring_index(step, inputs.slots)
            self._wait_for_buffers(written, slot)
            results = outputs.refs(written["buffers"], step, visits)
            manual = self.producer.releases.manual
            released = self._released(rings, step)
            if manual:
                barriers += self.streams.barriers([barrier for _, barrier in released])
            indices = unravel(step, inputs.sizes)
            operands = self.streams.operands(inputs.refs(read, slots), results, indices)
            carry = self.body.call(indices, [*operands, *barriers], carry)
            if not manual:
                for delay, barrier in released:
                    passed = step >= delay if delay else None
                    mbarrier.barrier_arrive(barrier, predicate=passed)
            return carry, self._store(written, results, step, visits, slot)

        with _jax.trace_without_ref_rules():
            state = (init_carry, outputs.start())
            carry, _ = control.counted_loop(inputs.steps, iteration, state)
        if inputs.delayed:
            # Copies for the next pipeline then overlap the rest of the context.
            wait_for_products()
            self._release_last(rings)
        return carry

    # --- inputs -----------------------------------------------------------------------

    def _released(self, rings: list[Ring], step: Any) -> list[tuple[int, Any]]:
        """Returns the delay of each group, and the barrier of the step before it.

        Its index is negative before the first step: no barrier has that.
        """
        found = []
        for group in self.producer.releases.groups:
            ring, earlier = rings[group.members[0]], step - group.delay
            if group.delay < ring.stages:
                earlier = ring_index(earlier, ring.stages)
            found.append((group.delay, ring.empty.at[earlier]))
        return found

    def _release_last(self, rings: list[Ring]) -> None:
        """Returns the buffers of the last steps, whose delay has not passed."""
        steps = self.producer.inputs.steps
        for group in self.producer.releases.groups:
            if group.delay:
                release = rings[group.members[0]].release
                control.loop(last_steps(steps, group.delay), steps)(release)

    # --- outputs ----------------------------------------------------------------------

    def _first(self) -> Any:
        return lax.axis_index(self.axis) == self.leader

    def _wait_for_buffers(self, written: dict[str, Any], slot: Any) -> None:
        if not self._shared or not self.outputs.moving:
            self.outputs.wait_for_buffers()
            return

        @control.when(self._first())
        def _():
            self.outputs.wait_for_buffers()
            mbarrier.barrier_arrive(written["free"].at[slot])

        mbarrier.barrier_wait(written["free"].at[slot])

    def _store(
        self, written: dict[str, Any], refs: Any, step: Any, visits: Any, slot: Any
    ) -> Any:
        if not self.outputs.moving:
            return visits
        tma.commit_smem()
        if not self._shared:
            self.outputs.store(refs, step)
            return self.outputs.after(step, visits)
        ready = written["ready"].at[slot]
        mbarrier.barrier_arrive(ready)

        @control.when(self._first())
        def _():
            mbarrier.barrier_wait(ready)
            self.outputs.store(refs, step)

        return self.outputs.after(step, visits)

    def _finish(self, written: dict[str, Any]) -> None:
        """Stores the blocks that all steps shared, and waits for all copies."""
        if not self.outputs.streams:
            return
        tma.commit_smem()
        if not self._shared:
            self._store_last(written)
            return
        mbarrier.barrier_arrive(written["done"])

        @control.when(self._first())
        def _():
            mbarrier.barrier_wait(written["done"])
            self._store_last(written)
            if self._reused:
                mbarrier.barrier_arrive(written["stored"])

        if self._reused:
            mbarrier.barrier_wait(written["stored"])

    def _store_last(self, written: dict[str, Any]) -> None:
        self.outputs.store_fixed(written["buffers"])
        tma.wait_smem_to_gmem(0, wait_read_only=self.last)
