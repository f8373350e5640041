# SPDX-License-Identifier: Apache-2.0
"""The arrays of a pipeline and its body: which references the body gets at a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax

from pallas_gpu import errors, expect, types
from pallas_gpu.entry import mutable, scope
from pallas_gpu.entry.scoped import parameter_names
from pallas_gpu.pipeline.blocks import Stream, checked


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
    """The inputs and outputs of a pipeline."""

    inputs: list[Stream]
    outputs: list[Stream]
    in_tree: Any
    out_tree: Any

    def operands(
        self, buffers: Mapping[Stream, Any], indices: Sequence[Any]
    ) -> list[Any]:
        def accessed(stream: Stream) -> Any:
            if stream in buffers:
                return buffers[stream]
            return stream.window(indices) if stream.direct else stream.ref

        return [
            *jax.tree.unflatten(self.in_tree, map(accessed, self.inputs)),
            *jax.tree.unflatten(self.out_tree, map(accessed, self.outputs)),
        ]

    def barriers(self, found: Mapping[Stream, Any]) -> list[Any]:
        """Returns the body's arguments for barriers of inputs; None where none is."""
        return [*jax.tree.unflatten(self.in_tree, map(found.get, self.inputs))]


def streams_of(
    body: Body,
    refs: Sequence[Any],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    grid_rank: int,
    *,
    multicast: bool,
) -> Streams:
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
    names = iter(body_names(body.function, 1, in_tree, out_tree))

    def streams(kind: str, refs: Any, specs: Any) -> list[Stream]:
        return [
            checked(
                Stream(ref, spec, grid_rank, f"{kind} {i} of {body.who}", next(names)),
                output=kind == "output",
                multicast=multicast,
            )
            for i, (ref, spec) in enumerate(zip(refs, specs, strict=True))
        ]

    read = streams("input", ins, in_specs)
    return Streams(read, streams("output", outs, out_specs), in_tree, out_tree)


def body_names(
    function: Callable[..., Any],
    first: int,
    in_tree: Any,
    out_tree: Any,
    last: Sequence[Any] = (),
    named: dict[str, Any] | None = None,
) -> list[str]:
    """Returns a body's names of its references, flat, without the first arguments."""
    blocks = [
        jax.tree.unflatten(tree, [object()] * tree.num_leaves)
        for tree in (in_tree, out_tree)
    ]
    arguments = (*[object()] * first, *blocks[0], *blocks[1], *last)
    return parameter_names(function, arguments, named or {})[first:]


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
    """The body of a pipeline."""

    function: Callable[..., Any]
    who: str
    has_carry: bool

    def call(self, indices: Any, operands: Sequence[Any], carry: Any) -> Any:
        last = (carry,) if self.has_carry else ()
        result = scope.call(self.who, self.function, indices, *operands, *last)
        if not self.has_carry:
            scope.require_none(self.who, self.function, result)
        return result
