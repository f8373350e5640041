# SPDX-License-Identifier: Apache-2.0
"""Outputs of a pipeline: which buffer a step writes, and when a block is stored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import types
from pallas_gpu.pipeline.blocks import Stream
from pallas_gpu.pipeline.loops import unravel
from pallas_gpu.pipeline.specialized.ring import ring_index
from pallas_gpu.primitives import tma

# For each output whose block several consecutive steps share, the number of blocks
# that are complete.
Visits = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a pipeline that have buffers in SMEM.

    Each step closes one group of copies, which may be empty: then the number of pending
    groups says which buffers are free.

    Attributes:
      streams: the outputs.
      sizes: the grid.
      steps: number of its steps.
      slots: number of buffers of an output whose block changes.
    """

    streams: Sequence[Stream]
    sizes: Sequence[Any]
    steps: Any
    slots: int

    @functools.cached_property
    def _axes(self) -> list[int]:
        """The axes with several steps."""
        return [a for a, n in enumerate(self.sizes) if not isinstance(n, int) or n > 1]

    def _fixed(self, stream: Stream) -> bool:
        """Whether all steps have the same block."""
        return not stream.axes & set(self._axes)

    def _revisited(self, stream: Stream) -> bool:
        """Whether consecutive steps may have the same block.

        A last axis of a size known at run time only may have one step.
        """
        last = self._axes[-1]
        several = isinstance(self.sizes[last], int) or len(self._axes) == 1
        return not (several and stream.moves_along(last))

    @functools.cached_property
    def _returns(self) -> bool:
        """Whether what one store writes may be stored again after another one."""
        return any(self._may_return(stream) for stream in self.moving)

    def _may_return(self, stream: Stream) -> bool:
        sizes = {axis: self.sizes[axis] for axis in self._axes if axis in stream.axes}
        ignored = set(self._axes[: max(stream.axes)]) - stream.axes
        return bool(ignored) or not stream.is_disjoint(sizes)

    @functools.cached_property
    def moving(self) -> list[Stream]:
        """Outputs whose block changes."""
        return [s for s in self.streams if not self._fixed(s)]

    def declarations(self) -> list[types.ScratchType]:
        """Returns the declarations of the buffers."""
        return [s.buffers(1 if self._fixed(s) else self.slots) for s in self.streams]

    def start(self) -> Visits:
        """Returns the state before the first step."""
        return tuple(jnp.int32(0) for s in self.moving if self._revisited(s))

    def refs(self, buffers: Sequence[Any], step: Any, visits: Visits) -> list[Any]:
        """Returns the buffer of each output for a step."""
        counts = iter(visits)
        return [
            buffer.at[0]
            if self._fixed(stream)
            else buffer.at[
                ring_index(
                    next(counts) if self._revisited(stream) else step, self.slots
                )
            ]
            for stream, buffer in zip(self.streams, buffers, strict=True)
        ]

    def wait_for_buffers(self) -> None:
        """Waits until the copies from the buffers of the next step have read them."""
        if self._returns:
            # The later store of a block overwrites the earlier one.
            tma.wait_smem_to_gmem(0)
        elif self.moving:
            tma.wait_smem_to_gmem(self.slots - 1, wait_read_only=True)

    def store(self, refs: Sequence[Any], step: Any) -> None:
        """Starts the copies of the blocks that a step completes.

        Args:
          refs: the buffers of the step, which `commit_smem` has published.
          step: the step.
        """
        here = unravel(step, self.sizes)
        for stream, ref in zip(self.streams, refs, strict=True):
            if self._fixed(stream):
                continue
            complete = None
            if self._revisited(stream):
                complete = self._completes(stream, step)
            tma.copy_smem_to_gmem(
                ref, stream.window(here), predicate=complete, commit_group=False
            )
        if self.moving:
            tma.commit_smem_to_gmem_group()

    def after(self, step: Any, visits: Visits) -> Visits:
        """Returns the state after a step."""
        shared = [s for s in self.moving if self._revisited(s)]
        return tuple(
            count + self._completes(stream, step).astype(jnp.int32)
            for stream, count in zip(shared, visits, strict=True)
        )

    def completes(self, stream: Stream, step: Any) -> Any:
        """Returns whether a step is the last one of a block's visit."""
        if self._fixed(stream):
            one = isinstance(self.steps, int) and self.steps == 1
            return True if one else step + 1 == self.steps
        return self._completes(stream, step) if self._revisited(stream) else True

    def _completes(self, stream: Stream, step: Any) -> Any:
        """Whether the next step has another block, or there is none."""
        here = stream.block_index(unravel(step, self.sizes))
        following = jnp.minimum(step + 1, self.steps - 1)
        there = stream.block_index(unravel(following, self.sizes))
        changed = step + 1 == self.steps
        for a, b in zip(here, there, strict=True):
            if not (isinstance(a, int) and isinstance(b, int)):
                changed = changed | (a != b)
        return changed

    def store_fixed(self, buffers: Sequence[Any]) -> None:
        """Starts the copies of the blocks that all steps shared."""
        if isinstance(self.steps, int) and self.steps == 0:
            return
        written = None if isinstance(self.steps, int) else self.steps > 0
        position = [jnp.int32(0)] * len(self.sizes)
        for stream, buffer in zip(self.streams, buffers, strict=True):
            if self._fixed(stream):
                tma.copy_smem_to_gmem(
                    buffer.at[0], stream.window(position), predicate=written
                )
