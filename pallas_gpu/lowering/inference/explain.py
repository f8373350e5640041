# SPDX-License-Identifier: Apache-2.0
"""Error messages for kernels that no assignment of layouts satisfies.

An error names the two operations (or the operation and the array) in conflict, their
lines, and the layouts that each admits. Its suggestions are verified first: the kernel
is solved again with more scratch, or without one of the user's layout_casts.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from pallas_gpu import errors, types
from pallas_gpu.layouts import SmemLayout, TmemLayout
from pallas_gpu.layouts.moves.least_scratch import IMAGE_BYTES
from pallas_gpu.layouts.registers.placement import describe
from pallas_gpu.lowering.inference import arrays, relations, solver
from pallas_gpu.lowering.inference.assembly import Assembly
from pallas_gpu.lowering.inference.network import (
    Array,
    Network,
    Use,
    Variable,
    named,
)
from pallas_gpu.lowering.inference.solver import INFEASIBLE

# Scratch sizes to try: more leaves too little for the kernel's own arrays.
_LEAST_SCRATCH_BYTES, _MOST_SCRATCH_BYTES = 1 << 9, 1 << 16
# Layouts of one operation that a message lists.
_LISTED = 4
# What may help where no verified change does.
_GENERAL_HINT = (
    "change the layout_cast nearest to them, store the array to SMEM and load it in "
    "the other layout, or remove the layout_casts"
)


def domain_error(problem: Assembly) -> errors.LayoutError | None:
    """The error for an operation without any layout, or an array without a storage."""
    for array in problem.arrays:
        error = _array_error(problem, array)
        if error is not None:
            return error
    for variable, labels in zip(problem.network.variables, problem.labels, strict=True):
        if not labels.source:
            return _no_layout(problem, variable)
    return None


def conflict(problem: Assembly) -> errors.LayoutError:
    """The error for a kernel whose operations admit layouts, but not together."""
    problem.costs.refine(problem.bounds())
    found = solver.find_conflict(problem.problem())
    if found is None:
        asking = [v for v in problem.network.variables if v.fixed is not None]
        last = (asking or problem.network.variables)[-1]
        return errors.LayoutError(
            "No choice of register layouts satisfies all operations together",
            expected="a layout for each array, and relayouts between them",
            got=f"{len(problem.network.variables)} operations on arrays and "
            f"{problem.scratch_bytes} bytes of scratch",
            hint=_remedies(problem, [])
            or "layout_cast arrays to Layout.WGMMA, or remove the layout_casts",
            where=last.node.where,
        )
    return _conflict_error(problem, found)


# --- arrays in SMEM -------------------------------------------------------------------


def _array_error(problem: Assembly, array: Array) -> errors.LayoutError | None:
    storages = problem.storages[array.index]
    refusals = problem.refusals[array.index]
    if any(all(r[i] is None for r in refusals.values()) for i in range(len(storages))):
        return None
    if array.base.given is not None:
        use, (error,) = next((u, r) for u, r in refusals.items() if r[0] is not None)
        assert error is not None
        if array.base.space is types.SMEM:
            return _transforms_error(array, storages[0], use, error)
        error.what = f"{_used(use)}: {error.what}"
        error.where = use.node.where
        return error
    for use, reasons in refusals.items():
        if None not in reasons:
            return _single_use_error(array, storages, use, reasons)
    for a, b in itertools.combinations(refusals, 2):
        pairs = zip(refusals[a], refusals[b], strict=True)
        if not any(x is None and y is None for x, y in pairs):
            return _two_uses_error(array, storages, refusals, [a, b])
    return _two_uses_error(array, storages, refusals, list(refusals))


def _transforms_error(
    array: Array, storage: SmemLayout, use: Use, error: errors.LayoutError
) -> errors.LayoutError:
    """The user's transforms do not suit an operation."""
    free = dataclasses.replace(array, base=dataclasses.replace(array.base, given=None))
    fitting = [
        other
        for other in arrays.storages(free)
        if all(arrays.refusal(u, other, free=True) is None for u in array.uses)
    ]
    hint = error.hint
    if fitting:
        hint = "omit the transforms, so that they are inferred: "
        tiling, swizzle = fitting[0].tiling, fitting[0].swizzle
        with_tiles = f"TilingTransform({tiling}) and SwizzleTransform({swizzle})"
        hint += "no transforms" if fitting[0].is_plain else with_tiles
    return errors.LayoutError(
        f"{_used(use)} cannot use an SMEM array with its transforms: {error.what}",
        expected=error.expected,
        got=f"{storage.description} of the array {_declared(array)}",
        hint=hint,
        where=use.node.where,
    )


def _single_use_error(
    array: Array,
    storages: Sequence[arrays.Storage],
    use: Use,
    reasons: Sequence[errors.LayoutError | None],
) -> errors.LayoutError:
    """An operation supports no layout of its array."""
    # wgmma needs tiles, the smallest of which are last; others need no tiling.
    reason = reasons[-1] if use.kind in ("a", "b", "mma") else reasons[0]
    assert reason is not None
    return errors.LayoutError(
        f"{_used(use)} cannot use its SMEM array in any layout: {reason.what}",
        expected=reason.expected,
        got=f"{reason.got}; the array {_declared(array)} of shape {array.base.shape} "
        f"admits {_listing(map(_described, storages))}",
        hint=reason.hint or "use an array of another shape",
        where=use.node.where,
    )


def _two_uses_error(
    array: Array,
    storages: Sequence[arrays.Storage],
    refusals: dict[Use, list[errors.LayoutError | None]],
    uses: Sequence[Use],
) -> errors.LayoutError:
    """Operations need different layouts of one array."""
    admitted = []
    for use in uses:
        fine = [
            _described(storage)
            for storage, reason in zip(storages, refusals[use], strict=True)
            if reason is None
        ]
        because = next((r.what for r in refusals[use] if r is not None), "")
        admitted.append(f"{_used(use)} needs {_listing(fine)}: {because}")
    last = uses[-1]
    return errors.LayoutError(
        f"{' and '.join(map(_used, uses))} need different layouts of one SMEM array",
        expected=admitted[0],
        got="\n".join(admitted[1:]),
        hint="use a separate array for one of them, and copy between the two",
        where=last.node.where,
    )


def _used(use: Use) -> str:
    name = named(use.node)
    if use.role:
        return f"{use.role} of {name}"
    return f"operand {use.kind} of {name}" if use.kind in ("a", "b") else name


def _declared(array: Array) -> str:
    line = array.base.where
    kind = f"of {array.base.dtype} elements"
    return kind if line is None else f"{kind} at {line}"


def _described(storage: arrays.Storage) -> str:
    return str(storage) if isinstance(storage, TmemLayout) else storage.description


# --- operations without a layout ------------------------------------------------------


def _no_layout(problem: Assembly, variable: Variable) -> errors.LayoutError:
    shape, cell = variable.source.shape, variable.source.find()
    others = zip(problem.network.variables, problem.labels, strict=True)
    around = (labels for x, labels in others if cell is x.source.find())
    numbers = (n for labels in around for n in labels.source)
    return errors.LayoutError(
        f"{variable.name}: no layout of its operand satisfies the requirement that "
        f"{_requirement(variable)}",
        expected=f"a layout of shape {shape} such that {_requirement(variable)}",
        got=_listing(describe(problem.book.layouts[n]) for n in numbers),
        hint="layout_cast the operand to a layout made of smaller tiles, slice or "
        "reshape the reference instead, or pad the array",
        where=variable.node.where,
    )


def _requirement(variable: Variable) -> str:
    """What an operation requires of its operand's layout."""
    relation = variable.relation
    return (relations.Relation() if relation is None else relation).requirement


# --- conflicts ------------------------------------------------------------------------


def _conflict_error(problem: Assembly, found: solver.Conflict) -> errors.LayoutError:
    place = found.variable
    roots = list(
        dict.fromkeys(
            _root(found, neighbour)
            for neighbour in found.refused
            if neighbour is not None
        )
    )
    # The constraints of the author and of the hardware are reported, not the operations
    # through which they were propagated to the place of the conflict.
    culprits = [*roots, place] if len(roots) < 2 else roots
    culprits = sorted(dict.fromkeys(culprits), key=lambda v: _position(problem, v))
    if len(culprits) == 1:
        return _alone_error(problem, culprits[0])
    first, second = culprits[0], culprits[-1]
    # Those whose layout the author has chosen: of a layout_cast, or of a load.
    chosen = [x for x in problem.network.variables if x.fixed is not None]
    casts = [x for x in chosen if x.index in culprits and "layout" in x.node.params]
    meeting = f", whose layouts conflict at {_name(problem, place)}"
    if _what(problem, place) in [_what(problem, v) for v in culprits]:
        meeting = ""
    return errors.LayoutError(
        f"No layouts satisfy both {_name(problem, first)} and "
        f"{_name(problem, second)}{meeting}",
        expected=f"{_name(problem, first)} admits {_admits(problem, first)}",
        got=f"{_name(problem, second)} admits {_admits(problem, second)}",
        hint=_remedies(problem, casts) or _GENERAL_HINT,
        where=_what(problem, second).where,
    )


def _root(found: solver.Conflict, variable: int) -> int:
    """Follows removals of labels back to the variable that lost none."""
    seen = {found.variable}
    while variable in found.parents and variable not in seen:
        seen.add(variable)
        variable = next((p for p in found.parents[variable] if p not in seen), variable)
    return variable


def _alone_error(problem: Assembly, place: int) -> errors.LayoutError:
    """An operation that supports no candidate layout of its operand."""
    variable = problem.network.variables[place]
    layouts = [problem.book.layouts[n] for n in problem.labels[place].source]
    if variable.moved_bits:
        return errors.LayoutError(
            f"{named(variable.node)}: too little SMEM is left for moving data between "
            "threads",
            expected=f"at least {IMAGE_BYTES} bytes of scratch for each "
            f"{'warp' if variable.in_warp else 'warpgroup'}",
            got=f"{problem.scratch_bytes} bytes",
            hint=_remedies(problem, []) or "use smaller or fewer arrays in SMEM",
            where=variable.node.where,
        )
    if variable.relation is not None:
        relation, bits = variable.relation, variable.bits
        needs = [relation.scratch_bytes(layout, bits) for layout in layouts]
        least = min((n for n in needs if n is not None), default=0)
        if least > problem.scratch_bytes:
            return errors.LayoutError(
                f"{variable.name}: the scratch is too small to combine the partial "
                "results of the warps",
                expected=f"{least} bytes of SMEM for an operand in "
                f"{describe(layouts[needs.index(least)])}",
                got=f"{problem.scratch_bytes} bytes",
                hint=_remedies(problem, [])
                or "pass a larger CompilerParams(reduction_scratch_bytes=...)",
                where=variable.node.where,
            )
    return errors.LayoutError(
        f"{variable.name}: the operation supports none of the candidate layouts",
        expected=f"a layout such that {_requirement(variable)}",
        got=_listing(map(describe, layouts)),
        hint="layout_cast the operand to another layout",
        where=variable.node.where,
    )


def _what(problem: Assembly, variable: int) -> Any:
    """The operation of a variable, or its array in memory."""
    count = len(problem.labels)
    if variable < count:
        return problem.network.variables[variable].node
    return problem.arrays[variable - count].base


def _position(problem: Assembly, variable: int) -> int:
    """Arrays before operations, operations in program order."""
    count = len(problem.labels)
    return variable - count if variable >= count else variable + len(problem.arrays)


def _name(problem: Assembly, variable: int) -> str:
    if variable < len(problem.labels):
        return problem.network.variables[variable].name
    return f"the {named(_what(problem, variable))}"


def _admits(problem: Assembly, variable: int) -> str:
    costs = problem.problem().costs[variable]
    allowed = [i for i, cost in enumerate(costs) if cost < INFEASIBLE]
    if variable >= len(problem.labels):
        storages = problem.storages[variable - len(problem.labels)]
        return _listing(_described(storages[i]) for i in allowed)
    numbers = problem.labels[variable].source
    shape = problem.network.variables[variable].source.shape
    named = _listing(describe(problem.book.layouts[numbers[i]]) for i in allowed)
    return f"{named} for shape {shape}"


def _listing(texts: Iterator[str] | Sequence[str] | map) -> str:
    names = list(dict.fromkeys(texts))
    if not names:
        return "nothing"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return " or ".join(names[:_LISTED]) + more


# --- remedies -------------------------------------------------------------------------


def _remedies(problem: Assembly, casts: Sequence[Variable]) -> str | None:
    """Changes for which a solution was found, as a sentence."""
    found = [
        remedy
        for remedy in (
            _more_scratch(problem),
            *(_other_cast(problem, c) for c in casts),
        )
        if remedy is not None
    ]
    return "; or ".join(found) or None


def _solved(
    network: Network, scratch_bytes: int
) -> tuple[Assembly, solver.Solution] | None:
    """The problem of a network and its solution; None if it has none."""
    try:
        problem = Assembly(network, scratch_bytes)
    except errors.LayoutError:
        return None
    if domain_error(problem) is not None:
        return None
    solution = problem.solve(cheapest=False)
    return (problem, solution) if solution.feasible else None


def _more_scratch(problem: Assembly) -> str | None:
    """The smallest size of scratch that fits and admits an assignment, by bisection."""
    free = problem.free_bytes
    most = _MOST_SCRATCH_BYTES if free is None else min(free, _MOST_SCRATCH_BYTES)
    sizes = [_LEAST_SCRATCH_BYTES]
    while 2 * sizes[-1] <= _MOST_SCRATCH_BYTES:
        sizes.append(2 * sizes[-1])
    sizes = sorted({min(size, most) for size in sizes})
    sizes = [size for size in sizes if size > problem.scratch_bytes]

    def solves(size: int) -> bool:
        return _solved(problem.network, size) is not None

    # Large kernels take seconds. The smallest size usually does, or none.
    first = 0 if sizes and solves(sizes[0]) else 1
    if first >= len(sizes) or (first and not solves(sizes[-1])):
        return None
    size = sizes[first and bisect.bisect_left(sizes[:-1], True, lo=1, key=solves)]
    return (
        f"pass CompilerParams(reduction_scratch_bytes={size}), {size} bytes "
        f"for relayouts and reductions instead of {problem.scratch_bytes}"
    )


def _other_cast(problem: Assembly, cast: Variable) -> str | None:
    """A replacement for one of the author's casts, if one resolves the conflict."""
    fixed, cast.fixed = cast.fixed, None
    try:
        found = _solved(problem.network, problem.scratch_bytes)
    finally:
        cast.fixed = fixed
    if found is None:
        return None
    other, solution = found
    number = other.labels[cast.index].source[solution.labels[cast.index]]
    name = describe(other.book.layouts[number])
    if not name.startswith(("Layout.", "WG_STRIDED")):
        return f"remove the layout of the {named(cast.node)}"
    return f"use {name} in the {named(cast.node)}"
