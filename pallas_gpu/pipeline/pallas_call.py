# SPDX-License-Identifier: Apache-2.0
"""`pallas_call`: a body over blocks, with a grid and block specs.

It is a `kernel` whose body is a pipeline over the sequential axes of the grid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_gpu import expect, types
from pallas_gpu.entry import kernel as kernel_lib
from pallas_gpu.entry import over_arrays, scope
from pallas_gpu.entry.caching import repeated
from pallas_gpu.pipeline import call_specs
from pallas_gpu.pipeline.grid import Grid, team_of
from pallas_gpu.pipeline.program import Program
from pallas_gpu.types.mesh import MAX_WARPGROUPS

_UNNAMED = (
    "axes have numbers here, plgpu.program_id(0); in plgpu.kernel they have names"
)


@expect.arguments(
    None,
    {
        **over_arrays.LAUNCH,
        "out_type": "did you mean out_shape?",
        "scratch_types": "did you mean scratch_shapes?",
        "grid_names": _UNNAMED,
    },
    grid_spec=expect.optional(
        expect.instance(
            types.GridSpec,
            types.PrefetchScalarGridSpec,
            written="plgpu.GridSpec(grid=...)",
        )
    ),
    input_output_aliases=expect.optional(call_specs.positions),
    num_threads=expect.optional(
        expect.integer(
            1,
            MAX_WARPGROUPS - 1,
            unit="warpgroups",
            hint="num_threads counts warpgroups, not CUDA threads",
        )
    ),
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
    when the next step has another one, or after the last step; what it contains before
    the body stores to it is undefined, as its buffer may have held an earlier block.
    Elements of a block that are out of bounds are read as zeros and are not stored.

    Issued by: the host. It completes like any JAX operation.

    Args:
      kernel: `kernel(*input_refs, *output_refs, *scratch_refs) -> None`.
      out_shape: pytree of `jax.ShapeDtypeStruct`.
      grid_spec: grid, specs and scratch in one object, which replaces the next four; a
        `PrefetchScalarGridSpec` if index maps read arguments of the call.
      grid: sizes of the grid axes; `CompilerParams.dimension_semantics` says which are
        parallel, by default all. The size of a sequential axis may be a traced scalar.
        If a size is 0, nothing is launched, and the results are zeros, or the arguments
        that they alias.
      in_specs: pytree of `BlockSpec` for the arguments; None: whole arrays. Where the
        grid has a parallel axis, the body accesses them in GMEM, as in Triton, and
        takes its part by `program_id`; else they are copied to SMEM, but for those
        that are one array by `input_output_aliases`.
      out_specs: the same for the results. Of a whole one, each CTA stores its part.
      scratch_shapes: declarations of scratch references.
      num_threads: number of warpgroups that run the body; None: one. They share blocks,
        SMEM and barriers; each has accumulators (`ACC`) of its own.
      thread_name: name of their axis, for `lax.axis_index`. The memory warpgroup is the
        last one on it, and `lax.axis_size` counts it.
      input_output_aliases: from positions of arguments to positions of results, both
        counted over the leaves. Result and argument are one array: what the body does
        not store keeps its value. Under `jax.jit` XLA reuses the argument's buffer, or
        copies it if it is needed later. The blocks of an argument are read ahead of the
        steps and by other CTAs: a block may be stored by the step that reads it, and by
        none that runs before or beside it. The emulator reports others as races.
      debug: print the traced body.
      interpret: see `kernel`.
      name: name of the kernel.
      compiler_params: see `CompilerParams`.
      cost_estimate, metadata: hints for other compilers, which this one does not use:
        XLA has no place for them in a custom call on GPUs.

    Returns:
      A function from arrays to results.

    Raises:
      KernelError and its classes: the body or a block spec is wrong.
      OutOfResources: the blocks do not fit into SMEM.

    Example:
      >>> spec = plgpu.BlockSpec((64, 128), lambda i, j: (i, j))
      >>> add = plgpu.pallas_call(add_body, x, grid=(8, 4), in_specs=[spec, spec],
      ...                         out_specs=spec)
      >>> def add_rows(x_ref, y_ref, o_ref):  # without specs: whole arrays
      ...     i = plgpu.program_id(0)
      ...     o_ref[i] = x_ref[i] + y_ref[i]
      >>> add = plgpu.pallas_call(add_rows, x, grid=x.shape[0])
    """
    types.refuse_foreign(
        (grid_spec, in_specs, out_specs, scratch_shapes, compiler_params, interpret),
        "pallas_call",
    )
    name = str(name or getattr(kernel, "__name__", "pallas_call"))
    given = types.GridSpec(grid, in_specs, out_specs, scratch_shapes)
    spec = call_specs.one_spec(grid_spec, given, name)
    params = compiler_params or types.CompilerParams()
    with scope.locating(kernel):
        interpret = kernel_lib.interpretation(interpret)
        kernel_lib.check_types(out_shape, f"pallas_call {name}: out_shape")
        scratch = kernel_lib.scratch_of(spec.scratch_shapes)
        axes = Grid.of(spec.grid, params, name)
        team = team_of(num_threads, thread_name, axes, name)
    kept = repeated.Kept((kernel, *call_specs.index_maps(spec)), interpret)
    launch = functools.partial(
        kernel_lib.launch_body,
        mesh=axes.mesh(name, team),
        name=name,
        compiler_params=params,
        interpret=interpret,
        debug=debug,
        kept=kept,
    )
    aliases = dict(input_output_aliases or {})
    program = Program(
        *(kernel, spec, params, axes, scratch, team, name, launch, out_shape, aliases)
    )
    return over_arrays.OverArrays(lambda *args: program(*args), kernel, kept)
