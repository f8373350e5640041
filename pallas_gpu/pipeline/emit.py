# SPDX-License-Identifier: Apache-2.0
"""`emit_pipeline`: a loop over blocks whose copies overlap the body's work.

One warpgroup does everything: it starts the copies of later steps, waits for those of
the current one, runs the body and starts the copies of its results. Step i uses slot
i mod n of each ring of n buffers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import control, scope
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.pipeline.blocks import Stream, checked
from pallas_gpu.pipeline.inputs import Inputs
from pallas_gpu.pipeline.loops import grid_sizes, unravel
from pallas_gpu.pipeline.outputs import Outputs
from pallas_gpu.primitives import tma
from pallas_gpu.primitives.wgmma import wgmma_wait
from pallas_gpu.types import values


def flat_block_specs(value: Any, what: str) -> tuple[Any, ...]:
    """Accepts sequences of block specs."""
    specs = block_specs(value, what)
    if all(isinstance(x, types.BlockSpec) for x in specs):
        return specs
    raise expect.wrong_type(
        what,
        "a flat sequence of block specs",
        "a list of plgpu.BlockSpec(block_shape, index_map)",
        value,
        "use emit_pipeline_warp_specialized for pytrees of references",
    )


def block_specs(value: Any, what: str) -> tuple[Any, ...]:
    """Accepts sequences of block specs, each of which may be a pytree of them."""
    is_spec = lambda x: x is None or isinstance(x, types.BlockSpec)  # noqa: E731
    leaves = jax.tree.leaves(value, is_leaf=is_spec)
    if expect.is_sequence(value) and all(
        isinstance(x, types.BlockSpec) for x in leaves
    ):
        return tuple(value)
    raise expect.wrong_type(
        what,
        "a sequence of block specs",
        "a list of plgpu.BlockSpec(block_shape, index_map)",
        value,
        "pass one spec per reference",
    )


@expect.arguments(
    body=expect.function,
    grid=grid_sizes,
    in_specs=flat_block_specs,
    out_specs=flat_block_specs,
    max_concurrent_steps=expect.anything,
    init_carry=values.values,
)
def emit_pipeline(
    body: Callable[..., Any],
    *,
    grid: Sequence[Any],
    in_specs: Sequence[types.BlockSpec] = (),
    out_specs: Sequence[types.BlockSpec] = (),
    max_concurrent_steps: int = 1,
    init_carry: Any = None,
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
        has `memory_space=plgpu.GMEM`.
      grid: sizes of the axes: ints or i32 scalars of the kernel.
      in_specs: a block spec for each input. `delay_release=d` keeps a block's buffer
        for d more steps, for products (`wgmma`) that the body has not waited for;
        after the last step the pipeline waits for them.
      out_specs: a block spec for each output.
      max_concurrent_steps: number of buffers of each block that changes.
      init_carry: pytree of values for the first step.

    Returns:
      A function of the references in GMEM, inputs first. It returns the last carry.

    Raises:
      ArgumentError: `max_concurrent_steps` is not above each `delay_release`, or specs
        and references differ in number.
      UnsupportedError: collective axes of a spec; several warpgroups in a block.
      LayoutError: TMA cannot copy a block.

    Example:
      >>> spec = plgpu.BlockSpec((64, 128), lambda i: (i, 0))
      >>> plgpu.emit_pipeline(double, grid=(8,), in_specs=[spec], out_specs=[spec],
      ...                     max_concurrent_steps=2)(x_gmem, o_gmem)
    """
    sizes = tuple(grid)
    specs = (*in_specs, *out_specs)
    check_depth("emit_pipeline", max_concurrent_steps, specs)

    def run(*refs: Any) -> Any:
        _require_one_warpgroup()
        streams = streams_of("emit_pipeline", refs, in_specs, out_specs, len(sizes))
        pipeline = Pipeline(
            Body(body, "emit_pipeline", init_carry is not None),
            streams[: len(in_specs)],
            streams[len(in_specs) :],
            sizes,
            max_concurrent_steps,
        )
        return pipeline.run(init_carry)

    return run


def streams_of(
    who: str,
    refs: Sequence[Any],
    in_specs: Sequence[types.BlockSpec],
    out_specs: Sequence[types.BlockSpec],
    grid_rank: int,
) -> list[Stream]:
    """Returns the streams of the inputs and outputs of a pipeline.

    Raises:
      ArgumentError: their number is not that of the specs.
    """
    specs = (*in_specs, *out_specs)
    if len(refs) != len(specs):
        raise errors.ArgumentError(
            f"{who}: the references do not match the block specs",
            expected=f"{len(in_specs)} inputs and {len(out_specs)} outputs",
            got=f"{len(refs)} references",
            hint="pass one reference in GMEM per spec, inputs first",
            where=_jax.where_now(),
        )
    n_in = len(in_specs)
    return [
        checked(
            Stream(ref, spec, grid_rank, _what(i, n_in, who)),
            output=i >= n_in,
            multicast=False,
        )
        for i, (ref, spec) in enumerate(zip(refs, specs, strict=True))
    ]


def _what(i: int, n_in: int, who: str) -> str:
    kind, index = ("input", i) if i < n_in else ("output", i - n_in)
    return f"{kind} {index} of {who}"


def check_depth(who: str, steps: Any, specs: Sequence[types.BlockSpec]) -> None:
    """Checks the number of buffers.

    Raises:
      ArgumentError: it is below 1, or not above each spec's `delay_release`.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise errors.ArgumentError(
            f"{who}: invalid max_concurrent_steps",
            expected="a Python integer, 1 or more",
            got=repr(steps),
            hint="2 to 6 buffers hide the latency of GMEM",
            where=_jax.where_now(),
        )
    delay = max((spec.delay_release for spec in specs), default=0)
    if delay >= steps:
        raise errors.ArgumentError(
            f"{who}: delay_release keeps all buffers in use",
            expected=f"max_concurrent_steps of {delay + 1} or more",
            got=f"max_concurrent_steps={steps}, delay_release={delay}",
            hint="increase max_concurrent_steps",
            where=_jax.where_now(),
        )


def _require_one_warpgroup() -> None:
    mesh = scope.current_mesh("emit_pipeline")
    if mesh.warpgroups > 1:
        raise errors.UnsupportedError(
            "emit_pipeline: the block has several warpgroups",
            expected="a kernel of one warpgroup per block",
            got=f"num_threads={mesh.warpgroups}",
            hint="use emit_pipeline_warp_specialized, which divides the work",
            where=_jax.where_now(),
        )


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The loop of one warpgroup over the steps of a grid."""

    body: Body
    inputs: Sequence[Stream]
    outputs: Sequence[Stream]
    grid: Sequence[Any]
    depth: int

    def run(self, init_carry: Any) -> Any:
        """Allocates the buffers and runs all steps; returns the last carry."""
        steps = math.prod(self.grid)
        slots = buffers_needed(steps, self.depth)
        ins = Inputs(buffered(self.inputs), self.grid, steps, slots)
        outs = Outputs(buffered(self.outputs), self.grid, steps, slots)
        names = (ins.names(), [s.name for s in outs.streams])
        return scoped(
            functools.partial(self._all_steps, ins, outs, init_carry),
            (ins.declarations(), outs.declarations()),
            {},
            (),
            jax.tree.leaves(names),
        )

    def _all_steps(
        self,
        ins: Inputs,
        outs: Outputs,
        init_carry: Any,
        read: dict[str, Any],
        written: list[Any],
    ) -> Any:
        ins.copy_fixed(read)
        ins.fill(read)
        ins.wait_for_fixed(read)

        def iteration(step: Any, state: Any) -> Any:
            carry, visits = state
            ins.wait(read, step)
            outs.wait_for_buffers()
            results = outs.refs(written, step, visits)
            indices = unravel(step, self.grid)
            operands = [
                *arrange(self.inputs, ins.refs(read, step), indices),
                *arrange(self.outputs, results, indices),
            ]
            carry = self.body.call(indices, operands, carry)
            if outs.moving:
                tma.commit_smem()
            outs.store(results, step)
            visits = outs.after(step, visits)
            ins.refill(read, step)
            return carry, visits

        with _jax.trace_without_ref_rules():
            state = (init_carry, outs.start())
            if isinstance(ins.steps, int) and ins.steps == 1:
                carry, _ = iteration(jnp.int32(0), state)
            else:
                carry, _ = control.counted_loop(ins.steps, iteration, state)
        if ins.delayed:
            wgmma_wait(0)
        if outs.streams:
            tma.commit_smem()
            outs.store_fixed(written)
            tma.wait_smem_to_gmem(0)
        return carry


def buffers_needed(steps: Any, depth: int) -> int:
    """Returns the number of buffers of each block that changes."""
    return min(depth, max(steps, 1)) if isinstance(steps, int) else depth


def buffered(streams: Sequence[Stream]) -> list[Stream]:
    """Returns the streams with buffers in SMEM."""
    return [s for s in streams if s.buffered]


def arrange(
    streams: Sequence[Stream], buffers: Sequence[Any], indices: Sequence[Any]
) -> list[Any]:
    """Returns what the body accesses: a buffer, a block in GMEM, or all of an array."""
    rest = iter(buffers)
    return [
        next(rest) if s.buffered else s.window(indices) if s.direct else s.ref
        for s in streams
    ]


@dataclasses.dataclass(frozen=True)
class Body:
    """The body of a pipeline.

    Attributes:
      function: the author's function.
      who: the pipeline's name for error messages.
      has_carry: whether it takes and returns a carry.
    """

    function: Callable[..., Any]
    who: str
    has_carry: bool

    def call(self, indices: Any, operands: Sequence[Any], carry: Any) -> Any:
        """Calls the body for a step; returns the next carry.

        Raises:
          ArgumentTypeError: its signature does not match.
          KernelError: it returns a value, and there is no carry.
        """
        last = (carry,) if self.has_carry else ()
        result = scope.call(self.who, self.function, indices, *operands, *last)
        if not self.has_carry:
            control.require_none(self.who, self.function, result)
        return result
