# SPDX-License-Identifier: Apache-2.0
"""What holds of every program, as sentences that are checked.

A program that violates one is a mistake of what made it, not of the kernel's author.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import Access, Fault, Kind, Op, Region, Value

Check = Callable[[Op], bool]


def check(region: Region) -> None:
    """Raises InternalError if a program violates a sentence of the specification."""
    found = list(complaints(region))
    if found:
        raise errors.InternalError(
            "a program is malformed", expected="what program.spec says", got=found
        )


def complaints(region: Region) -> Iterator[str]:
    """Yields the operations that violate a sentence, with the sentence."""
    known = {id(value) for value in region.inputs}
    numbers = [value.index for value in region.inputs]
    for op in region.ops:
        if any(id(value) not in known for value in _values(op)):
            yield f"{op.name}: operands are inputs of the region or earlier results"
        known |= {id(value) for value in op.results}
        numbers += [value.index for value in op.results]
        yield from (f"{op.name}: {sentence}" for sentence in violated(op))
        for inner in op.regions:
            yield from complaints(inner)
    if numbers != list(range(region.size)):
        yield "a region numbers its inputs, then its results, in order"
    if any(isinstance(x, Value) and id(x) not in known for x in region.results):
        yield "a region returns its inputs, its results or constants"


def violated(op: Op) -> Iterator[str]:
    """Yields the sentences that do not hold of an operation by itself."""
    for sentence, holds in (*_OF_ALL, *_OF_KIND[op.kind]):
        if not holds(op):
            yield sentence


def _values(op: Op) -> Iterator[Value]:
    """The values that an operation uses, those in windows included."""
    yield from (x for x in op.inputs if isinstance(x, Value))
    if not isinstance(op.operands, Fault):
        for access in _accesses(op):
            yield access.buffer
            named = (*access.starts(), access.device)
            yield from (x for x in named if isinstance(x, Value))


def _accesses(op: Op) -> list[Access]:
    return [x for x in jax.tree.leaves(op.operands) if isinstance(x, Access)]


def _is_ref(operand: Any) -> bool:
    return isinstance(operand, Value) and isinstance(operand.aval, _jax.AbstractRef)


def _same(*operands: Any) -> bool:
    """Whether operands have one type; of references, one shape and element type."""
    first, *rest = [(x.shape, np.dtype(x.dtype), _is_ref(x)) for x in operands]
    return all(other == first for other in rest)


# --- sentences ------------------------------------------------------------------------


def _ranks_fit(op: Op) -> bool:
    return all(
        len(x.window.starts) == len(x.buffer.shape if x.viewed is None else x.viewed[0])
        for x in _accesses(op)
    )


def _starts_are_integers(op: Op) -> bool:
    starts = [start for x in _accesses(op) for start in x.starts()]
    return all(x.shape == () and np.dtype(x.dtype).kind in "iu" for x in starts)


def _owners_are_declared(op: Op) -> bool:
    """Other devices' memory is in GMEM, and the operation can access it."""
    found = [x for x in _accesses(op) if x.owner is not None]
    return all(
        x.space in (types.GMEM, types.SEMAPHORES)
        and x.name in (x.operation.remote if x.device is not None
                       else x.operation.multicast)
        and (x.device is None
             or (x.device.shape == () and np.dtype(x.device.dtype).kind in "iu"))
        for x in found
    )  # fmt: skip


def _declares_accesses(op: Op) -> bool:
    operation = registry.operation(op.primitive)
    if operation is None or not isinstance(op.operands, dict):
        return True
    named = {k for k, v in op.operands.items() if isinstance(v, Access)}
    return named <= set(operation.accesses) <= set(op.operands)


def _entries_fit(op: Op) -> bool:
    """Inputs have the types of what enters them."""
    return all(
        len(region.inputs) == len(entries)
        and all(
            entry is None or _same(value, entry)
            for value, entry in zip(region.inputs, entries, strict=True)
        )
        for region, entries in zip(op.regions, op.entries, strict=True)
    )


def _carries_fit(op: Op) -> bool:
    body, results = op.regions[-1], op.results
    return all(
        _same(body.inputs[i], body.results[j], results[j]) for i, j in op.carries
    )


def _is_decided(op: Op) -> bool:
    (answer,) = op.regions[0].results
    return answer.shape == () and np.dtype(answer.dtype) == bool


def _selects(op: Op) -> bool:
    which = op.inputs[0]
    return which.shape == () and np.dtype(which.dtype).kind in "biu"


def _returns(op: Op) -> bool:
    return all(
        len(region.results) == len(op.results)
        and all(map(_same, region.results, op.results))
        for region in op.regions
    )


def _is_counted(op: Op) -> bool:
    # A loop over a range with bounds that are values has no length.
    return op.params["length"] is None or op.params["length"] >= 0


def _allocates(op: Op) -> bool:
    return all(map(_is_ref, op.made))


def _counts_warps(op: Op) -> bool:
    made = [(v.shape, v.dtype) for v in op.made]
    return made == [((), np.int32)] and not op.results


_OF_ALL: tuple[tuple[str, Check], ...] = (
    ("a window has a range for each axis of its reference", _ranks_fit),
    ("starts of windows are integer scalars", _starts_are_integers),
    ("`define` says how each reference is accessed", _declares_accesses),
    ("`define` says which memory of other devices is accessed", _owners_are_declared),
    ("a region has an input of the type of each operand that enters", _entries_fit),
)
_OF_KIND: dict[Kind, tuple[tuple[str, Check], ...]] = {
    Kind.PLAIN: (("it runs no regions", lambda op: not op.regions),),
    Kind.FOR: (
        ("it has one region", lambda op: len(op.regions) == 1),
        ("a carry has one type", _carries_fit),
        ("it runs a known number of times", _is_counted),
    ),
    Kind.WHILE: (
        ("it has a condition and a body", lambda op: len(op.regions) == 2),
        ("a carry has one type", _carries_fit),
        ("the condition returns one bool", _is_decided),
    ),
    Kind.IF: (
        ("the first operand is a scalar that selects", _selects),
        ("each region returns what the operation does", _returns),
    ),
    Kind.SCOPE: (
        ("what it makes are references", _allocates),
        ("the region returns what the operation does", _returns),
    ),
    Kind.WARPS: (("it makes the index of the warp, and no results", _counts_warps),),
}
