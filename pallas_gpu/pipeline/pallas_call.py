# SPDX-License-Identifier: Apache-2.0
"""`pallas_call`: a body over blocks, with a parallel grid and block specs.

It is a `kernel` whose body is implemented here with the public primitives: it copies
the input blocks to SMEM by TMA, runs the user's body, and copies output blocks back.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import check, control, scope
from pallas_gpu.entry import kernel as kernel_lib
from pallas_gpu.entry import scoped as scopes
from pallas_gpu.entry.names import parameter_names
from pallas_gpu.layouts.window import Window
from pallas_gpu.pipeline import parallel
from pallas_gpu.primitives import mbarrier, tma
from pallas_gpu.types import values

# What Python's and NumPy's sequences raise for an index that is being traced.
_INDEXED_WITH_A_TRACER = (
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    IndexError,
)


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

    Each instance of the grid is one block (CTA) of one warpgroup. Its input blocks are
    copied to SMEM by TMA before the body runs, its output blocks back afterwards.
    Elements of a block that are out of bounds are read as zeros and are not stored.

    Issued by: the host. It completes like any JAX operation.

    Args:
      kernel: `kernel(*input_refs, *output_refs, *scratch_refs) -> None`.
      out_shape: pytree of `jax.ShapeDtypeStruct`.
      grid_spec: grid, specs and scratch in one object; replaces the next four.
      grid: sizes of the parallel grid axes.
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
        mesh = types.Mesh(
            grid=sizes,
            grid_names=tuple(f"grid_axis_{i}" for i in range(len(sizes))),
            kernel_name=name,
        )
    _check_semantics(params, mesh, name)
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
            bodies = _Blocks(kernel, mesh, in_leaves, out_leaves, scratch, name)
            bodies.run(flat, jax.tree.structure(args), jax.tree.structure(out_shape))

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


def _check_semantics(params: types.CompilerParams, mesh: types.Mesh, name: str) -> None:
    given = params.dimension_semantics
    if given is not None and len(given) != len(mesh.grid):
        raise errors.ArgumentError(
            f"pallas_call {name}: dimension_semantics does not match the grid",
            expected=f"{len(mesh.grid)} entries, one for each grid axis",
            got=given,
            hint="write ('parallel',) * len(grid), or leave it out",
            where=_jax.where_now(),
        )
    for semantics in given or ():
        if semantics != "parallel":
            raise errors.UnsupportedError(
                f"pallas_call {name}: only parallel grid axes are supported",
                expected="'parallel' for each axis",
                got=params.dimension_semantics,
                hint="loop in the body with plgpu.loop",
                where=_jax.where_now(),
            )


def _specs(specs: Any, like: Any, what: str) -> list[types.BlockSpec]:
    """Returns one block spec for each leaf of `like`."""
    structure = jax.tree.structure(like)
    if specs is None:
        return [types.BlockSpec()] * structure.num_leaves
    is_spec = lambda x: x is None or isinstance(x, types.BlockSpec)  # noqa: E731
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
class _Block:
    """One argument or result: its reference, its block and the body's reference."""

    window: Any  # the part of the GMEM reference
    declaration: types.ScratchType | None  # None: the GMEM reference is passed
    transfer_shape: tuple[int, ...]
    oob_fill_mode: types.OOBFillMode = types.OOBFillMode.ZEROS


@dataclasses.dataclass(frozen=True)
class _Blocks:
    kernel: Callable[..., None]
    mesh: types.Mesh
    in_specs: Sequence[types.BlockSpec]
    out_specs: Sequence[types.BlockSpec]
    scratch: Any
    name: str

    def run(self, refs: Sequence[Any], in_tree: Any, out_tree: Any) -> None:
        n_in = len(self.in_specs)
        specs = (*self.in_specs, *self.out_specs)
        with scope.locating(self.kernel):
            blocks = [
                self._block(ref, spec, self._what(i, n_in))
                for i, (ref, spec) in enumerate(zip(refs, specs, strict=True))
            ]
            for i, spec in enumerate(self.out_specs):
                what = self._what(n_in + i, n_in)
                parallel.require_own_blocks(spec, self.mesh, what, self.kernel)
        inputs = [b for b in blocks[:n_in] if b.declaration is not None]
        outputs = [b for b in blocks[n_in:] if b.declaration is not None]
        declarations = [b.declaration for b in (*inputs, *outputs)]
        barriers = [types.Barrier(num_arrivals=len(inputs))] if inputs else []
        positional, named = self._scratch()

        def scoped(*allocated, **named_refs):
            smem = list(allocated[: len(declarations)])
            rest = allocated[len(declarations) + len(barriers) :]
            barrier = allocated[len(declarations)] if barriers else None
            self._copy_in(inputs, smem, barrier)
            queue = iter(smem)
            seen = [
                next(queue) if b.declaration is not None else b.window for b in blocks
            ]
            ins = jax.tree.unflatten(in_tree, seen[:n_in])
            outs = jax.tree.unflatten(out_tree, seen[n_in:])
            outs = outs if isinstance(outs, tuple | list) else (outs,)
            result = scope.call(
                f"pallas_call {self.name}",
                self.kernel,
                *ins,
                *outs,
                *rest,
                **named_refs,
            )
            if result is not None:
                raise errors.KernelError(
                    f"pallas_call {self.name}: the body returns a value",
                    expected="None",
                    got="a result",
                    hint="store results into the output references: "
                    "out_ref[...] = value",
                    where=scope.location(self.kernel),
                )
            self._copy_out(outputs, smem[len(inputs) :])

        names = self._names(blocks, in_tree, out_tree, positional, named)
        scopes.scoped(scoped, (*declarations, *barriers, *positional), named, (), names)

    def _names(self, blocks, in_tree, out_tree, positional, named) -> list[str]:
        """Returns the names of the body's references in SMEM and of its scratch."""
        n_in = in_tree.num_leaves
        outs = jax.tree.unflatten(out_tree, blocks[n_in:])
        outs = outs if isinstance(outs, tuple | list) else (outs,)
        ins = jax.tree.unflatten(in_tree, blocks[:n_in])
        names = parameter_names(self.kernel, (*ins, *outs, *positional), named)
        copied = [
            name
            for name, block in zip(names, blocks, strict=False)
            if block.declaration is not None
        ]
        loads = any(block.declaration is not None for block in blocks[:n_in])
        barrier = ["of the blocks"] if loads else []
        return [*copied, *barrier, *names[len(blocks) :]]

    def _scratch(self):
        return kernel_lib.scratch_of(self.scratch)

    def _what(self, i: int, n_in: int) -> str:
        kind, index = ("argument", i) if i < n_in else ("result", i - n_in)
        return f"{kind} {index} of pallas_call {self.name}"

    def _copy_in(self, blocks, smem, barrier) -> None:
        for block, ref in zip(blocks, smem, strict=False):
            tma.copy_gmem_to_smem(
                block.window, ref, barrier, oob_mode=block.oob_fill_mode
            )
        if blocks:
            mbarrier.barrier_wait(barrier)

    def _copy_out(self, blocks, smem) -> None:
        if not blocks:
            return
        tma.commit_smem()
        for block, ref in zip(blocks, smem, strict=True):
            tma.copy_smem_to_gmem(ref, block.window)
        tma.wait_smem_to_gmem(0)

    def _block(self, ref: Any, spec: types.BlockSpec, what: str) -> _Block:
        shape = tuple(ref.shape)
        if spec.collective_axes:
            raise errors.UnsupportedError(
                f"BlockSpec of {what}: pallas_call does not multicast blocks",
                expected="collective_axes=None",
                got=f"collective_axes={spec.collective_axes}",
                hint="leave it out, or use emit_pipeline_warp_specialized",
            )
        if spec.memory_space is types.GMEM:
            return _Block(ref, None, shape)
        if spec.memory_space not in (None, types.SMEM):
            raise errors.MemorySpaceError(
                f"BlockSpec of {what}: blocks must be in SMEM or GMEM",
                expected="memory_space SMEM (default) or GMEM",
                got=f"memory_space {spec.memory_space.name}",
                hint="omit memory_space",
            )
        sizes = spec.sizes(shape, what)
        starts = self._starts(spec, sizes, len(shape), what)
        squeezed = spec.squeezed(len(shape))
        kept = tuple(s for s, gone in zip(sizes, squeezed, strict=True) if not gone)
        indices = [
            start if gone else _jax.Slice(start, size, 1)
            for start, size, gone in zip(starts, sizes, squeezed, strict=True)
        ]
        window = types.RefView(ref, (_jax.indexer(indices, shape),))
        if 0 in kept:
            return _Block(window, None, kept)
        storage = types.Storage(tuple(spec.transforms))
        declaration = types.ScratchType(types.SMEM, kept, jnp.dtype(ref.dtype), storage)
        error = _tma_problem(ref, window, declaration)
        if error is not None:
            divides = all(n % s == 0 for n, s in zip(shape, sizes, strict=True))
            if spec.transforms or not divides:
                error.what = f"{what}: {error.what}"
                raise error
            # The body accesses the block in GMEM: TMA cannot copy it, and it is always
            # in bounds.
            return _Block(window, None, kept)
        return _Block(window, declaration, kept, spec.oob_fill_mode)

    def _starts(self, spec, sizes, rank: int, what: str) -> list[Any]:
        if spec.block_shape is None or spec.index_map is None:
            return [0] * rank
        ids = [control.program_id(i) for i in range(len(self.mesh.grid))]
        try:
            inspect.signature(spec.index_map).bind(*ids)
        except TypeError as error:
            raise errors.ArgumentError(
                f"BlockSpec of {what}: the index map cannot be called",
                expected=f"a function of {len(ids)} grid indices",
                got=str(error),
                hint="define the index map with one argument per grid axis",
                where=scope.location(spec.index_map),
            ) from None
        self._refuse_arrays(spec.index_map, what)
        index = spec.index_map(*ids)
        index = index if isinstance(index, tuple | list) else (index,)
        with scope.locating(spec.index_map):
            index = [
                values.index(i, f"BlockSpec of {what}: an index of the index map")
                for i in index
            ]
        if len(index) != rank:
            raise errors.ArgumentError(
                f"BlockSpec of {what}: the index map returns the wrong number of "
                "indices",
                expected=f"{rank}, one per dimension of the array",
                got=f"{len(index)}",
                hint="return an index for squeezed dimensions too",
                where=scope.location(spec.index_map),
            )
        return [
            i if isinstance(entry, types.Element) else i * size
            for i, size, entry in zip(index, sizes, spec.block_shape, strict=True)
        ]

    def _refuse_arrays(self, index_map: Callable[..., Any], what: str) -> None:
        """Raises for an index map that closes over an array."""
        index = jax.core.ShapedArray((), jnp.int32)
        try:
            traced, _ = _jax.trace(index_map, [index] * len(self.mesh.grid))
        except _INDEXED_WITH_A_TRACER:
            closed_over = ["a list or an array of NumPy, indexed with a grid index"]
        else:
            consts = [v.aval for v in traced.jaxpr.constvars if v.aval.shape]
            closed_over = [f"{c.dtype}{list(c.shape)}" for c in consts]
        if closed_over:
            raise errors.ClosureError(
                f"BlockSpec of {what}: the index map uses an array from the enclosing "
                "function",
                expected="an index computed from the grid indices and numbers",
                got=closed_over[0],
                hint="pass both arrays as arguments in memory_space=plgpu.GMEM, and "
                "index one with the other in the body: `x_ref[index_ref[i]]`",
                where=scope.location(index_map),
            )


def _tma_problem(ref, window, declaration) -> errors.LayoutError | None:
    """Returns the reason why TMA cannot copy the block, None if it can."""
    source = types.resolve(tuple(ref.shape), window.transforms)
    smem = declaration.to_ref()
    try:
        check.check_copy(
            types.base_aval(ref), source, smem, Window.whole(declaration.shape)
        )
    except errors.LayoutError as error:
        return error
    return None
