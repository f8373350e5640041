# SPDX-License-Identifier: Apache-2.0
"""The values of a program on which its indices depend.

JAX's integers wrap, and an index that has wrapped is out of bounds or, after a
division, silently another one. What can be shown to wrap is an error of the trace; the
emulator reports the rest. Bitwise operations end the search: what they compute from may
be a hash, which wraps on purpose; so do selections, which may drop what has wrapped.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from pallas_gpu import errors, types
from pallas_gpu.primitives.indices.facts import kind
from pallas_gpu.program.bodies import kept
from pallas_gpu.program.nodes import (
    Access,
    Constant,
    Fault,
    Kind,
    Op,
    Region,
    Value,
)

# Operations whose result wraps if it is too large.
WRAPPING: dict[str, Callable[..., int]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "neg")
}
# Operations of which an index that depends on the result depends on the operands.
_PASSING = (*WRAPPING, "div", "rem", "max", "min", "convert_element_type", "copy")
# Functions of jax.numpy all of whose operations do.
_PASSING_CALLS = ("floor_divide", "remainder")

# Of the programs that the emulator has run.
_MARKED: weakref.WeakSet[Value] = weakref.WeakSet()
_SEARCHED: weakref.WeakSet[Region] = weakref.WeakSet()


def overflow(what: str, got: Any, where: str | None) -> errors.OutOfBoundsError:
    """Returns the error for an index that does not fit its type."""
    return errors.OutOfBoundsError(
        f"the computation of an index overflows {what}",
        expected="results that fit: indices of references have 32 bits",
        got=got,
        hint="divide before you multiply, or use an axis of the grid for each "
        "dimension of the array",
        where=where,
    )


def mark(region: Region) -> None:
    """Finds the values of a program that indices depend on, for `is_index`."""
    if region not in _SEARCHED:
        _MARKED.update(find(region, certain=False))
        _SEARCHED.add(region)


def is_index(value: Value) -> bool:
    """True if an index depends on a value of a marked program."""
    return value in _MARKED


def find(region: Region, certain: bool) -> set[Value]:
    """Returns the values that indices depend on.

    Args:
      region: the program.
      certain: consider only operations that are certainly executed.
    """
    ops = _certain(region) if certain else operations(region)
    found = {x for op in ops for x in _indices(op)}
    return _with_sources(region, found, _passes, _integers)


def deciding(region: Region) -> set[Value]:
    """Returns the values on which depends what branches do."""
    ops = (op for op in operations(region) if op.kind is Kind.IF)
    return _with_sources(region, _values(op.inputs[0] for op in ops))


def placing(region: Region) -> set[Value]:
    """Returns the values on which depends what is asked of indices before a launch.

    That is where stores to GMEM start, how accesses are aligned, and whether an index
    wraps that is certainly computed.
    """
    ops, found = operations(region), find(region, certain=True)
    for access in (x for op in ops for x in op.accesses):
        if access.writes and access.space is types.GMEM:
            found |= _values(access.starts())
    ends = (op.regions[0].results[0] for op in ops if op.kind is Kind.WHILE)
    return _with_sources(region, found | _values(ends)) | _aligning(region)


def _aligning(region: Region) -> set[Value]:
    """Returns the values on which depends how accesses are aligned.

    A multiple of the size of a block is aligned, whatever it is a multiple of.
    """
    ops = operations(region)
    made = {op.results[0]: op for op in ops if op.name in ("add", "sub", "mul")}
    starts, ends, others = set[Value](), set[Op](), set[Op]()
    for access in (x for op in ops for x in _accesses(op)):
        for axis in access.aligning:
            rest = list(_values(access.starts([axis])))
            starts.update(rest)
            while rest:
                op = made.get(rest.pop())
                if op is not None and op.name == "mul":
                    size = access.window.sizes[axis]
                    (ends if _has_factor(op, size) else others).add(op)
                elif op is not None:
                    rest += _values(op.inputs)
    ends -= others
    return _with_sources(region, starts, lambda op: op not in ends)


def _has_factor(op: Op, n: int) -> bool:
    """Whether a product has a constant factor that is a multiple of a number."""
    return any(isinstance(x, Constant) and x.value % n == 0 for x in op.inputs)


def _with_sources(
    region: Region,
    found: set[Value],
    passes: Callable[[Op], bool] = lambda op: True,
    chosen: Callable[[Iterable[Any]], set[Value]] = lambda found: _values(found),
) -> set[Value]:
    """Returns values and those of a kind on which they depend, by some operations."""
    ops, size = operations(region)[::-1], -1
    while len(found) != size:
        size = len(found)
        for op in ops:
            if op.regions or not found.isdisjoint(op.results):
                found |= chosen(_sources(op, found, passes))
    return found


def _passes(op: Op) -> bool:
    calls = {call.params.get("name") for call in op.calls}
    return op.name in _PASSING or bool(calls.intersection(_PASSING_CALLS))


def _values(operands: Iterable[Any]) -> set[Value]:
    return {x for x in operands if isinstance(x, Value)}


@kept
def operations(region: Region) -> tuple[Op, ...]:
    """Returns the operations of a program, each before those that it runs."""
    found: list[Op] = []
    for op in region.ops:
        found.append(op)
        for inner in op.regions:
            found += operations(inner)
    return tuple(found)


def _certain(region: Region) -> Iterator[Op]:
    """Yields the operations that are certainly executed."""
    for op in region.ops:
        yield op
        if op.kind is Kind.SCOPE or op.params.get("length", 0) > 0:
            for inner in op.regions:
                yield from _certain(inner)


def _accesses(op: Op) -> list[Access]:
    """The parts of references among the operands, also those it does not access."""
    if op.operation is None:
        return []
    return [x for x in jax.tree.leaves(op.operands) if isinstance(x, Access)]


def _indices(op: Op) -> set[Value]:
    """The indices that an operation accesses memory at."""
    named = op.operands
    if isinstance(named, Fault) or op.kind is not Kind.PLAIN:
        return set()
    found = [start for access in _accesses(op) for start in access.starts()]
    # An access under a mask may compute indices that it does not use.
    if isinstance(named, dict) and named.get("mask") is None:
        found += jax.tree.leaves(named.get("indices"))
    return _integers(found)


def _integers(operands: Any) -> set[Value]:
    return {x for x in _values(operands) if not x.shape and kind(x.aval) == "i"}


def _sources(op: Op, found: set[Value], passes: Callable[[Op], bool]) -> Iterator[Any]:
    """Yields what those that were found depend on, by one operation."""
    results = [i for i, value in enumerate(op.results) if value in found]
    if results and op.kind is Kind.PLAIN and passes(op):
        yield from op.inputs
    for region, entries in zip(op.regions, op.entries, strict=True):
        pairs = zip(region.inputs, entries, strict=True)
        yield from (entry for value, entry in pairs if value in found)
        if len(region.results) == len(op.results):
            yield from (region.results[i] for i in results)
    for i, j in op.carries:
        if op.regions[-1].inputs[i] in found:
            yield op.regions[-1].results[j]
