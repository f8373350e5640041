# SPDX-License-Identifier: Apache-2.0
"""Inputs of a pipeline: rings of buffers that copies fill ahead of the steps.

Without a team the warpgroup that runs the body refills a buffer after the step that has
read it. In a team the memory warpgroup does: a barrier `full` of each buffer completes
when its copies have arrived, a barrier `free` when all compute warpgroups, in all CTAs
of a multicast, have released it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import _jax, types
from pallas_gpu.entry import control
from pallas_gpu.pipeline.blocks import Stream
from pallas_gpu.pipeline.memory import Named, Steps
from pallas_gpu.pipeline.specialized.ring import Ring, Slot, last_steps, ring_index
from pallas_gpu.pipeline.team import Team
from pallas_gpu.primitives import mbarrier, tma


@dataclasses.dataclass(frozen=True)
class Group:
    """Inputs whose buffers are released together.

    Attributes:
      members: their positions among the inputs.
      delay: number of steps after which a buffer is released.
      axes: cluster axes along which the copies are multicast.
    """

    members: list[int]
    delay: int
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs with buffers in SMEM that have a block for each of some steps.

    The memory warpgroup waits before it fills a buffer again, in a later step or in a
    later pipeline with the same buffers, and so need not wait at its end. But a CTA
    must not exit before the last arrival from another one: where copies are multicast,
    it waits at the end, and the first round finds its buffers free.

    Attributes:
      streams: the inputs.
      steps: their steps; a block that all steps of the pipeline share has one.
      team: the warpgroups; None: one.
      across_ctas: whether other CTAs release buffers of this one.
    """

    streams: Sequence[Stream]
    steps: Steps
    team: Team | None
    across_ctas: bool

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The inputs by what releases their buffers; one each, if the body does."""
        found: dict[Any, Group] = {}
        for i, stream in enumerate(self.streams):
            key = stream.spec.delay_release, tuple(stream.spec.collective_axes or ())
            each = i if self.team is not None and self.team.manual_release else None
            found.setdefault((each, *key), Group([], *key)).members.append(i)
        return list(found.values())

    @property
    def delayed(self) -> bool:
        """Whether reads of a step may still be in flight when it ends."""
        return any(group.delay for group in self.groups)

    # --- memory -----------------------------------------------------------------------

    def memory(self) -> dict[str, Any]:
        """Returns the buffers and barriers."""
        slots, streams = self.steps.slots, self.streams
        sets = (
            [[s] for s in streams] if self._separate_full else [streams][: len(streams)]
        )
        barrier = functools.partial(types.Barrier, num_barriers=slots)
        found: dict[str, Any] = {
            "buffers": [Named.blocks(s, slots) for s in streams],
            "full": [
                Named.barrier("full", filled, barrier(num_arrivals=len(filled)))
                for filled in sets
            ],
        }
        if self.team is not None:
            found["free"] = [
                Named.barrier("free", [streams[i] for i in g.members], self._free(g))
                for g in self.groups
            ]
        return found

    @property
    def _separate_full(self) -> bool:
        return self.team is not None and self.team.separate_full

    def _free(self, group: Group) -> Any:
        assert self.team is not None
        arrivals, slots = self.team.compute, self.steps.slots
        if group.axes:
            return types.ClusterBarrier(
                collective_axes=(group.axes,), num_barriers=slots, num_arrivals=arrivals
            )
        return types.Barrier(
            num_arrivals=arrivals,
            num_barriers=slots,
            initially_complete=not self.across_ctas,
        )

    def rings(self, memory: dict[str, Any]) -> list[Ring]:
        """Returns the ring of each input.

        Those of a group share their `empty` barriers, and without `separate_full` all
        share `full`.
        """
        empty: dict[int, Any] = {}
        for group, free in zip(self.groups, memory.get("free", ()), strict=False):
            empty |= dict.fromkeys(group.members, free)
        full = memory["full"]
        return [
            Ring(buffers, empty.get(i), full[i if self._separate_full else 0])
            for i, buffers in enumerate(memory["buffers"])
        ]

    # --- copies -----------------------------------------------------------------------

    def _copy(self, slot: Slot, i: int, step: Any, axes: Sequence[str] = ()) -> None:
        """Starts the copy of a block of input i, multicast along cluster axes."""
        stream, indices = self.streams[i], self.steps.indices(step)
        if stream.by_elements:
            place = indices, slot.buffers, slot.full
            stream.at_index_map(functools.partial(stream.load_elements, *place))
            return
        copy = functools.partial(
            tma.copy_gmem_to_smem,
            stream.window(indices),
            slot.buffers,
            slot.full,
            collective_axes=axes or None,
            oob_mode=stream.spec.oob_fill_mode,
        )
        stream.at_index_map(copy)

    def fill(self, rings: Sequence[Ring]) -> None:
        """Starts the copies of the first steps, to buffers that nobody has used."""
        count, slots = self.steps.count, self.steps.slots
        least = min if isinstance(count, int) else jnp.minimum
        self._start(rings, least(count, slots), lambda ring, step: None)

    def produce(self, rings: Sequence[Ring], first: Any) -> None:
        """Copies the blocks of all steps, in the memory warpgroup.

        Args:
          rings: the rings.
          first: with multicasts, whether the buffers are free; None: they are.
        """
        fill = functools.partial(Ring.fill, fresh=first)
        self._start(rings, self.steps.count, fill)

    def _start(self, rings: Sequence[Ring], count: Any, acquire: Any) -> None:
        """Starts the copies of some steps; `acquire` waits for the slot of each."""

        def step(i: Any) -> None:
            for group in self.groups:
                acquire(rings[group.members[0]], i)
                for member in group.members:
                    self._copy(rings[member].slot(i), member, i, group.axes)

        if rings:
            for_each(count, step)

    def refill(self, rings: Sequence[Ring], step: Any) -> None:
        """Starts copies to the buffers that a step releases, without a team."""
        if self.team is not None:
            return
        for i, (stream, ring) in enumerate(zip(self.streams, rings, strict=True)):
            released = step - stream.spec.delay_release
            later = released + self.steps.slots
            needed = later < self.steps.count
            if stream.spec.delay_release:
                needed = needed & (released >= 0)
            copy = functools.partial(self._copy, ring.slot(later), i, later)
            control.when(needed)(copy)

    def drain(self, rings: Sequence[Ring]) -> None:
        """Waits until the buffers of the last steps have been released."""
        for group in self.groups:
            rings[group.members[0]].drain(self.steps.count)

    # --- steps ------------------------------------------------------------------------

    def take(self, rings: Sequence[Ring], step: Any) -> list[Slot]:
        """Returns the slots of a step; waits for them, unless the body does."""
        return [
            r.slot(step) if i or self._separate_full else r.take(step)
            for i, r in enumerate(rings)
        ]

    def released(self, rings: Sequence[Ring], step: Any) -> list[Any]:
        """Returns the barriers by which a step releases buffers, one for each group.

        With a delay it is that of an earlier step. Its index is negative before the
        first step: no barrier has that.
        """
        found = []
        for group in self.groups if self.team is not None else ():
            ring, earlier = rings[group.members[0]], step - group.delay
            if group.delay < ring.stages:
                earlier = ring_index(earlier, ring.stages)
            found.append(ring.empty.at[earlier])
        return found

    def release(self, released: Sequence[Any], step: Any) -> None:
        """Arrives on the barriers, unless the body does."""
        if self.team is None or self.team.manual_release:
            return
        for group, barrier in zip(self.groups, released, strict=True):
            passed = step >= group.delay if group.delay else None
            mbarrier.barrier_arrive(barrier, predicate=passed)

    def release_last(self, rings: Sequence[Ring]) -> None:
        """Returns the buffers of the last steps, whose delay has not passed."""
        count = self.steps.count
        for group in self.groups if self.team is not None else ():
            if group.delay:
                release = rings[group.members[0]].release
                control.loop(last_steps(count, group.delay), count)(release)


def for_each(count: Any, body: Any) -> None:
    """Runs a function for each step, without a loop if there is one."""
    with _jax.trace_without_ref_rules():
        if isinstance(count, int) and count == 1:
            body(0)
        else:
            control.counted_loop(count, lambda step, _: body(step), None)
