# SPDX-License-Identifier: Apache-2.0
"""`emit_pipeline`: a loop over blocks whose copies overlap the body's work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax

from pallas_gpu import errors, expect, types
from pallas_gpu.entry import scope
from pallas_gpu.pipeline.executor import Pipeline, holds_refs
from pallas_gpu.pipeline.loops import Grid
from pallas_gpu.pipeline.streams import BlockSpecs, Body, streams_of
from pallas_gpu.types import values

# An annotation of a parameter, with its rule.
Buffers = Annotated[
    int, expect.integer(1, unit="steps", hint="2 to 6 hide the latency of GMEM")
]


@expect.arguments()
def emit_pipeline(
    body: Callable[..., Any],
    *,
    grid: Grid,
    in_specs: BlockSpecs = (),
    out_specs: BlockSpecs = (),
    max_concurrent_steps: Buffers = 1,
    init_carry: values.Values = None,
) -> Callable[..., Any]:
    """Runs a body over a grid inside a kernel, with copies of its blocks in flight.

    The steps run one after another, the last axis fastest. A block of each input is
    copied to SMEM by TMA before a step, up to `max_concurrent_steps` steps ahead; a
    block of each output is copied back when the next step's block is another one, or
    after the last step. A block whose index map ignores all axes is copied once.

    Issued by: the one warpgroup of a block. When it returns, all results are visible to
    this thread block and to later kernels.

    Args:
      body: `body(indices, *input_refs, *output_refs)`, with a last argument `carry` if
        there is an `init_carry`; it then returns the next carry. `indices` is a tuple
        of i32 scalars. The references are blocks in SMEM, or whole arrays where a spec
        has `memory_space=plgpu.GMEM`, in pytrees like the specs.
      grid: sizes of the axes: ints or i32 scalars of the kernel.
      in_specs: a block spec, or a pytree of them, for each input; None for one that is
        None. `delay_release=d`
        keeps a block's buffer for d more steps, for products that the body has not
        waited for; after the last step the pipeline waits for those of `wgmma`.
      out_specs: the same for each output.
      max_concurrent_steps: number of buffers of each block that changes.
      init_carry: pytree of values for the first step, and of references, which are
        those of each step.

    Returns:
      A function of the references in GMEM, inputs first. It returns the last carry.

    Raises:
      ArgumentError: `max_concurrent_steps` is not above each `delay_release`, or specs
        and references differ in number.
      UnsupportedError: collective axes of a spec; several warpgroups in a block.
      LayoutError: neither TMA nor threads can copy a block.

    Example:
      >>> spec = plgpu.BlockSpec((64, 128), lambda i: (i, 0))
      >>> plgpu.emit_pipeline(double, grid=(8,), in_specs=[spec], out_specs=[spec],
      ...                     max_concurrent_steps=2)(x_gmem, o_gmem)
    """
    sizes = tuple(grid)
    specs = jax.tree.leaves((in_specs, out_specs))
    check_depth("emit_pipeline", max_concurrent_steps, specs)
    step = Body(body, "emit_pipeline", init_carry is not None)

    def run(*refs: Any) -> Any:
        _require_one_warpgroup()
        rank = len(sizes)
        streams = streams_of(step, refs, in_specs, out_specs, rank, multicast=False)
        pipeline = Pipeline.of(step, streams, sizes, max_concurrent_steps)

        def within(memory: dict[str, Any]) -> Any:
            carry = pipeline.run(memory, init_carry=init_carry)
            return jax.tree.map(lambda x: None if values.is_ref(x) else x, carry)

        carry = pipeline.allocate(within)
        if not holds_refs(init_carry):
            return carry
        # No loop changes references.
        return jax.tree.map(
            lambda x, y: x if values.is_ref(x) else y, init_carry, carry
        )

    return run


def check_depth(who: str, depth: int, specs: Sequence[types.BlockSpec]) -> None:
    delay = max((spec.delay_release for spec in specs), default=0)
    if delay >= depth:
        raise errors.ArgumentError(
            f"{who}: delay_release keeps all buffers in use",
            expected=f"max_concurrent_steps of {delay + 1} or more",
            got=f"max_concurrent_steps={depth}, delay_release={delay}",
            hint="increase max_concurrent_steps",
        )


def _require_one_warpgroup() -> None:
    mesh = scope.current_mesh("emit_pipeline")
    if mesh.warpgroups > 1:
        raise errors.UnsupportedError(
            "emit_pipeline: the block has several warpgroups",
            expected="a kernel of one warpgroup per block",
            got=f"num_threads={mesh.warpgroups}",
            hint="use emit_pipeline_warp_specialized, which divides the work",
        )
