# SPDX-License-Identifier: Apache-2.0
"""`emit_pipeline_warp_specialized`: one warpgroup copies, the others compute."""

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
from pallas_gpu.entry.scoped import is_declaration
from pallas_gpu.pipeline import emit
from pallas_gpu.pipeline.executor import Pipeline
from pallas_gpu.pipeline.loops import Grid
from pallas_gpu.pipeline.memory import declarations
from pallas_gpu.pipeline.streams import BlockSpecs, Body, streams_of
from pallas_gpu.pipeline.team import Team
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
      grid, out_specs, max_concurrent_steps: as of `emit_pipeline`.
      memory_registers: registers per thread that the memory warpgroup keeps, a multiple
        of 8 from 24 to its share of the block's; the others divide what it releases. 40
        is sufficient for most.
      in_specs: as of `emit_pipeline`; `collective_axes` names cluster axes along which
        the copies are multicast.
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
        body=Body(body, _WHO, compute_context is not None),
        grid=sizes,
        in_specs=in_specs,
        out_specs=out_specs,
        depth=max_concurrent_steps,
        team=Team(
            num_compute_wgs,
            wg_axis,
            memory_thread_idx,
            memory_registers,
            separate_full=manual_produced_barriers,
            manual_release=manual_consumed_barriers,
        ),
        state=pipeline_state,
        context=compute_context,
    )


@dataclasses.dataclass(frozen=True)
class WarpSpecializedPipeline:
    """A pipeline that `emit_pipeline_warp_specialized` has described."""

    body: Body
    grid: tuple[Any, ...]
    in_specs: Sequence[Any]
    out_specs: Sequence[Any]
    depth: int
    team: Team
    state: Any
    context: Callable[..., Any] | None

    def get_allocations(self, *refs: Any) -> Any:
        """Returns the declarations of the buffers and barriers, for `run_scoped`.

        Args:
          *refs: the references in GMEM that the pipeline will be called with.
        """
        return declarations(self._over(refs).memory())

    def __call__(self, *refs: Any, allocations: Any = None) -> None:
        """Runs the pipeline; all warpgroups of the block call it.

        Args:
          *refs: references in GMEM, inputs first.
          allocations: what `run_scoped` allocated for `get_allocations`.
        """
        pipeline = self._over(refs)
        self._check_state(pipeline, allocations)
        state = None if self.state is None else jnp.asarray(self.state, jnp.int32)
        run = functools.partial(
            pipeline.run,
            context=self.context,
            first=None if state is None else state == PipelinePipeline.START,
            last=None if state is None else state == PipelinePipeline.STOP,
        )
        if allocations is None:
            pipeline.allocate(run)
        else:
            _require_declared(allocations, declarations(pipeline.memory()))
            run(allocations)

    def _over(self, refs: Sequence[Any]) -> Pipeline:
        self._check_mesh()
        body, rank = self.body, len(self.grid)
        streams = streams_of(
            body, refs, self.in_specs, self.out_specs, rank, multicast=True
        )
        return Pipeline.of(body, streams, self.grid, self.depth, self.team)

    def _check_mesh(self) -> None:
        mesh = scope.current_mesh(_WHO)
        count, axis = self.team.warpgroups, self.team.axis
        if mesh.thread_name != axis or mesh.warpgroups != count:
            raise errors.ArgumentError(
                f"{_WHO}: the kernel's warpgroups do not match",
                expected=f"a kernel with num_threads={count}, thread_name={axis!r}",
                got=f"num_threads={mesh.warpgroups}, thread_name={mesh.thread_name!r}",
                hint="a block has the compute warpgroups and one memory warpgroup",
            )

    def _check_state(self, pipeline: Pipeline, allocations: Any) -> None:
        if self.state is None:
            return
        steps, reason = pipeline.moving.steps.count, None
        if allocations is None:
            reason = "it allocates its own buffers", "allocations=..."
        elif not pipeline.moving.across_ctas:
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
    expected, tree = jax.tree.flatten(declarations, is_leaf=is_declaration)
    given, given_tree = jax.tree.flatten(
        allocations, is_leaf=lambda x: hasattr(x, "shape")
    )
    pairs = [(str(tree), str(given_tree))]
    if given_tree == tree:
        wanted, avals = (x.to_ref() for x in expected), map(types.base_aval, given)
        pairs = [
            (_in_full(x), _in_full(y))
            for x, y in zip(wanted, avals, strict=True)
            if x != y
        ]
    if pairs:
        raise errors.ArgumentError(
            f"{_WHO}: the allocations are not those of this pipeline",
            expected=pairs[0][0],
            got=pairs[0][1],
            hint="pass what run_scoped allocated for get_allocations(*refs) of a "
            "pipeline with the same blocks, max_concurrent_steps and number of steps",
        )


def _in_full(aval: Any) -> str:
    return str(getattr(aval, "barrier", None) or types.describe(aval))
