# SPDX-License-Identifier: Apache-2.0
"""Outputs of a pipeline: which buffer a step writes, and when a block is stored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import types
from pallas_gpu.entry import control
from pallas_gpu.pipeline.blocks import Stream
from pallas_gpu.pipeline.memory import Named, Steps
from pallas_gpu.pipeline.specialized.ring import ring_index
from pallas_gpu.pipeline.team import Team
from pallas_gpu.primitives import mbarrier, tma

# For each output whose block several consecutive steps share, the number of blocks
# that are complete.
Visits = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a pipeline that have buffers in SMEM.

    Each step closes one group of copies, which may be empty: then the number of pending
    groups says which buffers are free.

    Attributes:
      team: the warpgroups, of which one stores; None: there is one.
      memory: buffers and barriers; see `declared`.
    """

    streams: Sequence[Stream]
    steps: Steps
    team: Team | None
    memory: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    # --- which blocks -----------------------------------------------------------------

    @functools.cached_property
    def _axes(self) -> list[int]:
        """The axes with several steps."""
        sizes = enumerate(self.steps.sizes)
        return [a for a, n in sizes if not isinstance(n, int) or n > 1]

    def _fixed(self, stream: Stream) -> bool:
        return not stream.axes & set(self._axes)

    def _revisited(self, stream: Stream) -> bool:
        """Whether consecutive steps may have the same block.

        A last axis of a size known at run time only may have one step.
        """
        last = self._axes[-1]
        several = isinstance(self.steps.sizes[last], int) or len(self._axes) == 1
        return not (several and stream.moves_along(last))

    @functools.cached_property
    def _returns(self) -> bool:
        """Whether what one store writes may be stored again after another one."""

        def may_return(stream: Stream) -> bool:
            sizes = {a: self.steps.sizes[a] for a in self._axes if a in stream.axes}
            ignored = set(self._axes[: max(stream.axes)]) - stream.axes
            return bool(ignored) or not stream.is_disjoint(sizes)

        return any(map(may_return, self.moving))

    @functools.cached_property
    def moving(self) -> list[Stream]:
        return [s for s in self.streams if not self._fixed(s)]

    def completes(self, stream: Stream, step: Any) -> Any:
        """Returns whether the next step has another block, or there is none."""
        steps = self.steps
        if not self._revisited(stream):
            return True
        here = stream.block_index(steps.indices(step))
        following = jnp.minimum(step + 1, steps.count - 1)
        there = stream.block_index(steps.indices(following))
        changed = step + 1 == steps.count
        for a, b in zip(here, there, strict=True):
            if not (isinstance(a, int) and isinstance(b, int)):
                changed = changed | (a != b)
        return changed

    # --- memory -----------------------------------------------------------------------

    def declared(self) -> dict[str, Any]:
        """Returns the buffers, and the barriers of a team that shares them."""
        slots, streams, team = self.steps.slots, self.streams, self.team
        found: dict[str, Any] = {
            "buffers": [
                Named.blocks(s, 1 if self._fixed(s) else slots) for s in streams
            ]
        }
        if team is None or not self._shared:
            return found
        barriers = {"done": types.Barrier(num_arrivals=team.compute)}
        if self.moving:
            barriers["free"] = types.Barrier(num_barriers=slots)
            barriers["ready"] = types.Barrier(
                num_arrivals=team.compute, num_barriers=slots
            )
        if self._reused:
            barriers["stored"] = types.Barrier()
        return found | {k: Named.barrier(k, streams, b) for k, b in barriers.items()}

    @property
    def _shared(self) -> bool:
        """Whether several warpgroups write the same outputs."""
        return self.team is not None and self.team.compute > 1 and bool(self.streams)

    @property
    def _reused(self) -> bool:
        """Whether a next pipeline may use the same buffers."""
        return self.team is None or self.team.again or not self.team.last

    def _by_one(
        self, work: Callable[[], None], *, gathered: Any = None, done: Any = None
    ) -> None:
        """Runs `work` in the warpgroup that stores.

        Args:
          work: what it does.
          gathered: if several warpgroups compute, the barrier on which all arrive
            before; None: they need not.
          done: the barrier on which all wait until it has been done.
        """
        team = self.team
        if team is None or not self._shared:
            work()
            return
        if gathered is not None:
            mbarrier.barrier_arrive(gathered)

        @control.when(team.stores())
        def _():
            if gathered is not None:
                mbarrier.barrier_wait(gathered)
            work()
            if done is not None:
                mbarrier.barrier_arrive(done)

        if done is not None:
            mbarrier.barrier_wait(done)

    # --- steps ------------------------------------------------------------------------

    def start(self) -> Visits:
        return tuple(jnp.int32(0) for s in self.moving if self._revisited(s))

    def refs(self, step: Any, visits: Visits) -> list[Any]:
        counts, slots = iter(visits), self.steps.slots
        return [
            buffer.at[0]
            if self._fixed(stream)
            else buffer.at[
                ring_index(next(counts) if self._revisited(stream) else step, slots)
            ]
            for stream, buffer in zip(self.streams, self.memory["buffers"], strict=True)
        ]

    def wait_for_buffers(self, step: Any) -> None:
        """Waits until the copies from the buffers of a step have read them."""
        if self.moving:
            free = self._slot("free", step)
            self._by_one(self._wait_for_copies, done=free)

    def _wait_for_copies(self) -> None:
        if self._returns:
            # The later store of a block overwrites the earlier one.
            tma.wait_smem_to_gmem(0)
        else:
            tma.wait_smem_to_gmem(self.steps.slots - 1, wait_read_only=True)

    def _slot(self, barrier: str, step: Any) -> Any:
        if not self._shared:
            return None
        return self.memory[barrier].at[ring_index(step, self.steps.slots)]

    def store(self, refs: Sequence[Any], step: Any) -> None:
        if self.moving:
            tma.commit_smem()
            copies = functools.partial(self._store, refs, step)
            self._by_one(copies, gathered=self._slot("ready", step))

    def _store(self, refs: Sequence[Any], step: Any) -> None:
        here = self.steps.indices(step)
        for stream, ref in zip(self.streams, refs, strict=True):
            if self._fixed(stream):
                continue
            _copy(stream, ref, here, self.completes(stream, step))
        tma.commit_smem_to_gmem_group()

    def after(self, step: Any, visits: Visits) -> Visits:
        shared = [s for s in self.moving if self._revisited(s)]
        return tuple(
            count + self.completes(stream, step).astype(jnp.int32)
            for stream, count in zip(shared, visits, strict=True)
        )

    def finish(self) -> None:
        """Stores the blocks that all steps shared, and waits for all copies."""
        if not self.streams:
            return
        tma.commit_smem()
        self._by_one(
            self._store_last,
            gathered=self.memory.get("done"),
            done=self.memory.get("stored"),
        )

    def _store_last(self) -> None:
        count, first = self.steps.count, self.steps.shared.indices(0)
        written = True if isinstance(count, int) else count > 0
        for stream, buffer in zip(self.streams, self.memory["buffers"], strict=True):
            if self._fixed(stream) and not (isinstance(count, int) and count == 0):
                _copy(stream, buffer.at[0], first, written, commit_group=True)
        tma.wait_smem_to_gmem(
            0, wait_read_only=self.team is not None and self.team.last
        )


def _copy(
    stream: Stream,
    buffer: Any,
    indices: Sequence[Any],
    needed: Any,
    *,
    commit_group: bool = False,
) -> None:
    if stream.by_elements:
        control.when(needed)(lambda: stream.store_elements(buffer, indices))
        return
    tma.copy_smem_to_gmem(
        buffer,
        stream.window(indices),
        predicate=None if needed is True else needed,
        commit_group=commit_group,
    )
