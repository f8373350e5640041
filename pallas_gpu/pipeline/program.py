# SPDX-License-Identifier: Apache-2.0
"""What each CTA of a `pallas_call` runs: a pipeline over the sequential axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry import scope
from pallas_gpu.entry.names import parameter_names
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.pipeline.blocks import Stream, checked
from pallas_gpu.pipeline.division import Division
from pallas_gpu.pipeline.emit import Pipeline, check_depth
from pallas_gpu.pipeline.grid import Grid, Threads
from pallas_gpu.pipeline.scratch import Scratch
from pallas_gpu.pipeline.shared import require_own_parts
from pallas_gpu.pipeline.streams import Body, Streams


@dataclasses.dataclass(frozen=True)
class Program:
    """The body of the kernel that a `pallas_call` launches.

    Attributes:
      kernel: the author's function.
      grid: the grid.
      prefetched: number of arguments that index maps read.
      in_specs, out_specs: a spec for each other argument, and for each result.
      scratch: the author's scratch.
      threads: the compute warpgroups of a block; None: one, which copies as well.
      depth: number of buffers of a block that changes.
      memory: of blocks whose spec names none.
      name: of the call.
    """

    kernel: Callable[..., None]
    grid: Grid
    prefetched: int
    in_specs: Sequence[types.BlockSpec]
    out_specs: Sequence[types.BlockSpec]
    scratch: Scratch
    threads: Threads | None
    depth: int
    memory: types.MemorySpace | None
    name: str

    @property
    def _who(self) -> str:
        return f"pallas_call {self.name}"

    def run(self, refs: Sequence[Any], in_tree: Any, out_tree: Any) -> None:
        """Runs the body at all steps of this CTA.

        Args:
          refs: references in GMEM: prefetched arguments, other ones, results.
          in_tree, out_tree: structures of the body's arguments for the last two.
        """
        if self.grid.sequential:
            check_depth(self._who, self.depth, (*self.in_specs, *self.out_specs))
        names = self._names(in_tree, out_tree)

        def at(grid: Grid) -> tuple[Program, Streams]:
            program = dataclasses.replace(self, grid=grid)
            with scope.locating(self.kernel):
                return program, program._streams(refs, names, in_tree, out_tree)

        prefetched, scratch_names = refs[: self.prefetched], names[len(refs) :]
        if self.threads is not None:
            self._in_several(at, prefetched, scratch_names, self.threads)
            return

        def tile(grid: Grid) -> None:
            program, streams = at(grid)
            program._in_one_warpgroup(streams, prefetched, scratch_names)

        self.grid.for_each(tile)

    def _in_one_warpgroup(
        self, streams: Streams, prefetched: Sequence[Any], names: Sequence[str]
    ) -> None:
        """Copies and computes in the only warpgroup."""
        held = [s for s in (*streams.inputs, *streams.outputs) if s.needs_buffer]
        if not held:
            self._with_scratch(streams, prefetched, names)
            return

        def with_buffers(*buffers: Any) -> None:
            placed = streams.holding(list(zip(held, buffers, strict=True)))
            self._with_scratch(placed, prefetched, names)

        declared = [s.buffers(1) for s in held]
        scoped(with_buffers, declared, {}, (), [s.name for s in held])

    def _with_scratch(
        self, streams: Streams, prefetched: Sequence[Any], names: Sequence[str]
    ) -> None:
        scratch = self.scratch

        def with_scratch(*positional: Any, **named: Any) -> None:
            def step(indices: Sequence[Any], *blocks: Any) -> None:
                streams.fetch(indices)
                self._call(indices, (*prefetched, *blocks, *positional), named)
                streams.flush(indices, self.grid.steps)

            body = Body(step, self._who, has_carry=False)
            Pipeline(body, streams, self.grid.steps, self.depth).run(None)

        if scratch.is_empty:
            with_scratch()
        else:
            scoped(with_scratch, scratch.positional, scratch.named, (), names)

    def _in_several(
        self,
        at: Callable[[Grid], tuple[Program, Streams]],
        prefetched: Sequence[Any],
        names: Sequence[str],
        threads: Threads,
    ) -> None:
        """Computes in several warpgroups; another one copies along sequential axes."""
        scratch = self.scratch

        def with_shared(*shared: Any) -> None:
            def division(grid: Grid) -> Division:
                program, streams = at(grid)

                def step(indices: Sequence[Any], *operands: Any) -> Any:
                    *blocks, own = operands
                    positional, named = scratch.arguments(shared, own)
                    refs = (*prefetched, *blocks, *positional)
                    program._call(indices, refs, named)
                    return own

                return Division.of(
                    Body(step, self._who, has_carry=True),
                    streams,
                    grid.steps,
                    self.depth,
                    compute_wgs=threads.count,
                    axis=threads.name,
                    memory_registers=threads.memory_registers(grid),
                    last=True,
                    again=grid.repeats,
                )

            def context(pipeline: Callable[..., Any]) -> None:
                def with_own(*own: Any) -> None:
                    pipeline(own)

                scratch.own(with_own, names)

            def run(memory: Any) -> None:
                self.grid.for_each(
                    lambda grid: division(grid).run(memory, context=context)
                )

            first = division(self.grid.first)
            buffers = jax.tree.leaves(first.names())
            scoped(run, (first.declarations(),), {}, threads.name, buffers)

        scratch.shared(with_shared, names, threads.name)

    def _call(
        self, indices: Sequence[Any], operands: Sequence[Any], named: dict[str, Any]
    ) -> None:
        """Calls the author's function at a step."""
        with scope.at_position(self.grid.position(*indices), self.grid.sizes):
            result = scope.call(self._who, self.kernel, *operands, **named)
        scope.require_none(self._who, self.kernel, result)

    def _names(self, in_tree: Any, out_tree: Any) -> list[str]:
        """Returns the body's names of all its references."""
        first = [object()] * self.prefetched
        ins = jax.tree.unflatten(in_tree, [object()] * in_tree.num_leaves)
        outs = jax.tree.unflatten(out_tree, [object()] * out_tree.num_leaves)
        operands = (*first, *ins, *outs, *self.scratch.positional)
        return parameter_names(self.kernel, operands, self.scratch.named)

    # --- arrays -----------------------------------------------------------------------

    def _streams(
        self, refs: Sequence[Any], names: Sequence[str], in_tree: Any, out_tree: Any
    ) -> Streams:
        n, n_in = self.prefetched, len(self.in_specs)
        rank = len(self.grid.sequential)
        specs = [self._placed(spec) for spec in (*self.in_specs, *self.out_specs)]
        read = tuple(refs[:n])

        def position(*steps: Any) -> Sequence[Any]:
            return (*self.grid.position(*steps), *read)

        streams = [
            Stream(ref, spec, rank, self._what(i), name, position)
            for i, (ref, spec, name) in enumerate(
                zip(refs[n:], specs, names[n : len(refs)], strict=True)
            )
        ]
        streams = [
            checked(stream, output=i >= n_in, multicast=False)
            for i, stream in enumerate(streams)
        ]
        for i, stream in enumerate(streams):
            everywhere = dataclasses.replace(
                stream,
                grid_rank=len(self.grid.sizes),
                position=lambda *indices: (*indices, *read),
            )
            self._require_block_indices(everywhere)
            if i >= n_in:
                self._require_own_block(everywhere)
        first = [jnp.int32(0)] * rank
        alone = self.threads is None
        fitting = [stream.where_it_fits(first, alone) for stream in streams]
        for stream in fitting:
            stream.require_smem()
        return Streams(fitting[:n_in], fitting[n_in:], in_tree, out_tree)

    def _placed(self, spec: types.BlockSpec) -> types.BlockSpec:
        """Returns the spec; CTAs share a whole array of no stated memory in GMEM."""
        memory = self.memory
        if memory is None and spec == types.no_block_spec and self.grid.parallel:
            memory = types.GMEM
        if memory is None or spec.memory_space is not None:
            return spec
        return spec.replace(memory_space=memory)

    def require_own_parts(self, jaxpr: _jax.Jaxpr, results: Sequence[Any]) -> None:
        """Refuses a body that stores the same part of a shared result in each CTA.

        Args:
          jaxpr: the traced body of the kernel.
          results: its references to the results.

        Raises:
          ArgumentError: see `shared.require_own_parts`.
        """
        specs = zip(results, self.out_specs, strict=True)
        shared = {
            ref: self._what(len(self.in_specs) + i)
            for i, (ref, spec) in enumerate(specs)
            if spec == types.no_block_spec
        }
        axes = [f"axis {a} of size {self.grid.sizes[a]}" for a in self.grid.several]
        if shared and axes:
            require_own_parts(jaxpr, shared, ", ".join(axes))

    def _what(self, i: int) -> str:
        n_in = len(self.in_specs)
        kind, index = "result", i - n_in
        if i < n_in:
            kind, index = "argument", self.prefetched + i
        return f"{kind} {index} of {self._who}"

    def _require_block_indices(self, stream: Stream) -> None:
        """Refuses an index map that multiplies the index of a block by its size."""
        for a, n in enumerate(self.grid.sizes):
            if isinstance(n, int) and n > 1:
                stream.require_block_indices(a, n)

    def _require_own_block(self, stream: Stream) -> None:
        """Refuses an output of which several CTAs write the same block."""
        if stream.spec.memory_space is types.GMEM:
            return
        ignored = [
            f"axis {a} of size {self.grid.sizes[a]}"
            for a in self.grid.several
            if a not in stream.axes
        ]
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
            got=f"an index map that ignores {', '.join(ignored)}"
            if mapped is not None
            else f"the same part of the array for each CTA along {', '.join(ignored)}",
            hint=f"{blocks}; or make it sequential, dimension_semantics 'arbitrary'; "
            "or pass plgpu.BlockSpec(memory_space=plgpu.GMEM) and let each CTA store "
            "its own part of the array",
            where=scope.location(mapped or self.kernel),
        )
