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
from pallas_gpu.pipeline.specialized import ring as ring_lib
from pallas_gpu.pipeline.specialized.ring import Ring, Slot
from pallas_gpu.pipeline.team import Team
from pallas_gpu.primitives import mbarrier, tma


@dataclasses.dataclass(frozen=True)
class Group:
    """Inputs, by position, whose buffers are released together, `delay` steps later.

    Copies of a group are multicast along the same cluster axes.
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
      steps: those of the inputs; a block that all steps of the pipeline share has one.
      team: the warpgroups; None: one.
      across_ctas: whether other CTAs release buffers of this one.
      rings: of each input. Those of a group share their `empty` barriers, and without
        `separate_full` all share `full`.
    """

    streams: Sequence[Stream]
    steps: Steps
    team: Team | None
    across_ctas: bool
    rings: Sequence[Ring] = ()

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

    def declared(self) -> dict[str, Any]:
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
        if self.team is None:
            return found
        counts = slots, self.team.compute
        for group in self.groups:
            axes = (group.axes,) if group.axes else ()
            free = ring_lib.empties(*counts, axes, not self.across_ctas)
            members = [streams[i] for i in group.members]
            found.setdefault("free", []).append(Named.barrier("free", members, free))
        return found

    @property
    def _separate_full(self) -> bool:
        return self.team is not None and self.team.separate_full

    def using(self, memory: dict[str, Any]) -> Inputs:
        empty: dict[int, Any] = {}
        for group, free in zip(self.groups, memory.get("free", ()), strict=False):
            empty |= dict.fromkeys(group.members, free)
        full = memory["full"]
        rings = [
            Ring(buffers, empty.get(i), full[i if self._separate_full else 0])
            for i, buffers in enumerate(memory["buffers"])
        ]
        return dataclasses.replace(self, rings=rings)

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

    def fill(self) -> None:
        """Starts the copies of the first steps, to buffers that nobody has used."""
        count, slots = self.steps.count, self.steps.slots
        least = min if isinstance(count, int) else jnp.minimum
        self._start(least(count, slots))

    def produce(self, first: Any) -> None:
        """Copies the blocks of all steps, in the memory warpgroup.

        Args:
          first: with multicasts, whether the buffers are free; None: they are.
        """
        self._start(self.steps.count, first)

    def _start(self, count: Any, first: Any = None) -> None:
        def step(i: Any) -> None:
            for group in self.groups:
                self.rings[group.members[0]].fill(i, fresh=first)
                for member in group.members:
                    self._copy(self.rings[member].slot(i), member, i, group.axes)

        if self.rings:
            for_each(count, step)

    def refill(self, step: Any) -> None:
        """Starts copies to the buffers that a step releases, without a team."""
        for i, stream in enumerate(() if self.team is not None else self.streams):
            released = step - stream.spec.delay_release
            later = released + self.steps.slots
            needed = later < self.steps.count
            if stream.spec.delay_release:
                needed = needed & (released >= 0)
            copy = functools.partial(self._copy, self.rings[i].slot(later), i, later)
            control.when(needed)(copy)

    def drain(self) -> None:
        for group in self.groups:
            self.rings[group.members[0]].drain(self.steps.count)

    # --- steps ------------------------------------------------------------------------

    def take(self, step: Any) -> list[Slot]:
        """Returns the slots of a step; waits for them, unless the body does."""
        return [
            r.slot(step) if i or self._separate_full else r.take(step)
            for i, r in enumerate(self.rings)
        ]

    def released(self, step: Any) -> list[Any]:
        """Returns the barriers by which a step releases buffers, one for each group.

        With a delay it is that of an earlier step. Its index is negative before the
        first step: no barrier has that.
        """
        found = []
        for group in self.groups if self.team is not None else ():
            ring, earlier = self.rings[group.members[0]], step - group.delay
            if group.delay < ring.stages:
                earlier = ring_lib.ring_index(earlier, ring.stages)
            found.append(ring.empty.at[earlier])
        return found

    def release(self, released: Sequence[Any], step: Any) -> None:
        """Arrives on the barriers, unless the body does."""
        if self.team is None or self.team.manual_release:
            return
        for group, barrier in zip(self.groups, released, strict=True):
            passed = step >= group.delay if group.delay else None
            mbarrier.barrier_arrive(barrier, predicate=passed)

    def release_last(self) -> None:
        """Returns the buffers of the last steps, whose delay has not passed."""
        count = self.steps.count
        for group in self.groups if self.team is not None else ():
            if group.delay:
                release = self.rings[group.members[0]].release
                control.loop(ring_lib.last_steps(count, group.delay), count)(release)


def for_each(count: Any, body: Any) -> None:
    with _jax.trace_without_ref_rules():
        if isinstance(count, int) and count == 1:
            body(0)
        else:
            control.counted_loop(count, lambda step, _: body(step), None)
