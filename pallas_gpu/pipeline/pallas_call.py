# SPDX-License-Identifier: Apache-2.0
"""`pallas_call`: a body over blocks, with a grid and block specs.

It is a `kernel` whose body is a pipeline over the sequential axes of the grid.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import control, scope
from pallas_gpu.entry import kernel as kernel_lib
from pallas_gpu.entry import scoped as scopes
from pallas_gpu.entry.names import parameter_names
from pallas_gpu.pipeline.blocks import Stream, checked, itself
from pallas_gpu.pipeline.emit import Pipeline, check_depth
from pallas_gpu.pipeline.streams import Body, Streams, is_spec

# JAX's names of axes whose steps run one after another.
_SEQUENTIAL = ("arbitrary", "sequential")


@expect.arguments(
    kernel=expect.function,
    out_shape=expect.anything,
    grid_spec=expect.optional(
        expect.instance(types.GridSpec, written="plgpu.GridSpec(grid=...)")
    ),
    grid=expect.anything,
    in_specs=expect.anything,
    out_specs=expect.anything,
    scratch_shapes=expect.anything,
    input_output_aliases=expect.optional(expect.instance(Mapping, written="{}")),
    debug=expect.boolean,
    interpret=expect.anything,
    name=expect.optional(expect.string),
    compiler_params=kernel_lib.PARAMS,
    cost_estimate=expect.anything,
    metadata=expect.anything,
)
def pallas_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid_spec: types.GridSpec | None = None,
    grid: int | Sequence[int] = (),
    in_specs: Any = None,
    out_specs: Any = None,
    scratch_shapes: Any = (),
    input_output_aliases: Mapping[int, int] | None = None,
    debug: bool = False,
    interpret: bool | types.InterpretParams | None = None,
    name: str | None = None,
    compiler_params: types.CompilerParams | None = None,
    cost_estimate: Any = None,
    metadata: dict[str, str] | None = None,
) -> Callable[..., Any]:
    """Transforms a function over blocks to a function over arrays.

    A parallel axis of the grid is an axis of the launch: each of its positions is one
    block (CTA) of one warpgroup. An axis with the dimension semantics "arbitrary" is a
    loop in each CTA, the last one innermost, and scratch references keep their contents
    from step to step.

    Input blocks are copied to SMEM by TMA before a step, up to
    `CompilerParams.max_concurrent_steps` steps ahead. An output's block is copied back
    when the next step has another one, or after the last step. Elements of a block that
    are out of bounds are read as zeros and are not stored.

    Issued by: the host. It completes like any JAX operation.

    Args:
      kernel: `kernel(*input_refs, *output_refs, *scratch_refs) -> None`.
      out_shape: pytree of `jax.ShapeDtypeStruct`.
      grid_spec: grid, specs and scratch in one object; replaces the next four.
      grid: sizes of the grid axes; `CompilerParams.dimension_semantics` says which are
        parallel, by default all.
      in_specs: pytree of `BlockSpec` for the arguments; None: whole arrays.
      out_specs: the same for the results.
      scratch_shapes: declarations of scratch references.
      input_output_aliases: not supported yet.
      debug: print the traced body.
      interpret: see `kernel`.
      name: name of the kernel.
      compiler_params: see `CompilerParams`.
      cost_estimate, metadata: hints for other compilers, which this one does not use.

    Returns:
      A function from arrays to results.

    Raises:
      KernelError and its classes: the body or a block spec is wrong.
      OutOfResources: the blocks do not fit into SMEM.

    Example:
      >>> spec = plgpu.BlockSpec((64, 128), lambda i, j: (i, j))
      >>> add = plgpu.pallas_call(add_body, x, grid=(8, 4), in_specs=[spec, spec],
      ...                         out_specs=spec)
    """
    types.refuse_foreign(
        (grid_spec, in_specs, out_specs, scratch_shapes, compiler_params, interpret),
        "pallas_call",
    )
    name = str(name or getattr(kernel, "__name__", "pallas_call"))
    given = types.GridSpec(grid, in_specs, out_specs, scratch_shapes)
    spec = _one_spec(grid_spec, given, name)
    if input_output_aliases:
        raise errors.UnsupportedError(
            f"pallas_call {name}: input_output_aliases is not supported yet",
            expected="no aliases",
            got=expect.shown(input_output_aliases),
            hint="omit it; the result is a new array",
            where=scope.location(kernel),
        )
    params = compiler_params or types.CompilerParams()
    sizes: Any = spec.grid if expect.is_sequence(spec.grid) else (spec.grid,)
    with scope.locating(kernel):
        interpret = kernel_lib.interpretation(interpret)
        kernel_lib.check_types(out_shape, name)
        kernel_lib.scratch_of(spec.scratch_shapes)
        names = tuple(_axis_name(a) for a in range(len(sizes)))
        whole = types.Mesh(grid=sizes, grid_names=names, kernel_name=name)
    sequential = _sequential_axes(params, whole.grid, name)
    parallel = [a for a in range(len(sizes)) if a not in sequential]
    mesh = types.Mesh(
        grid=tuple(whole.grid[a] for a in parallel),
        grid_names=tuple(names[a] for a in parallel),
        kernel_name=name,
    )
    launch = functools.partial(
        kernel_lib.launch_body,
        mesh=mesh,
        name=name,
        compiler_params=params,
        interpret=interpret,
        debug=debug,
        functions=(kernel, *_index_maps((spec.in_specs, spec.out_specs))),
        cache={},
    )

    def call(*args: Any) -> Any:
        in_leaves = _specs(spec.in_specs, args, f"pallas_call {name}: in_specs")
        out_leaves = _specs(spec.out_specs, out_shape, f"pallas_call {name}: out_specs")

        @functools.wraps(kernel)
        def body(*refs):
            flat = jax.tree.leaves(refs)
            scratch = spec.scratch_shapes
            bodies = _Blocks(
                kernel, whole.grid, sequential, in_leaves, out_leaves, scratch,
                params.max_concurrent_steps, name,
            )  # fmt: skip
            bodies.run(
                flat, jax.tree.structure(args), jax.tree.structure(_as_tuple(out_shape))
            )

        return launch(body, args, out_shape)

    return scope.over_arrays(call, kernel)


def _one_spec(
    grid_spec: types.GridSpec | None, given: types.GridSpec, name: str
) -> types.GridSpec:
    """Returns the grid and the specs, which are given together or one by one."""
    if grid_spec is None:
        return given
    empty = types.GridSpec()
    both = [
        f.name
        for f in dataclasses.fields(given)
        if getattr(given, f.name) is not getattr(empty, f.name)
    ]
    if both:
        raise errors.ArgumentError(
            f"pallas_call {name}: grid_spec contains {both[0]}",
            expected="grid_spec alone, or grid, in_specs, out_specs and scratch_shapes",
            got=f"grid_spec and {', '.join(both)}",
            hint="drop grid_spec, or move the arguments into it",
            where=_jax.where_now(),
        )
    return grid_spec


def _index_maps(specs: Any) -> list[Callable[..., Any]]:
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, types.BlockSpec))
    maps = (getattr(leaf, "index_map", None) for leaf in leaves)
    return [index_map for index_map in maps if index_map is not None]


def _sequential_axes(
    params: types.CompilerParams, grid: Sequence[int], name: str
) -> tuple[int, ...]:
    """Returns the axes of the grid whose steps run one after another in a CTA."""
    given = params.dimension_semantics
    if given is None:
        return ()
    if len(given) != len(grid):
        raise errors.ArgumentError(
            f"pallas_call {name}: dimension_semantics does not match the grid",
            expected=f"{len(grid)} entries, one for each grid axis",
            got=given,
            hint="write 'parallel' or 'arbitrary' for each axis, or leave it out",
            where=_jax.where_now(),
        )
    unknown = [kind for kind in given if kind not in ("parallel", *_SEQUENTIAL)]
    if unknown:
        raise errors.ArgumentError(
            f"pallas_call {name}: unknown dimension_semantics",
            expected="'parallel' or 'arbitrary' for each axis",
            got=given,
            hint="'arbitrary' axes run one step after another in each CTA",
            where=_jax.where_now(),
        )
    return tuple(a for a, kind in enumerate(given) if kind in _SEQUENTIAL)


def _specs(specs: Any, like: Any, what: str) -> list[types.BlockSpec]:
    """Returns one block spec for each leaf of `like`."""
    structure = jax.tree.structure(like)
    if specs is None:
        return [types.BlockSpec()] * structure.num_leaves
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    wrong = [x for x in leaves if not is_spec(x)]
    if wrong or len(leaves) != structure.num_leaves:
        raise errors.ArgumentError(
            f"{what} does not match the arrays",
            expected=f"{structure.num_leaves} BlockSpecs, one for each array",
            got=f"{expect.shown(wrong[0])}" if wrong else f"{len(leaves)} BlockSpecs",
            hint="use plgpu.BlockSpec(block_shape, index_map)",
            where=scope.called_at(),
        )
    return [types.BlockSpec() if x is None else x for x in leaves]


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The body of the kernel: a pipeline over the sequential axes of the grid."""

    kernel: Callable[..., None]
    grid: Sequence[int]
    sequential: Sequence[int]
    in_specs: Sequence[types.BlockSpec]
    out_specs: Sequence[types.BlockSpec]
    scratch: Any
    depth: int
    name: str

    def run(self, refs: Sequence[Any], in_tree: Any, out_tree: Any) -> None:
        """Runs the body at all steps of this CTA."""
        positional, named = kernel_lib.scratch_of(self.scratch)
        who = f"pallas_call {self.name}"
        sizes = [self.grid[a] for a in self.sequential]
        if sizes:
            check_depth(who, self.depth, (*self.in_specs, *self.out_specs))
        names = self._names(in_tree, out_tree, positional, named)
        with scope.locating(self.kernel):
            streams = self._streams(refs, names, in_tree, out_tree)

        def with_scratch(*scratch: Any, **named_scratch: Any) -> None:
            def step(indices: Sequence[Any], *blocks: Any) -> None:
                with scope.at_position(self._position(*indices), self.grid):
                    refs = (*blocks, *scratch)
                    result = scope.call(who, self.kernel, *refs, **named_scratch)
                control.require_none(who, self.kernel, result)

            body = Body(step, who, has_carry=False)
            Pipeline(body, streams, sizes, self.depth).run(None)

        if jax.tree.leaves((positional, named), is_leaf=scopes.is_declaration):
            own = names[len(refs) :]
            scopes.scoped(with_scratch, positional, named, (), own)
        else:
            with_scratch()

    def _names(self, in_tree: Any, out_tree: Any, positional: Any, named: Any) -> Any:
        """Returns the body's names of its blocks and of its scratch."""
        ins = jax.tree.unflatten(in_tree, [object()] * in_tree.num_leaves)
        outs = jax.tree.unflatten(out_tree, [object()] * out_tree.num_leaves)
        return parameter_names(self.kernel, (*ins, *outs, *positional), named)

    def _position(self, *indices: Any) -> list[Any]:
        """Returns the position on the whole grid at a step of the sequential axes."""
        steps = iter(indices)
        return [
            next(steps) if a in self.sequential else lax.axis_index(_axis_name(a))
            for a in range(len(self.grid))
        ]

    def _streams(
        self, refs: Sequence[Any], names: Sequence[str], in_tree: Any, out_tree: Any
    ) -> Streams:
        n_in, rank = len(self.in_specs), len(self.sequential)
        specs = (*self.in_specs, *self.out_specs)
        streams = [
            Stream(ref, spec, rank, self._what(i, n_in), names[i], self._position)
            for i, (ref, spec) in enumerate(zip(refs, specs, strict=True))
        ]
        for i, stream in enumerate(streams):
            checked(stream, output=i >= n_in, multicast=False)
        for stream in streams[n_in:]:
            self._require_own_block(stream)
        first = [jnp.int32(0)] * rank
        fitting = [stream.where_it_fits(first) for stream in streams]
        return Streams(fitting[:n_in], fitting[n_in:], in_tree, out_tree)

    def _what(self, i: int, n_in: int) -> str:
        kind, index = ("argument", i) if i < n_in else ("result", i - n_in)
        return f"{kind} {index} of pallas_call {self.name}"

    def _require_own_block(self, stream: Stream) -> None:
        """Refuses an output of which several CTAs write the same block."""
        if stream.spec.memory_space is types.GMEM:
            return
        everywhere = dataclasses.replace(
            stream, grid_rank=len(self.grid), position=itself
        )
        ignored = [
            f"axis {a} of size {n}"
            for a, n in enumerate(self.grid)
            if n > 1 and a not in self.sequential and a not in everywhere.axes
        ]
        if not ignored:
            return
        spec = stream.spec
        mapped = None if spec.block_shape is None else spec.index_map
        raise errors.ArgumentError(
            f"{stream.what}: several CTAs write the same block",
            expected="an index map that uses every parallel grid axis",
            got=f"an index map that ignores {', '.join(ignored)}"
            if mapped is not None
            else f"the same part of the array for each CTA along {', '.join(ignored)}",
            hint="use the axis in the index map; or make it sequential, "
            "dimension_semantics 'arbitrary'; or pass "
            "plgpu.BlockSpec(memory_space=plgpu.GMEM) and let each CTA store its own "
            "part of the array",
            where=scope.location(mapped or self.kernel),
        )


def _as_tuple(outs: Any) -> tuple[Any, ...]:
    return tuple(outs) if isinstance(outs, tuple | list) else (outs,)


def _axis_name(axis: int) -> str:
    return f"grid_axis_{axis}"
