# SPDX-License-Identifier: Apache-2.0
"""The memory warpgroup of a pipeline, and how buffers return to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.entry import control
from pallas_gpu.pipeline.inputs import Inputs
from pallas_gpu.pipeline.specialized.ring import Ring, last_steps
from pallas_gpu.primitives import mbarrier


@dataclasses.dataclass(frozen=True)
class Group:
    """Inputs whose buffers are released together.

    Attributes:
      members: their positions among the inputs whose blocks change.
      delay: number of steps after which a buffer is released.
      axes: cluster axes along which the copies are multicast.
    """

    members: tuple[int, ...]
    delay: int
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Releases:
    """Barriers by which compute warpgroups return buffers to the memory warpgroup.

    Attributes:
      groups: the inputs, by the barrier that releases their buffers.
      arrivals: number of warpgroups of a CTA that release a buffer.
      manual: each input is a group of its own, and the body releases it.
    """

    groups: tuple[Group, ...]
    arrivals: int
    manual: bool

    @classmethod
    def of(cls, inputs: Inputs, arrivals: int, manual: bool) -> Releases:
        """Returns the groups of the inputs."""
        found: dict[Any, list[int]] = {}
        for i, stream in enumerate(inputs.moving):
            spec = stream.spec
            key = (spec.delay_release, tuple(spec.collective_axes or ()))
            found.setdefault((i, *key) if manual else key, []).append(i)
        return cls(
            tuple(Group(tuple(m), key[-2], key[-1]) for key, m in found.items()),
            arrivals,
            manual,
        )

    @property
    def across_ctas(self) -> bool:
        """Whether other CTAs release buffers of this one."""
        return any(group.axes for group in self.groups)

    def declarations(self, slots: int) -> list[Any]:
        """Returns the declaration of each group's barriers."""
        return [
            types.ClusterBarrier(
                collective_axes=(g.axes,),
                num_barriers=slots,
                num_arrivals=self.arrivals,
            )
            if g.axes
            else self.free(slots)
            for g in self.groups
        ]

    def free(self, slots: int | tuple[int, ...] = ()) -> types.Barrier:
        """Returns the declaration of barriers that this CTA's warpgroups arrive on."""
        return types.Barrier(
            num_arrivals=self.arrivals,
            num_barriers=slots,
            initially_complete=not self.across_ctas,
        )


@dataclasses.dataclass(frozen=True)
class Producer:
    """What the memory warpgroup does.

    It waits before it fills a buffer again, in a later step or in a later pipeline with
    the same buffers, and so need not wait at its end. But a CTA must not exit before
    the last arrival from another one: where copies are multicast, it waits at the end,
    and the first round finds its buffers free.

    Attributes:
      inputs: the inputs with buffers.
      releases: how buffers return.
      separate_full: each input has its own `full` barriers.
    """

    inputs: Inputs
    releases: Releases
    separate_full: bool

    def declarations(self) -> dict[str, Any]:
        """Returns the declarations of the buffers and all barriers."""
        found = self.inputs.declarations()
        if self.separate_full and self.inputs.moving:
            one = types.Barrier(num_barriers=self.inputs.slots)
            found["full"] = [one] * len(self.inputs.moving)
        found["free"] = self.releases.declarations(self.inputs.slots)
        if self.inputs.fixed:
            found["fixed_free"] = self.releases.free()
        return found

    def names(self) -> dict[str, Any]:
        """Returns the names of the declarations, for messages."""
        found = self.inputs.names()
        inputs = [stream.name for stream in self.inputs.moving]
        if self.separate_full and inputs:
            found["full"] = [f"full of {name}" for name in inputs]
        found["free"] = [
            "free of " + ", ".join(inputs[i] for i in group.members)
            for group in self.releases.groups
        ]
        if self.inputs.fixed:
            found["fixed_free"] = found["fixed_full"].replace("full", "free", 1)
        return found

    def rings(self, memory: dict[str, Any]) -> list[Ring]:
        """Returns the ring of each input whose block changes.

        Those of a group share their `empty` barriers, and without `separate_full` all
        share `full`.
        """
        empty = {
            member: free
            for group, free in zip(self.releases.groups, memory["free"], strict=True)
            for member in group.members
        }
        return [
            Ring(
                buffers,
                empty[i],
                memory["full"][i] if self.separate_full else memory["full"],
            )
            for i, buffers in enumerate(memory["moving"])
        ]

    def run(self, memory: dict[str, Any], *, first: Any, last: Any) -> None:
        """Copies the blocks of all steps.

        Args:
          memory: the buffers and barriers.
          first: with multicasts, whether the buffers are free; None: they are.
          last: with multicasts, whether to wait until all have been released; None:
            wait.
        """
        inputs = self.inputs
        if inputs.fixed and not (self.releases.across_ctas and first is None):
            used = ~first if self.releases.across_ctas else None
            _wait_if(used, memory["fixed_free"])
        inputs.copy_fixed(memory)
        rings = self.rings(memory)

        def step(i: Any, _: Any) -> None:
            for group in self.releases.groups:
                rings[group.members[0]].fill(i, fresh=first)
                for member in group.members:
                    inputs.copy(member, i, rings[member].slot(i), group.axes)

        with _jax.trace_without_ref_rules():
            if inputs.moving:
                control.counted_loop(inputs.steps, step, None)
            if self.releases.across_ctas:
                at_end = control.when(True if last is None else last)
                at_end(lambda: self._drain(memory, rings))

    def _drain(self, memory: dict[str, Any], rings: Sequence[Ring]) -> None:
        """Waits until the buffers of the last steps have been released."""
        steps = self.inputs.steps

        @control.loop(last_steps(steps, self.inputs.slots), steps)
        def _(i):
            for group in self.releases.groups:
                mbarrier.barrier_wait(rings[group.members[0]].slot(i).empty)

        if self.inputs.fixed:
            mbarrier.barrier_wait(memory["fixed_free"])


def _wait_if(condition: Any, barrier: Any) -> None:
    @control.when(True if condition is None else condition)
    def _():
        mbarrier.barrier_wait(barrier)
