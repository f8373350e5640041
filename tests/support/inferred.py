# SPDX-License-Identifier: Apache-2.0
"""The layouts that inference chooses for a kernel."""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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


def infer(*args: Any, **options: Any) -> Inferred:
    """Infers the layouts of a kernel, which has the arguments of `traced`."""
    return run(traced(*args, **options))


def run(build: Build) -> Inferred:
    """Infers the layouts of a traced kernel."""
    with warnings.catch_warnings():  # the tests' arrays are read and never written
        warnings.simplefilter("ignore", plgpu.errors.UndefinedResultWarning)
        return Inferred(compiler.run(build, until="layouts").layouts)


def traced(
    body: Callable[..., None],
    args: Sequence[Any] = (X,),
    out: Any = X,
    *scratch: Any,
    target: str = "sm_90a",
    scratch_bytes: int | None = None,
    **options: Any,
) -> Build:
    """Traces a kernel.

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
    return Build(params, arch.target(target))


class Inferred:
    """An assignment, which is asked for operations by name and number."""

    def __init__(self, assignment: inference.Assignment):
        self.assignment = assignment
        self.network = assignment.network
        self.steps = [step for step in self.network.steps if not step.is_end]

    def layouts(self, words: str) -> list[Placement | None]:
        """The layouts of the arrays that all operations of a name make."""
        return [
            layout
            for step in self.steps
            if step.node.words == words
            for layout in self.results(step)
        ]

    def results(self, step: collect.Step) -> list[Placement | None]:
        """The layouts of the arrays that an operation makes; None of a deferred one."""
        return [
            None if x.port is None else self.assignment.layout(x.port)
            for x in step.results
            if isinstance(x, collect.Symbol) and x.shape
        ]

    def layout(self, words: str, i: int = 0) -> Placement | None:
        """One of the layouts of a name."""
        return self.layouts(words)[i]

    def operands(self, step: collect.Step) -> list[Placement]:
        """The layouts that an operation takes its operands in."""
        return [
            self.assignment.layout(port)
            for (path, op, _), port in self.network.taken.items()
            if (path, op) == (step.node.path, step.node.op)
        ]

    def taken(self, words: str) -> list[Placement]:
        """The layouts in which all operations of a name take their operands."""
        named = [step for step in self.steps if step.node.words == words]
        return [layout for step in named for layout in self.operands(step)]

    def operand(self, words: str) -> Placement:
        """The only one of these layouts."""
        (layout,) = set(self.taken(words))
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


def large_kernel(count: int, seed: int = 0) -> Callable[[], Inferred]:
    """A kernel of about `count` operations on arrays, whose values live side by side.

    Most are elementwise and have two operands; loads, stores, reductions and broadcasts
    lie between them, and a product asks for the tensor core's layout.

    Returns:
      A function that infers its layouts.
    """
    rows, reach = array(128, 128), 8  # operands lie at most `reach` values back

    def body(x, o, a, b, acc):
        rng = random.Random(seed)
        plgpu.wgmma(acc, a, b)
        live = [x[...], acc[...]]
        for _ in range(count):
            kind = rng.random()
            if kind < 0.02:
                live.append(x[...])
            elif kind < 0.04:
                o[...] = rng.choice(live[-reach:])
            elif kind < 0.06:
                row = jnp.sum(rng.choice(live[-reach:]), axis=1)
                live.append(lax.broadcast_in_dim(row, rows.shape, (0,)))
            else:
                live.append(rng.choice(live[-reach:]) + rng.choice(live[-reach:]))
        o[...] = live[-1]

    operands = [plgpu.SMEM(shape, jnp.float16) for shape in ((128, 64), (64, 128))]
    build = traced(body, [rows], rows, *operands, plgpu.ACC(rows.shape))
    return functools.partial(run, build)
