# SPDX-License-Identifier: Apache-2.0
"""The arrays of a pipeline and its body: which references the body gets at a step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax

from pallas_gpu import errors, expect, types
from pallas_gpu.entry import control, mutable, scope
from pallas_gpu.entry.names import parameter_names
from pallas_gpu.pipeline import thread_copies
from pallas_gpu.pipeline.blocks import Stream, checked
from pallas_gpu.pipeline.inputs import Inputs
from pallas_gpu.pipeline.loops import ravel
from pallas_gpu.pipeline.outputs import Outputs
from pallas_gpu.primitives import tma


def block_specs(value: Any, what: str) -> tuple[Any, ...]:
    """Accepts a pytree of block specs for each argument, in a sequence if not one."""
    leaves = jax.tree.leaves(value)
    if value is not None and all(isinstance(x, types.BlockSpec) for x in leaves):
        return tuple(value) if expect.is_sequence(value) else (value,)
    raise expect.wrong_type(
        what,
        "a sequence of block specs",
        "a list of plgpu.BlockSpec(block_shape, index_map)",
        value,
        "pass one spec per reference",
    )


# An annotation of a parameter, with its rule.
BlockSpecs = Annotated[Any, block_specs]


@dataclasses.dataclass(frozen=True)
class Streams:
    """The inputs and outputs of a pipeline.

    Attributes:
      inputs, outputs: the arrays, flat.
      in_tree, out_tree: structures of the body's positional arguments for them.
    """

    inputs: list[Stream]
    outputs: list[Stream]
    in_tree: Any
    out_tree: Any

    def over(self, grid: Sequence[Any], depth: int) -> tuple[Inputs, Outputs]:
        """Returns those with buffers, in a loop with up to `depth` steps in flight."""
        steps = math.prod(grid)
        slots = min(depth, max(steps, 1)) if isinstance(steps, int) else depth
        inputs = [s for s in self.inputs if s.buffered]
        outputs = [s for s in self.outputs if s.buffered]
        return Inputs(inputs, grid, steps, slots), Outputs(outputs, grid, steps, slots)

    def holding(self, buffers: Sequence[tuple[Stream, Any]]) -> Streams:
        """Returns the arrays with buffers for blocks that threads copy.

        Args:
          buffers: streams, each with a reference in SMEM to one block.
        """

        def placed(stream: Stream) -> Stream:
            buffer = next((b for s, b in buffers if s is stream), None)
            if buffer is None:
                return stream
            return dataclasses.replace(stream, held=buffer.at[0])

        return dataclasses.replace(
            self,
            inputs=[placed(s) for s in self.inputs],
            outputs=[placed(s) for s in self.outputs],
        )

    def fetch(self, indices: Sequence[Any]) -> None:
        """Copies the blocks of a step that threads copy, and publishes them."""
        held = [stream for stream in self.inputs if stream.held is not None]
        for stream in held:
            thread_copies.fetch(stream, indices)
        if held:
            tma.commit_smem()

    def flush(self, indices: Sequence[Any], grid: Sequence[Any]) -> None:
        """Stores the blocks that threads copy and that a step completes.

        The buffer of a block is written by all steps that have it, and may be written
        by the last of them only.

        Args:
          indices: the position of the step.
          grid: sizes of the axes.
        """
        held = [stream for stream in self.outputs if stream.held is not None]
        if not held:
            return
        outputs, step = Outputs(held, grid, math.prod(grid), 1), ravel(indices, grid)
        for stream in held:
            store = functools.partial(thread_copies.flush, stream, indices)
            control.when(outputs.completes(stream, step))(store)

    def operands(
        self, read: Sequence[Any], written: Sequence[Any], indices: Sequence[Any]
    ) -> list[Any]:
        """Returns the body's arguments at a position.

        Args:
          read, written: the buffers of inputs and outputs.
          indices: the position.
        """
        return [
            *jax.tree.unflatten(self.in_tree, _accessed(self.inputs, read, indices)),
            *jax.tree.unflatten(
                self.out_tree, _accessed(self.outputs, written, indices)
            ),
        ]

    def barriers(self, found: Sequence[Any]) -> list[Any]:
        """Returns the body's arguments for barriers of inputs.

        Args:
          found: a barrier for each input whose block changes; others have None.
        """
        rest = iter(found)
        own = [next(rest) if s.buffered and s.axes else None for s in self.inputs]
        return [*jax.tree.unflatten(self.in_tree, own)]


def _accessed(
    streams: Sequence[Stream], buffers: Sequence[Any], indices: Sequence[Any]
) -> list[Any]:
    """Returns what the body accesses: a buffer, a block in GMEM, or all of an array."""
    rest = iter(buffers)

    def accessed(stream: Stream) -> Any:
        if stream.buffered:
            return next(rest)
        if stream.held is not None:
            return stream.held
        return stream.window(indices) if stream.direct else stream.ref

    return [accessed(stream) for stream in streams]


def streams_of(
    body: Body,
    refs: Sequence[Any],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    grid_rank: int,
    *,
    multicast: bool,
) -> Streams:
    """Returns the inputs and outputs of a pipeline.

    Args:
      body: of the pipeline.
      refs: references in GMEM, inputs first.
      in_specs, out_specs: a pytree of block specs for each argument.
      grid_rank: number of the grid's axes.
      multicast: whether inputs may have collective axes.

    Raises:
      ArgumentError: references and specs do not match.
      MemorySpaceError, UnsupportedError: a spec has a field without effect.
    """
    n_in = len(in_specs)
    if len(refs) != n_in + len(out_specs):
        raise errors.ArgumentError(
            f"{body.who}: the references do not match the block specs",
            expected=f"{n_in} input(s) and {len(out_specs)} output(s)",
            got=f"{len(refs)} reference(s)",
            hint="pass one reference in GMEM per spec, inputs first",
        )
    ins, in_specs, in_tree = _flat(body.who, "input", refs[:n_in], in_specs)
    outs, out_specs, out_tree = _flat(body.who, "output", refs[n_in:], out_specs)
    names = iter(body.names(in_tree, out_tree))
    return Streams(
        [
            checked(
                Stream(r, s, grid_rank, f"input {i} of {body.who}", next(names)),
                output=False,
                multicast=multicast,
            )
            for i, (r, s) in enumerate(zip(ins, in_specs, strict=True))
        ],
        [
            checked(
                Stream(r, s, grid_rank, f"output {i} of {body.who}", next(names)),
                output=True,
            )
            for i, (r, s) in enumerate(zip(outs, out_specs, strict=True))
        ],
        in_tree,
        out_tree,
    )


def _flat(
    who: str, kind: str, refs: Sequence[Any], specs: Sequence[Any]
) -> tuple[list[Any], list[types.BlockSpec], Any]:
    leaves, tree = jax.tree.flatten(tuple(specs))
    found, given = jax.tree.flatten(tuple(refs), is_leaf=mutable.is_view)
    if given == tree:
        return found, leaves, tree
    raise errors.ArgumentError(
        f"{who}: the {kind}s are not pytrees like their specs",
        expected=str(tree),
        got=str(given),
        hint="pass a reference for each BlockSpec, and None where the spec is None",
    )


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

    def names(self, in_tree: Any, out_tree: Any) -> list[str]:
        """Returns the body's names of its inputs and outputs, flat."""
        count = in_tree.num_leaves + out_tree.num_leaves
        leaves = [object()] * count
        ins = jax.tree.unflatten(in_tree, leaves[: in_tree.num_leaves])
        outs = jax.tree.unflatten(out_tree, leaves[in_tree.num_leaves :])
        return parameter_names(self.function, (object(), *ins, *outs), {})[1:]

    def call(self, indices: Any, operands: Sequence[Any], carry: Any) -> Any:
        """Calls the body for a step; returns the next carry.

        Raises:
          ArgumentTypeError: its signature does not match.
          KernelError: it returns a value, and there is no carry.
        """
        last = (carry,) if self.has_carry else ()
        result = scope.call(self.who, self.function, indices, *operands, *last)
        if not self.has_carry:
            scope.require_none(self.who, self.function, result)
        return result
