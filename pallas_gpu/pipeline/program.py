# SPDX-License-Identifier: Apache-2.0
"""What each CTA of a `pallas_call` runs: a pipeline over the sequential axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import _jax, errors, types
from pallas_gpu.checks.stores import Stores
from pallas_gpu.entry import scope
from pallas_gpu.pipeline import call_specs
from pallas_gpu.pipeline.blocks import Stream, checked
from pallas_gpu.pipeline.emit import check_depth
from pallas_gpu.pipeline.executor import Pipeline
from pallas_gpu.pipeline.grid import Grid
from pallas_gpu.pipeline.scratch import Scratch
from pallas_gpu.pipeline.streams import Body, Streams, body_names
from pallas_gpu.pipeline.team import Team


@dataclasses.dataclass(frozen=True)
class Program:
    """The body of the kernel that a `pallas_call` launches.

    Attributes:
      kernel: the author's function.
      spec: the specs, a list with one for each argument that no index map reads, and a
        list with one for each result.
      params: parameters.
      grid: the grid.
      scratch: the author's scratch.
      team: the warpgroups of a block; None: one, which copies as well.
      name: of the call.
    """

    kernel: Callable[..., None]
    spec: call_specs.Spec
    params: types.CompilerParams
    grid: Grid
    scratch: Scratch
    team: Team | None
    name: str

    @property
    def who(self) -> str:
        """Its name in messages."""
        return f"pallas_call {self.name}"

    def run(self, refs: Sequence[Any], in_tree: Any, out_tree: Any) -> None:
        """Runs the body at all steps of this CTA."""
        depth = self.params.max_concurrent_steps
        if self.grid.sequential:
            check_depth(self.who, depth, (*self.spec.in_specs, *self.spec.out_specs))
        n = self.spec.num_scalar_prefetch
        names = body_names(self.kernel, n, in_tree, out_tree, *self.scratch.arguments)
        read, own_names = refs[:n], names[len(refs) - n :]

        def with_shared(shared: Scratch) -> None:
            scratch = shared

            def over(grid: Grid) -> Pipeline:
                program = dataclasses.replace(self, grid=grid)

                def step(indices: Sequence[Any], *blocks: Any) -> None:
                    positional, named = scratch.arguments
                    program._call(indices, (*read, *blocks, *positional), named)

                with scope.locating(self.kernel):
                    streams = program._streams(refs, names, in_tree, out_tree)
                body = Body(step, self.who, has_carry=False)
                return Pipeline.of(body, streams, grid.steps, depth, self.team)

            def context(pipeline: Callable[[], None]) -> None:
                def with_own(own: Scratch) -> None:
                    nonlocal scratch
                    scratch = own
                    pipeline()

                shared.allocate(with_own, own_names, (), per_warpgroup=True)

            def run(memory: Any) -> None:
                if not self.grid.repeats:
                    first.run(memory, context=context)
                    return
                self.grid.for_each(lambda grid: over(grid).run(memory, context=context))

            first = over(self.grid.first)
            first.allocate(run)

        axes = () if self.team is None else self.team.axis
        self.scratch.allocate(with_shared, own_names, axes, per_warpgroup=False)

    def _call(
        self, indices: Sequence[Any], operands: Sequence[Any], named: dict[str, Any]
    ) -> None:
        """Calls the author's function at a step."""
        with scope.at_position(self.grid.position(*indices), self.grid.sizes):
            result = scope.call(self.who, self.kernel, *operands, **named)
        scope.require_none(self.who, self.kernel, result)

    # --- arrays -----------------------------------------------------------------------

    def _streams(
        self, refs: Sequence[Any], names: Sequence[str], in_tree: Any, out_tree: Any
    ) -> Streams:
        spec, rank = self.spec, len(self.grid.sequential)
        n, n_in = spec.num_scalar_prefetch, len(spec.in_specs)
        specs = [self._placed(x) for x in (*spec.in_specs, *spec.out_specs)]
        read = tuple(refs[:n])

        def position(*steps: Any) -> Sequence[Any]:
            return (*self.grid.position(*steps), *read)

        streams = []
        arrays = zip(refs[n:], specs, names[: len(specs)], strict=True)
        for i, (ref, placed, name) in enumerate(arrays):
            stream = Stream(ref, placed, rank, self._what(i), name, position)
            streams.append(checked(stream, output=i >= n_in, multicast=False))
        for i, stream in enumerate(streams):
            everywhere = dataclasses.replace(
                stream,
                grid_rank=len(self.grid.sizes),
                position=lambda *indices: (*indices, *read),
            )
            for axis, size in enumerate(self.grid.sizes):
                if isinstance(size, int) and size > 1:
                    everywhere.require_block_indices(axis, size)
            if i >= n_in:
                self._require_own_block(everywhere)
        first = [jnp.int32(0)] * rank
        fitting = [stream.where_it_fits(first) for stream in streams]
        for stream in fitting:
            stream.require_smem()
        return Streams(fitting[:n_in], fitting[n_in:], in_tree, out_tree)

    def _placed(self, spec: types.BlockSpec) -> types.BlockSpec:
        """Returns the spec; CTAs share a whole array of no stated memory in GMEM."""
        memory = self.params.block_memory_space
        if memory is None and spec == types.no_block_spec and self.grid.parallel:
            memory = types.GMEM
        if memory is None or spec.memory_space is not None:
            return spec
        return spec.replace(memory_space=memory)

    def require_own_parts(self, jaxpr: _jax.Jaxpr, results: Sequence[Any]) -> None:
        """Refuses a body in which each CTA stores the same elements of a whole result.

        That is certain where the index is static and nothing orders the CTAs. The
        emulator finds the other cases, as races.
        """
        specs = zip(results, self.spec.out_specs, strict=True)
        n_in = len(self.spec.in_specs)
        shared = {
            ref: self._what(n_in + i)
            for i, (ref, spec) in enumerate(specs)
            if spec == types.no_block_spec
        }
        if not shared or not self.grid.several:
            return
        stores = Stores(jaxpr, shared, ()).certain()
        found = next((x for x in stores if not x[2].window.dynamic), None)
        if found is None:
            return
        ref, site, _ = found
        raise errors.ArgumentError(
            f"{shared[ref]}: several CTAs write the same elements",
            expected="a part of its own for each CTA: without a block spec the result "
            "is the whole array, in GMEM",
            got="the same part of the array for each CTA along "
            f"{self._axes(self.grid.several)}",
            hint="pass plgpu.BlockSpec(block_shape, index_map), one block a CTA; "
            "or index the result by plgpu.program_id; or make the axis sequential, "
            "dimension_semantics 'arbitrary'",
            where=site.where,
        )

    def _axes(self, axes: Sequence[int]) -> str:
        return ", ".join(f"axis {a} of size {self.grid.sizes[a]}" for a in axes)

    def _what(self, i: int) -> str:
        n_in = len(self.spec.in_specs)
        kind, index = "result", i - n_in
        if i < n_in:
            kind, index = "argument", self.spec.num_scalar_prefetch + i
        return f"{kind} {index} of {self.who}"

    def _require_own_block(self, stream: Stream) -> None:
        """Refuses an output of which several CTAs write the same block."""
        if stream.spec.memory_space is types.GMEM:
            return
        ignored = [a for a in self.grid.several if a not in stream.axes]
        if not ignored:
            return
        spec = stream.spec
        mapped = None if spec.block_shape is None else spec.index_map
        blocks = "use the axis in the index map"
        if mapped is None:
            blocks = "pass plgpu.BlockSpec(block_shape, index_map), one block a CTA"
        raise errors.ArgumentError(
            f"{stream.what}: several CTAs write the same block",
            expected="an index map that uses every parallel grid axis",
            got=f"an index map that ignores {self._axes(ignored)}"
            if mapped is not None
            else f"the same part of the array for each CTA along {self._axes(ignored)}",
            hint=f"{blocks}; or make it sequential, dimension_semantics 'arbitrary'; "
            "or pass plgpu.BlockSpec(memory_space=plgpu.GMEM) and let each CTA store "
            "its own part of the array",
            where=scope.location(mapped or self.kernel),
        )
