# SPDX-License-Identifier: Apache-2.0
"""Inputs of a pipeline: rings of buffers that copies fill ahead of the steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import _jax, types
from pallas_gpu.entry import control
from pallas_gpu.pipeline.blocks import Stream
from pallas_gpu.pipeline.loops import unravel
from pallas_gpu.pipeline.specialized.ring import Ring, Slot
from pallas_gpu.primitives import mbarrier, tma


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a pipeline that have buffers in SMEM.

    Attributes:
      streams: the inputs.
      sizes: the grid.
      steps: number of its steps.
      slots: number of buffers of an input whose block changes.
    """

    streams: Sequence[Stream]
    sizes: Sequence[Any]
    steps: Any
    slots: int

    @functools.cached_property
    def moving(self) -> list[Stream]:
        """Inputs whose block changes."""
        return [s for s in self.streams if s.axes]

    @functools.cached_property
    def fixed(self) -> list[Stream]:
        """Inputs with one block for all steps."""
        return [s for s in self.streams if not s.axes]

    def declarations(self) -> dict[str, Any]:
        """Returns the declarations of buffers and of the barriers of their copies."""
        found: dict[str, Any] = {
            "fixed": [s.buffers(1) for s in self.fixed],
            "moving": [s.buffers(self.slots) for s in self.moving],
        }
        if self.fixed:
            found["fixed_full"] = types.Barrier(num_arrivals=len(self.fixed))
        if self.moving:
            found["full"] = types.Barrier(
                num_arrivals=len(self.moving), num_barriers=self.slots
            )
        return found

    def names(self) -> dict[str, Any]:
        """Returns the names of the declarations, for messages."""
        found: dict[str, Any] = {
            "fixed": [s.name for s in self.fixed],
            "moving": [s.name for s in self.moving],
        }
        if self.fixed:
            found["fixed_full"] = "full of " + ", ".join(found["fixed"])
        if self.moving:
            found["full"] = "full of " + ", ".join(found["moving"])
        return found

    def rings(self, memory: dict[str, Any]) -> list[Ring]:
        """Returns the ring of each input whose block changes, of one warpgroup."""
        return [Ring(buffers, None, memory["full"]) for buffers in memory["moving"]]

    def refs(self, memory: dict[str, Any], slots: Sequence[Slot]) -> list[Any]:
        """Returns the buffer of each input, given the slots of those that change."""
        fixed, moving = iter(memory["fixed"]), iter(slots)
        return [
            next(moving).buffers if s.axes else next(fixed).at[0] for s in self.streams
        ]

    def copy_fixed(self, memory: dict[str, Any]) -> None:
        """Starts the copies of the blocks that all steps share."""
        if not self.fixed:
            return
        position = [jnp.int32(0)] * len(self.sizes)
        for stream, buffer in zip(self.fixed, memory["fixed"], strict=True):
            copy = functools.partial(
                tma.copy_gmem_to_smem,
                stream.window(position),
                buffer.at[0],
                memory["fixed_full"],
                oob_mode=stream.spec.oob_fill_mode,
            )
            stream.at_index_map(copy)

    def wait_for_fixed(self, memory: dict[str, Any]) -> None:
        """Waits for the blocks that all steps share."""
        if self.fixed:
            mbarrier.barrier_wait(memory["fixed_full"])

    def fill(self, rings: Sequence[Ring]) -> None:
        """Starts the copies of the first steps."""
        if not rings:
            return
        if isinstance(self.steps, int):
            count = min(self.steps, self.slots)
        else:
            count = jnp.minimum(self.steps, self.slots)

        def first(step: Any, _: Any) -> None:
            for i, ring in enumerate(rings):
                self.copy(i, step, ring.slot(step))

        with _jax.trace_without_ref_rules():
            control.counted_loop(count, first, None)

    @property
    def delayed(self) -> bool:
        """Whether reads of a step may still be in flight when it ends."""
        return any(s.spec.delay_release for s in self.moving)

    def refill(self, rings: Sequence[Ring], step: Any) -> None:
        """Starts copies to the buffers that a step releases, for a later step."""
        for i, (stream, ring) in enumerate(zip(self.moving, rings, strict=True)):
            released = step - stream.spec.delay_release
            later = released + self.slots
            needed = later < self.steps
            if stream.spec.delay_release:
                needed = needed & (released >= 0)
            start = functools.partial(self.copy, i, later, ring.slot(later))
            control.when(needed)(start)

    def copy(self, i: int, step: Any, slot: Slot, axes: Sequence[str] = ()) -> None:
        """Starts the copy of a block.

        Args:
          i: position of the input among those whose block changes.
          step: the step that reads the block.
          slot: of its ring.
          axes: cluster axes of a multicast.
        """
        stream = self.moving[i]
        copy = functools.partial(
            tma.copy_gmem_to_smem,
            stream.window(unravel(step, self.sizes)),
            slot.buffers,
            slot.full,
            collective_axes=axes or None,
            oob_mode=stream.spec.oob_fill_mode,
        )
        stream.at_index_map(copy)


def take(rings: Sequence[Ring], step: Any) -> list[Slot]:
    """Waits for the slots of a step, in rings that share their `full` barriers."""
    return [r.slot(step) if i else r.take(step) for i, r in enumerate(rings)]
