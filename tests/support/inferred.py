# SPDX-License-Identifier: Apache-2.0
"""The layouts that inference chooses for a kernel."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import arch, compiler, offline, types
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.lowering import inference
from pallas_gpu.lowering.inference import collect
from pallas_gpu.lowering.inference.network import Port
from pallas_gpu.lowering.machine import Build
from tests.support import everywhere
from tests.support.semantics import Warpgroup

SQUARE = (64, 64)


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The type of an array, (64, 64) by default."""
    return jax.ShapeDtypeStruct(shape or SQUARE, dtype)


X = array()


def infer(
    body: Callable[..., None],
    args: Sequence[Any] = (X,),
    out: Any = X,
    *scratch: Any,
    target: str = "sm_90a",
    scratch_bytes: int | None = None,
    **options: Any,
) -> Inferred:
    """Infers the layouts of a kernel.

    Args:
      body: of the kernel.
      args, out, scratch: the types of its references.
      target: that it is compiled for.
      scratch_bytes: for relayouts and reductions.
      options: of `everywhere.kernel`.
    """
    fn = everywhere.kernel(body, out, *scratch, **options)()
    (params,) = offline.launches(jax.make_jaxpr(fn)(*args))
    compiler_params = dataclasses.replace(
        params.compiler_params,
        lowering_semantics=Warpgroup,
        reduction_scratch_bytes=scratch_bytes,
    )
    params = dataclasses.replace(params, compiler_params=compiler_params)
    build = Build(params, arch.target(target))
    with warnings.catch_warnings():  # the tests' arrays are read and never written
        warnings.simplefilter("ignore", plgpu.errors.UndefinedResultWarning)
        return Inferred(compiler.run(build, until="layouts").layouts)


class Inferred:
    """An assignment, which is asked for operations by name and number."""

    def __init__(self, assignment: inference.Assignment):
        self.assignment = assignment
        self.network = assignment.network

    def nodes(self, words: str) -> list[collect.Node]:
        """The operations of a name, in order."""
        return [step.node for step in self._steps() if step.node.words == words]

    def layouts(self, words: str) -> list[Placement | None]:
        """The layouts of all results of all operations of a name."""
        return [
            None if x.port is None else self.assignment.layout(x.port)
            for step in self._steps()
            if step.node.words == words
            for x in step.results
            if isinstance(x, collect.Symbol) and x.shape
        ]

    def layout(self, words: str, i: int = 0) -> Placement | None:
        """The layout of one of them; None if it is deferred."""
        return self.layouts(words)[i]

    def operands(self, words: str, i: int = 0) -> dict[Any, Placement]:
        """The layouts that an operation takes its operands in, by slot."""
        node = self.nodes(words)[i]
        return {
            slot: self.assignment.layout(port)
            for (path, op, slot), port in self.network.taken.items()
            if (path, op) == (node.path, node.op)
        }

    def operand(self, words: str, i: int = 0) -> Placement:
        """The one layout in which an operation takes its operands."""
        (layout,) = set(self.operands(words, i).values())
        return layout

    @property
    def moves(self) -> list[str]:
        """The operations that take an array in another layout than it has.

        And those that move one through scratch instead of renaming its registers.
        """
        layout = self.assignment.layout
        consumers = [
            edge.consumer.variable
            for edge in self.network.edges
            if layout(edge.producer) != layout(edge.consumer)
        ]
        consumers += [
            move.result
            for move in self.network.moves
            if move.relation.forward(layout(Port(move.operand, "source")))
            != layout(Port(move.result, "target"))
        ]
        return [variable.node.words for variable in consumers]

    @property
    def storages(self) -> list[Any]:
        """The layouts of arrays in SMEM and TMEM, in the order of declaration."""
        return [
            self.assignment.storage(memory)
            for memory in self.network.declared.values()
            if memory.space in (types.SMEM, types.TMEM)
        ]

    def _steps(self) -> Iterator[collect.Step]:
        return (step for step in self.network.steps if not step.is_end)
