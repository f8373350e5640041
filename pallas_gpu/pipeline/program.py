# SPDX-License-Identifier: Apache-2.0
"""A `pallas_call` over arrays: each CTA runs a pipeline over the sequential axes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, types
from pallas_gpu.checks.stores import Stores
from pallas_gpu.entry import kernel as kernel_lib
from pallas_gpu.entry import mutable, scope
from pallas_gpu.entry.scoped import is_declaration, scoped
from pallas_gpu.pipeline import call_specs
from pallas_gpu.pipeline.blocks import Stream, checked
from pallas_gpu.pipeline.emit import check_depth
from pallas_gpu.pipeline.executor import Pipeline
from pallas_gpu.pipeline.grid import Grid
from pallas_gpu.pipeline.streams import Body, Streams, body_names
from pallas_gpu.pipeline.team import Team


@dataclasses.dataclass(frozen=True)
class Program:
    """A `pallas_call` as a function over arrays, and the body of its kernel.

    Attributes:
      spec: pytrees; in a call a list with one for each argument that no
        index map reads, and one for each result.
      scratch: declarations, by position and by name.
      team: the warpgroups of a block; None: one, which copies as well.
      aliases: arguments whose array is a result's, by their positions.
    """

    kernel: Callable[..., None]
    spec: call_specs.Spec
    params: types.CompilerParams
    grid: Grid
    scratch: tuple[tuple[Any, ...], dict[str, Any]]
    team: Team | None
    name: str
    launch: Callable[..., Any]
    out_shape: Any
    aliases: Mapping[int, int]

    @property
    def who(self) -> str:
        return f"pallas_call {self.name}"

    def __call__(self, *args: Any) -> Any:
        spec, who, outs = self.spec, self.who, self.out_shape
        n = spec.num_scalar_prefetch
        call_specs.check_prefetched(args, n, self.name)
        ins = call_specs.block_specs(spec.in_specs, args[n:], f"{who}: in_specs")
        of_outs = call_specs.block_specs(spec.out_specs, outs, f"{who}: out_specs")
        spec = dataclasses.replace(spec, in_specs=ins, out_specs=of_outs)
        pairs = call_specs.aliases(self.aliases, args, outs, n, self.name)
        if not self.grid.parallel:
            spec = call_specs.in_place(spec, pairs)
        program = dataclasses.replace(self, spec=spec)
        out_tree = call_specs.structure(call_specs.at_top(outs))
        trees = call_specs.structure(args[n:]), out_tree

        @functools.wraps(self.kernel)
        def body(*refs: Any) -> None:
            program.run(call_specs.leaves(refs), *trees)

        tracer = functools.partial(
            kernel_lib.traced_for_gpu, require=program.require_own_parts
        )
        launch = functools.partial(
            self.launch, body, args, outs, aliases=pairs, tracer=tracer
        )
        if not self.grid.is_empty:
            return launch()
        # The body is traced all the same: a mistake does not depend on the grid.
        jax.eval_shape(launch)
        return self._untouched(args, pairs)

    def _untouched(self, args: Sequence[Any], aliases: Sequence[Any]) -> Any:
        """Returns the results of a grid without positions: zeros, or the arguments."""
        leaves, tree = jax.tree.flatten(self.out_shape)
        results = [jnp.zeros(x.shape, x.dtype) for x in leaves]
        given = call_specs.leaves(args)
        for i, j in aliases:
            own = given[i][...] if mutable.is_mutable(given[i]) else given[i]
            results[j] = jnp.asarray(own, leaves[j].dtype)
        return jax.tree.unflatten(tree, results)

    def run(self, refs: Sequence[Any], in_tree: Any, out_tree: Any) -> None:
        depth = self.params.max_concurrent_steps
        if self.grid.sequential:
            check_depth(self.who, depth, (*self.spec.in_specs, *self.spec.out_specs))
        n = self.spec.num_scalar_prefetch
        names = body_names(self.kernel, n, in_tree, out_tree, *self.scratch)
        read, own_names = refs[:n], names[len(refs) - n :]
        declared, tree = jax.tree.flatten(self.scratch, is_leaf=is_declaration)

        def with_shared(shared: list[Any]) -> None:
            scratch = shared

            def over(grid: Grid) -> Pipeline:
                program = dataclasses.replace(self, grid=grid)

                def step(indices: Sequence[Any], *blocks: Any) -> None:
                    positional, named = jax.tree.unflatten(tree, scratch)
                    program._call(indices, (*read, *blocks, *positional), named)

                with scope.locating(self.kernel):
                    streams = program._streams(refs, names, in_tree, out_tree)
                body = Body(step, self.who, has_carry=False)
                return Pipeline.of(body, streams, grid.steps, depth, self.team)

            def context(pipeline: Callable[[], None]) -> None:
                def with_own(own: list[Any]) -> None:
                    nonlocal scratch
                    scratch = own
                    pipeline()

                _allocated(shared, own_names, (), True, with_own)

            def run(memory: Any) -> None:
                if not self.grid.repeats:
                    first.run(memory, context=context)
                    return
                self.grid.for_each(lambda grid: over(grid).run(memory, context=context))

            first = over(self.grid.first)
            first.allocate(run)

        axes = () if self.team is None else self.team.axis
        _allocated(declared, own_names, axes, False, with_shared)

    def _call(
        self, indices: Sequence[Any], operands: Sequence[Any], named: dict[str, Any]
    ) -> None:
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


def _allocated(
    scratch: Sequence[Any],
    names: Sequence[str],
    axes: Any,
    per_warpgroup: bool,
    f: Callable[[list[Any]], None],
) -> None:
    """Calls `f` with scratch, of which a part has references in place of declarations.

    Args:
      axes: the thread axis, if the warpgroups of a block share the part.
      per_warpgroup: whether it is what is in the registers of a warpgroup.
    """
    part = {
        i: x
        for i, x in enumerate(scratch)
        if is_declaration(x) and x.memory_space.per_warpgroup is per_warpgroup
    }

    def with_refs(*refs: Any) -> None:
        allocated = dict(zip(part, refs, strict=True))
        f([allocated.get(i, x) for i, x in enumerate(scratch)])

    if part:
        scoped(with_refs, list(part.values()), {}, axes, [names[i] for i in part])
    else:
        with_refs()
