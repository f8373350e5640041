# SPDX-License-Identifier: Apache-2.0
"""A ring of buffers between warpgroups that copy and warpgroups that compute."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import errors, expect, types
from pallas_gpu.entry import control, scope
from pallas_gpu.entry.scoped import is_declaration, require_declaration
from pallas_gpu.primitives import mbarrier
from pallas_gpu.primitives.tensor_cores.wgmma import wgmma_wait
from pallas_gpu.types import values


def _step(value: Any, what: str) -> Any:
    """Accepts numbers of steps: integers from 0 on, and scalars, which become i32."""
    value = values.index(value, what)
    if isinstance(value, int):
        return expect.integer(0)(value, what)
    if value.dtype == jnp.int32:
        return value
    return lax.convert_element_type(value, jnp.int32)


# An annotation of a parameter, with its rule.
Step = Annotated[int | jax.Array, _step]


@dataclasses.dataclass(frozen=True)
class Slot:
    """The part of a ring that belongs to a step.

    Attributes:
      index: position in the ring.
      buffers: the ring's buffers, a reference to that of the step in place of each.
      empty: the barrier that completes when the buffers may be overwritten.
      full: the barrier that completes when the buffers have been filled.
    """

    index: Any
    buffers: Any
    empty: Any
    full: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["buffers", "empty", "full"],
    meta_fields=[],
)
@expect.arguments()
@dataclasses.dataclass(frozen=True)
class Ring:
    """Buffers that one role of a kernel fills and others read, step after step.

    Step i has slot i % stages of each buffer. Whoever fills a slot waits until the
    readers of `stages` steps before have released it; readers wait until it is full.
    All of this is Python at trace time: a ring has no instruction of its own.

    Declared by `Ring.of`, or from declarations of its fields, a ring is an entry of
    `scratch_types`, or an argument of `run_scoped`; the kernel's body gets a ring of
    references.

    Steps are numbers from 0 on: integers, or i32 scalars. Methods refuse others, as
    ArgumentError or ArgumentTypeError.

    PTX: mbarrier. Since: sm_90.

    Attributes:
      buffers: pytree of arrays whose first axis is the slot.
      empty: array of barriers, one for each slot, on which readers arrive; in a cluster
        whose CTAs fill each other's buffers a `ClusterBarrier`. If it is
        `initially_complete`, `fill` waits in the first round as well. None where one
        warpgroup fills and reads, in the order of its program.
      full: array of barriers, one for each slot, on which copies arrive.

    Example:
      >>> ring = plgpu.Ring.of((a_tiles, b_tiles), consumers=2)
      >>> # The producer, for each step:
      >>> slot = ring.fill(step)
      >>> plgpu.copy_gmem_to_smem(a.at[rows, depth], slot.buffers[0], slot.full)
      >>> # Each consumer, for each step:
      >>> slot = ring.take(step)
      >>> ...
      >>> ring.release(step)
    """

    buffers: Any
    empty: Any
    full: Any

    @classmethod
    @expect.arguments(
        copies=expect.optional(expect.integer(1)), consumers=expect.integer(1)
    )
    def of(
        cls,
        buffers: Any,
        *,
        copies: int | None = None,
        consumers: int = 1,
        collective_axes: str | Sequence[str] = (),
        initially_complete: bool = False,
    ) -> Ring:
        """Declares a ring.

        Args:
          buffers: pytree of declarations in SMEM, unions too, whose first size is the
            number of slots.
          copies: arrivals that fill a slot; default: one copy to each buffer.
          consumers: warpgroups of a CTA that release a slot.
          collective_axes: cluster axes along which copies to the buffers are multicast:
            a slot is empty when the consumers of all these CTAs have released it.
          initially_complete: whether `fill` waits in the first round as well, on
            barriers that are complete, in place of a condition.

        Returns:
          The ring, for `scratch_types` or `run_scoped`.

        Raises:
          ArgumentError: the buffers differ in their number of slots, or there are none.
          ArgumentTypeError: a buffer is not a declaration.
        """
        leaves = jax.tree.leaves(buffers, is_leaf=is_declaration)
        for leaf in leaves:
            require_declaration(leaf)
        arrays = jax.tree.leaves([getattr(leaf, "refs", leaf) for leaf in leaves])
        sizes = {array.shape[:1] for array in arrays}
        if len(sizes) != 1 or () in sizes:
            raise errors.ArgumentError(
                "Ring.of: the buffers do not have a number of slots in common",
                expected="one or more arrays, of equal first sizes",
                got=", ".join(str(array.shape) for array in arrays) or "no buffer",
                hint="declare plgpu.SMEM((stages, *tile), dtype) for each operand",
            )
        ((stages,),) = sizes
        full = types.Barrier(num_arrivals=copies or len(leaves), num_barriers=stages)
        empty = empties(stages, consumers, collective_axes, initially_complete)
        return cls(buffers, empty, full)

    @property
    def stages(self) -> int:
        """The number of slots."""
        return self.full.shape[0]

    @expect.arguments()
    def slot(self, step: Step) -> Slot:
        """Returns the slot of a step; waits for nothing.

        PTX: none. Since: sm_90. Issued by a warpgroup, or inside `warp_map` by a warp.

        Raises:
          ArgumentTypeError: the ring is a declaration.
        """
        if is_declaration(self.full):
            raise errors.ArgumentTypeError(
                "Ring.slot: the ring is a declaration",
                expected="a ring of references",
                got="one of declarations",
                hint="list it in scratch_types, and use the ring that the body gets",
            )
        i = ring_index(step, self.stages)
        buffers = jax.tree.map(
            lambda ref: ref.at[i], self.buffers, is_leaf=lambda x: hasattr(x, "at")
        )
        empty = None if self.empty is None else self.empty.at[i]
        return Slot(i, buffers, empty, self.full.at[i])

    @expect.arguments()
    def fill(self, step: Step, *, fresh: Any = None) -> Slot:
        """Waits until the slot of a step may be filled, without `empty` for nothing.

        PTX: mbarrier.try_wait, from step `stages` on. Since: sm_90.

        Issued by the warpgroup, or inside `warp_map` the warp, that fills the ring, for
        each step in order. It then starts the copies, which complete on `Slot.full`.

        Args:
          fresh: scalar bool, whether no slot was used before step 0; default: none was.
        """
        slot = self.slot(step)
        if self.empty is None:
            return slot
        waits: Any = True
        if not types.base_aval(self.empty).barrier.initially_complete:
            # lax's operations, as jnp's take several times as long to trace.
            waits = (
                step >= self.stages
                if isinstance(step, int)
                else lax.ge(step, np.int32(self.stages))
            )
            waits = waits if fresh is None else waits | jnp.logical_not(fresh)
        control.when(waits)(lambda: mbarrier.barrier_wait(slot.empty))
        return slot

    @expect.arguments()
    def take(self, step: Step) -> Slot:
        """Waits until the slot of a step is full.

        PTX: mbarrier.try_wait. Since: sm_90.

        Issued by each warpgroup, or inside `warp_map` each warp, that reads the ring,
        for each step in order.
        """
        slot = self.slot(step)
        mbarrier.barrier_wait(slot.full)
        return slot

    @expect.arguments()
    def release(self, step: Step) -> None:
        """Returns the slot of a step to whoever fills it.

        PTX: mbarrier.arrive. Since: sm_90.

        Issued by each warpgroup, or inside `warp_map` each warp, that reads the ring,
        once for each step, after its reads are complete. A `tcgen05_mma` that arrives
        on `Slot.empty` releases the slot by itself.
        """
        mbarrier.barrier_arrive(self.empty.at[ring_index(step, self.stages)])

    @expect.arguments()
    def accumulate(
        self,
        accumulators: Any,
        steps: Step,
        multiply: Callable[[Any, Slot], None],
        *,
        first: Step = 0,
        release: Callable[[Any], None] | None = None,
        may_be_empty: bool = False,
    ) -> list[jax.Array]:
        """Takes slots, multiplies, and releases each slot a step later.

        The products of a step stay under way while the next step begins: its slot is
        released when those of the next step have been issued and its own are complete,
        the last one when the accumulators have been read.

        PTX: wgmma.wait_group, mbarrier.try_wait, mbarrier.arrive. Since: sm_90a.

        Issued by each warpgroup that reads the ring.

        Args:
          accumulators: a sequence of references to accumulators.
          steps: number of steps: an integer, or an i32 scalar.
          multiply: `multiply(i, slot)` issues one `wgmma` for each accumulator, from
            the buffers of step `first + i`.
          first: number of the first step.
          release: `release(step)` returns what a step has read; default: `release` of
            this ring.
          may_be_empty: whether `steps`, if it is traced, may be 0.

        Returns:
          The contents of the accumulators.

        Raises:
          ArgumentError, ArgumentTypeError: a number is not an integer from 0 on.
          KernelError: `multiply` returns a value.
        """

        release = self.release if release is None else release

        @control.loop(0, steps)
        def _(i: Any) -> None:
            step = _later(first, i)
            scope.require_none(
                "Ring.accumulate", multiply, multiply(i, self.take(step))
            )
            wgmma_wait(len(accumulators))
            control.when(lax.gt(i, np.int32(0)))(lambda: release(_later(step, -1)))

        products = [acc[...] for acc in accumulators]
        some = steps > 0 if may_be_empty or isinstance(steps, int) else True
        control.when(some)(lambda: release(_later(_later(first, steps), -1)))
        return products

    def drain(self, steps: Any) -> None:
        """Waits until the slots of the last steps have been released.

        A CTA must not exit before the last arrival of another one on its barriers.

        PTX: mbarrier.try_wait. Since: sm_90. Issued by whoever has filled the ring.

        Args:
          steps: number of all steps: an integer, or an i32 scalar.
        """

        @control.loop(last_steps(steps, self.stages), steps)
        def _(i: Any) -> None:
            mbarrier.barrier_wait(self.empty.at[ring_index(i, self.stages)])


def empties(
    stages: int, consumers: int, collective_axes: Any, initially_complete: bool
) -> Any:
    common: dict[str, Any] = {
        "num_arrivals": consumers,
        "num_barriers": stages,
        "initially_complete": initially_complete,
    }
    if collective_axes:
        return types.ClusterBarrier(collective_axes=collective_axes, **common)
    return types.Barrier(**common)


def ring_index(step: Any, stages: int) -> Any:
    if isinstance(step, int):
        return step % stages
    return lax.rem(step, np.int32(stages)) if stages > 1 else 0


def last_steps(steps: Any, count: int) -> Any:
    if isinstance(steps, int):
        return max(steps - count, 0)
    return jnp.maximum(steps - count, 0)


def _later(step: Any, by: Any) -> Any:
    if isinstance(step, int):
        step, by = by, step
    if not isinstance(by, int):
        return lax.add(step, by)
    if by == 0:
        return step
    if isinstance(step, int):
        return step + by
    return lax.add(step, np.int32(by)) if by > 0 else lax.sub(step, np.int32(-by))
