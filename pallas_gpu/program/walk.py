# SPDX-License-Identifier: Apache-2.0
"""The operations of a program, those that other operations run included, in order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.program.bodies import kept
from pallas_gpu.program.build import region_of
from pallas_gpu.program.nodes import Kind, Op, Operand, Region, Value

Origins = dict[Value, Operand]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Site:
    """An operation, and where it is in a program.

    A function that is called twice is one jaxpr: its operations are found at two sites,
    and their equations are the same. The scopes in it are allocated once.

    Attributes:
      op: the operation.
      enclosing: the sites of the operations that run it, outermost first.
      origins: for inputs of its region, the corresponding values outside.
    """

    op: Op
    enclosing: tuple[Site, ...]
    origins: Mapping[Value, Operand]

    @property
    def eqn(self) -> _jax.JaxprEqn:
        """The equation of the operation, which identifies it."""
        return self.op.equation

    @property
    def where(self) -> str | None:
        """The line of the operation, or of the innermost one around it that has one."""
        return self.line()

    def line(self) -> str | None:
        """Returns the same, as a function."""
        lines = (site.op.where for site in (self, *reversed(self.enclosing)))
        return next((line for line in lines if line is not None), None)

    def is_inside(self, primitive: Any) -> bool:
        """True when an operation of the primitive runs this one."""
        return primitive in [site.op.primitive for site in self.enclosing]

    def origin(self, operand: Operand) -> Operand:
        """Returns the value in the outermost region to which a value corresponds.

        For a reference, that is an input of the program, or of the region of the scope
        that allocates it: loops and branches pass references unchanged.
        """
        if isinstance(operand, Value):
            return self.origins.get(operand, operand)
        return operand


def walk(jaxpr: Any) -> tuple[Site, ...]:
    """Returns the operations of a jaxpr's program, each before those that it runs."""
    return _walked(region_of(jaxpr))


# Checks, planner and lowering visit the same kernels.
@kept
def _walked(region: Region) -> tuple[Site, ...]:
    return tuple(_visit(region, (), {}))


def uses(jaxpr: Any, *primitives: Any) -> bool:
    """Whether a kernel has an operation of one of the primitives."""
    return any(site.op.primitive in primitives for site in walk(jaxpr))


def last_line(jaxpr: Any, ref: Operand | None = None) -> str | None:
    """Returns the last line that uses a reference; that of a kernel without a use."""
    sites = walk(jaxpr)[::-1]
    used = (
        site.where
        for site in sites
        if not site.op.regions and any(site.origin(x) is ref for x in site.op.inputs)
    )
    lines = itertools.chain(used, (site.where for site in sites))
    return next((line for line in lines if line is not None), None)


def _visit(region: Region, enclosing: tuple[Site, ...], outer: Origins) -> Iterator:
    origins = dict(outer)
    for op in region.ops:
        site = Site(op, enclosing, origins)
        yield site
        for inner, entries in zip(op.regions, op.entries, strict=True):
            given = zip(inner.inputs, entries, strict=True)
            inside = {v: site.origin(x) for v, x in given if x is not None}
            yield from _visit(inner, (*enclosing, site), inside)
        if op.kind in (Kind.FOR, Kind.WHILE):
            # The references that a loop returns are its operands.
            for i, j in op.carries:
                first = op.entries[-1][i]
                if isinstance(first, Value) and isinstance(
                    first.aval, _jax.AbstractRef
                ):
                    origins[op.results[j]] = site.origin(first)
