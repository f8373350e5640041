# SPDX-License-Identifier: Apache-2.0
"""`emit_pipeline_warp_specialized`: one warpgroup copies, the others compute.

The memory warpgroup fills rings of buffers; a barrier `full` of each buffer completes
when its copies have arrived, a barrier `free` when all compute warpgroups, in all CTAs
of a multicast, have released it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import scope
from pallas_gpu.entry.scoped import is_declaration, scoped
from pallas_gpu.pipeline import emit
from pallas_gpu.pipeline.division import Division
from pallas_gpu.pipeline.loops import Grid
from pallas_gpu.pipeline.streams import BlockSpecs, Body, streams_of
from pallas_gpu.types import values

_WHO = "emit_pipeline_warp_specialized"


class PipelinePipeline(enum.IntEnum):
    """The position of a pipeline in a sequence of pipelines that share buffers."""

    START = 0
    STEADY = 1
    STOP = 2


def _state(value: Any, what: str) -> Any:
    """Accepts a member of PipelinePipeline, or a scalar that is traced."""
    value = values.index(value, what)
    if _jax.is_tracer(value) or value in tuple(PipelinePipeline):
        return value
    raise expect.wrong_type(
        what,
        "a state of a pipeline",
        ", ".join(f"plgpu.PipelinePipeline.{s.name}" for s in PipelinePipeline),
        value,
        "write plgpu.PipelinePipeline.START",
    )


@expect.arguments(
    num_compute_wgs=expect.integer(1),
    pipeline_state=expect.optional(_state),
)
def emit_pipeline_warp_specialized(
    body: Callable[..., Any],
    *,
    grid: Grid,
    memory_registers: int,
    in_specs: BlockSpecs = (),
    out_specs: BlockSpecs = (),
    max_concurrent_steps: emit.Buffers = 2,
    wg_axis: str,
    num_compute_wgs: int,
    pipeline_state: Any = None,
    manual_produced_barriers: bool = False,
    manual_consumed_barriers: bool = False,
    compute_context: Callable[..., Any] | None = None,
    memory_thread_idx: int | None = None,
) -> WarpSpecializedPipeline:
    """Runs a body over a grid in several warpgroups, while another one copies blocks.

    One warpgroup of the block copies input blocks by TMA, up to
    `max_concurrent_steps` steps ahead; all others run the body at every step and share
    its blocks. See `emit_pipeline` for the order of steps and for outputs, which all
    compute warpgroups write together.

    Issued by: all warpgroups of a block. When it returns, the copies of the results are
    complete in the first compute warpgroup.

    Args:
      body: `body(indices, *inputs, *outputs, *produced, *consumed)`, with a last
        argument `carry` if there is a `compute_context`; it then returns the next
        carry.
      grid: sizes of the axes: ints or i32 scalars of the kernel.
      memory_registers: registers per thread that the memory warpgroup keeps, a multiple
        of 8 from 24 to its share of the block's; the others divide what it releases. 40
        is sufficient for most.
      in_specs: block specs of the inputs; each may be a pytree of them, or None. The
        field `delay_release=d` releases a block d steps later, for products that the
        body has not waited for; after the last step the pipeline waits for those of
        `wgmma`.
        `collective_axes` names cluster axes along which the copies are multicast.
      out_specs: block specs of the outputs.
      max_concurrent_steps: number of buffers of each block that changes.
      wg_axis: the kernel's thread axis.
      num_compute_wgs: number of warpgroups that compute, one less than the block has.
      pipeline_state: START, STEADY, ... STOP (`PipelinePipeline`, or an i32 scalar) for
        pipelines with multicasts that follow each other with the same `allocations`:
        copies of the next one start before the last steps of the one before have been
        computed, as they do without multicasts.
      manual_produced_barriers: the body gets a barrier per input, and waits on it. The
        barriers are in pytrees like `in_specs`, with None for an input whose block
        does not change.
      manual_consumed_barriers: the body gets a barrier per input as well; every compute
        warpgroup arrives on each once a step. With `delay_release=d` it is the barrier
        of the block d steps before: the body does not arrive on it in the first d
        steps. The pipeline releases the blocks of the last d steps.
      compute_context: `compute_context(pipeline)` is called by the compute warpgroups
        and calls `pipeline(init_carry)` once, which returns the last carry.
      memory_thread_idx: index of the memory warpgroup; default: the last one.

    Returns:
      A function of the references in GMEM, inputs first. Its argument `allocations`
      takes the references that the caller has allocated with
      `run_scoped(f, allocations=pipeline.get_allocations(*refs),
      collective_axes=wg_axis)`.

    Raises:
      ArgumentError: warpgroups, depth, specs or state do not match.
      LayoutError: neither TMA nor threads can copy a block.

    Example:
      >>> pipeline = plgpu.emit_pipeline_warp_specialized(
      ...     body, grid=(k_tiles,), in_specs=[a_spec, b_spec], wg_axis="wg",
      ...     num_compute_wgs=2, memory_registers=40, max_concurrent_steps=4,
      ...     compute_context=context)
      >>> pipeline(a_gmem, b_gmem)
    """
    sizes = tuple(grid)
    specs = jax.tree.leaves((in_specs, out_specs))
    emit.check_depth(_WHO, max_concurrent_steps, specs)
    if memory_thread_idx is None:
        memory_thread_idx = num_compute_wgs
    if not 0 <= memory_thread_idx <= num_compute_wgs:
        raise errors.ArgumentError(
            f"{_WHO}: the block has no warpgroup of memory_thread_idx",
            expected=f"0 to {num_compute_wgs}",
            got=memory_thread_idx,
            hint="omit memory_thread_idx: it is the last one",
        )
    return WarpSpecializedPipeline(
        body=body,
        grid=sizes,
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        depth=max_concurrent_steps,
        wg_axis=wg_axis,
        compute_wgs=num_compute_wgs,
        memory_wg=memory_thread_idx,
        memory_registers=memory_registers,
        state=pipeline_state,
        manual_produced=manual_produced_barriers,
        manual_consumed=manual_consumed_barriers,
        context=compute_context,
    )


@dataclasses.dataclass(frozen=True)
class WarpSpecializedPipeline:
    """A pipeline that `emit_pipeline_warp_specialized` has described."""

    body: Callable[..., Any]
    grid: tuple[Any, ...]
    in_specs: list[Any]
    out_specs: list[Any]
    depth: int
    wg_axis: str
    compute_wgs: int
    memory_wg: int
    memory_registers: int
    state: Any
    manual_produced: bool
    manual_consumed: bool
    context: Callable[..., Any] | None

    def get_allocations(self, *refs: Any) -> Any:
        """Returns the declarations of the buffers and barriers, for `run_scoped`.

        Args:
          *refs: the references in GMEM that the pipeline will be called with.
        """
        return self._division(refs).declarations()

    def __call__(self, *refs: Any, allocations: Any = None) -> None:
        """Runs the pipeline; all warpgroups of the block call it.

        Args:
          *refs: references in GMEM, inputs first.
          allocations: what `run_scoped` allocated for `get_allocations`.
        """
        division = self._division(refs)
        self._check_state(division, allocations)
        declarations = division.declarations()
        state = None if self.state is None else jnp.asarray(self.state, jnp.int32)
        run = functools.partial(
            division.run,
            context=self.context,
            first=None if state is None else state == PipelinePipeline.START,
            last=None if state is None else state == PipelinePipeline.STOP,
        )
        if allocations is not None:
            _require_declared(allocations, declarations)
            run(allocations)
            return
        names = jax.tree.leaves(division.names())
        scoped(run, (declarations,), {}, self.wg_axis, names)

    def _division(self, refs: Sequence[Any]) -> Division:
        self._check_mesh()
        body = Body(self.body, _WHO, self.context is not None)
        streams = streams_of(
            body, refs, self.in_specs, self.out_specs, len(self.grid), multicast=True
        )
        return Division.of(
            body,
            streams,
            self.grid,
            self.depth,
            compute_wgs=self.compute_wgs,
            axis=self.wg_axis,
            memory_registers=self.memory_registers,
            memory_wg=self.memory_wg,
            manual_produced=self.manual_produced,
            manual_consumed=self.manual_consumed,
        )

    def _check_mesh(self) -> None:
        mesh = scope.current_mesh(_WHO)
        expected = f"num_threads={self.compute_wgs + 1}, thread_name={self.wg_axis!r}"
        if mesh.thread_name != self.wg_axis or mesh.warpgroups != self.compute_wgs + 1:
            raise errors.ArgumentError(
                f"{_WHO}: the kernel's warpgroups do not match",
                expected=f"a kernel with {expected}",
                got=f"num_threads={mesh.warpgroups}, thread_name={mesh.thread_name!r}",
                hint="a block has the compute warpgroups and one memory warpgroup",
            )

    def _check_state(self, division: Division, allocations: Any) -> None:
        if self.state is None:
            return
        steps, reason = division.producer.inputs.steps, None
        if allocations is None:
            reason = "it allocates its own buffers", "allocations=..."
        elif not division.producer.releases.across_ctas:
            return
        elif not isinstance(steps, int) or not steps:
            # The next pipeline waits for each buffer that this one leaves unused.
            count = steps if isinstance(steps, int) else "a traced number of"
            reason = f"{count} steps", "a static number of steps, 1 or more"
        if reason is not None:
            raise errors.ArgumentError(
                f"{_WHO}: the pipeline cannot be one of a sequence",
                expected=reason[1],
                got=reason[0],
                hint="omit pipeline_state; each pipeline then waits for its last step",
            )


def _require_declared(allocations: Any, declarations: Any) -> None:
    """Raises unless the allocations are those of some declarations."""
    expected, tree = jax.tree.flatten(declarations, is_leaf=is_declaration)
    given, given_tree = jax.tree.flatten(
        allocations, is_leaf=lambda x: hasattr(x, "shape")
    )
    difference = None
    if given_tree != tree:
        difference = str(tree), str(given_tree)
    else:
        for declaration, ref in zip(expected, given, strict=True):
            wanted, aval = declaration.to_ref(), types.base_aval(ref)
            if wanted != aval:
                difference = _in_full(wanted), _in_full(aval)
    if difference is not None:
        raise errors.ArgumentError(
            f"{_WHO}: the allocations are not those of this pipeline",
            expected=difference[0],
            got=difference[1],
            hint="pass what run_scoped allocated for get_allocations(*refs) of a "
            "pipeline with the same blocks, max_concurrent_steps and number of steps",
        )


def _in_full(aval: Any) -> str:
    """Describes an allocation, with what distinguishes it from similar ones."""
    return str(getattr(aval, "barrier", None) or types.describe(aval))
