# SPDX-License-Identifier: Apache-2.0
"""`pallas_call`: a body over blocks, with a grid and block specs.

It is a `kernel` whose body is a pipeline over the sequential axes of the grid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect, types
from pallas_gpu.entry import kernel as kernel_lib
from pallas_gpu.entry import scope
from pallas_gpu.pipeline import call_specs
from pallas_gpu.pipeline.grid import Grid, Threads
from pallas_gpu.pipeline.program import Program
from pallas_gpu.pipeline.scratch import Scratch
from pallas_gpu.types.mesh import MAX_WARPGROUPS


@expect.arguments(
    kernel=expect.function,
    out_shape=expect.anything,
    grid_spec=expect.optional(
        expect.instance(
            types.GridSpec,
            types.PrefetchScalarGridSpec,
            written="plgpu.GridSpec(grid=...)",
        )
    ),
    grid=expect.anything,
    in_specs=expect.anything,
    out_specs=expect.anything,
    scratch_shapes=expect.anything,
    input_output_aliases=expect.optional(expect.instance(Mapping, written="{}")),
    debug=expect.boolean,
    num_threads=expect.optional(
        expect.integer(
            1,
            MAX_WARPGROUPS - 1,
            unit="warpgroups",
            hint="num_threads counts warpgroups, not CUDA threads",
        )
    ),
    thread_name=expect.optional(expect.string),
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
    grid_spec: call_specs.Spec | None = None,
    grid: int | Sequence[Any] = (),
    in_specs: Any = None,
    out_specs: Any = None,
    scratch_shapes: Any = (),
    input_output_aliases: Mapping[int, int] | None = None,
    num_threads: int | None = None,
    thread_name: str | None = None,
    debug: bool = False,
    interpret: bool | types.InterpretParams | None = None,
    name: str | None = None,
    compiler_params: types.CompilerParams | None = None,
    cost_estimate: Any = None,
    metadata: dict[str, str] | None = None,
) -> Callable[..., Any]:
    """Transforms a function over blocks to a function over arrays.

    A parallel axis of the grid is an axis of the launch: each of its positions is one
    block (CTA). An axis with the dimension semantics "arbitrary" is a loop in each CTA,
    the last one innermost, and scratch references keep their contents from step to
    step.

    A block has one warpgroup, which copies and computes. With `num_threads` that many
    run the body, at the same steps; along "arbitrary" axes another one, which this
    package adds behind them, copies the blocks. It keeps few registers, and the others
    share what it leaves.

    Input blocks are copied to SMEM by TMA before a step, up to
    `CompilerParams.max_concurrent_steps` steps ahead. An output's block is copied back
    when the next step has another one, or after the last step. Elements of a block that
    are out of bounds are read as zeros and are not stored.

    Issued by: the host. It completes like any JAX operation.

    Args:
      kernel: `kernel(*input_refs, *output_refs, *scratch_refs) -> None`.
      out_shape: pytree of `jax.ShapeDtypeStruct`.
      grid_spec: grid, specs and scratch in one object, which replaces the next four; a
        `PrefetchScalarGridSpec` if index maps read arguments of the call.
      grid: sizes of the grid axes; `CompilerParams.dimension_semantics` says which are
        parallel, by default all. The size of a sequential axis may be a traced scalar.
        If a size is 0, nothing is launched, and the results are zeros.
      in_specs: pytree of `BlockSpec` for the arguments; None: whole arrays.
      out_specs: the same for the results.
      scratch_shapes: declarations of scratch references.
      num_threads: number of warpgroups that run the body; None: one. They share blocks,
        SMEM and barriers; each has accumulators (`ACC`) of its own.
      thread_name: name of their axis, for `lax.axis_index`.
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
    spec = call_specs.one_spec(grid_spec, given, name)
    if input_output_aliases:
        raise errors.UnsupportedError(
            f"pallas_call {name}: input_output_aliases is not supported yet",
            expected="no aliases",
            got=expect.shown(input_output_aliases),
            hint="omit it; the result is a new array",
            where=scope.location(kernel),
        )
    params = compiler_params or types.CompilerParams()
    with scope.locating(kernel):
        interpret = kernel_lib.interpretation(interpret)
        kernel_lib.check_types(out_shape, name)
        scratch = Scratch.of(spec.scratch_shapes)
        axes = Grid.of(spec.grid, params, name)
        threads = Threads.of(num_threads, thread_name, name)
        mesh = axes.mesh(name, threads)
    launch = functools.partial(
        kernel_lib.launch_body,
        mesh=mesh,
        name=name,
        compiler_params=params,
        interpret=interpret,
        debug=debug,
        functions=(kernel, *call_specs.index_maps(spec)),
        cache={},
    )

    def call(*args: Any) -> Any:
        n = spec.num_scalar_prefetch
        call_specs.check_prefetched(args, n, name)
        program = Program(
            kernel,
            axes,
            n,
            call_specs.block_specs(
                spec.in_specs, args[n:], f"pallas_call {name}: in_specs"
            ),
            call_specs.block_specs(
                spec.out_specs, out_shape, f"pallas_call {name}: out_specs"
            ),
            scratch,
            threads,
            params.max_concurrent_steps,
            name,
        )
        in_tree = jax.tree.structure(args[n:])
        out_tree = jax.tree.structure(_as_tuple(out_shape))

        @functools.wraps(kernel)
        def body(*refs):
            program.run(jax.tree.leaves(refs), in_tree, out_tree)

        if axes.is_empty:
            return _nothing(functools.partial(launch, body), args, out_shape)
        return launch(body, args, out_shape)

    return scope.over_arrays(call, kernel)


def _nothing(launch: Callable[..., Any], args: Any, out_shape: Any) -> Any:
    """Returns the results of a grid without positions: zeros.

    The body is traced all the same, so that a mistake does not depend on the grid.
    """
    jax.eval_shape(launch, args, out_shape)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)


def _as_tuple(outs: Any) -> tuple[Any, ...]:
    return tuple(outs) if isinstance(outs, tuple | list) else (outs,)
