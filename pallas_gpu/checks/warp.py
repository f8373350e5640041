# SPDX-License-Identifier: Apache-2.0
"""Operations that a single warp can issue, and the arrays that it can have."""

from __future__ import annotations

from typing import Any

from pallas_gpu import errors, layouts, types
from pallas_gpu.layouts.registers.placement import is_of_warp, place
from pallas_gpu.primitives.inline import inline_mgpu_p
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.program.nodes import Op
from pallas_gpu.program.walk import Site


def check_operation(op: Op) -> None:
    """Raises UnsupportedError for an operation that needs more than one warp."""
    if op.primitive is warp_map_p:
        raise _refusal(
            "warp_map inside warp_map",
            expected="one level: a warp cannot be divided",
            got="a second warp_map in the function of the first",
            hint="call them one after the other, or branch on warp_id",
        )
    if op.primitive is run_scoped_p:
        _check_scope(op)
        return
    if op.primitive is inline_mgpu_p:
        _check_inline(op)
    name, operation = op.name, op.operation
    if operation is not None and not operation.by_warp:
        raise _refusal(
            f"{name} inside warp_map",
            expected="an operation that one warp can issue: copies, barriers, their "
            "waits and fences, arrays of its own",
            got=f"{name}, which needs the whole warpgroup",
            hint="call it outside the warp_map",
        )
    if name == "dot_general":
        raise _refusal(
            "a matrix product inside warp_map",
            expected="products of a warpgroup: wgmma and mma divide them among its "
            "four warps",
            got=f"dot_general of {' and '.join(map(_text, op.inputs))}",
            hint="multiply outside the warp_map, or elementwise and add up: "
            "(a[:, :, None] * b).sum(1)",
        )
    for value in op.inputs:
        _refuse_accumulator(getattr(value, "aval", None), name)
    for access in op.accesses:
        if access.operation.family == "references":
            _refuse_tmem(access.buffer.aval, name)
    _check_layout(op)


def _check_inline(op: Op) -> None:
    """Raises UnsupportedError for handles of arrays, which a warpgroup holds."""
    given = (getattr(named["operand"], "aval", None) for named in op.operands)
    arrays = [x for x in (*given, *(x.aval for x in op.results)) if x is not None]
    for aval in arrays:
        if aval.shape:
            raise _refusal(
                "inline code with arrays inside warp_map",
                expected="references and scalars: a FragmentedArray is in the "
                "registers of a warpgroup",
                got=f"{op.params['code'].name} with {aval.dtype}{list(aval.shape)}",
                hint="call it outside the warp_map, or load from a reference in it",
            )


def is_position(site: Site) -> bool:
    """True for a position on the axis of warps of a surrounding `warp_map`."""
    names = [
        outer.op.params["axis_name"]
        for outer in site.enclosing
        if outer.op.primitive is warp_map_p
    ]
    axis = site.op.params.get("axis_name")
    return axis is not None and axis in names


def _check_scope(op: Op) -> None:
    """Raises UnsupportedError for memory that a warp cannot have of its own."""
    for ref in op.made:
        space = ref.aval.memory_space
        if space in (types.SMEM, types.BARRIERS):
            continue
        raise _refusal(
            f"run_scoped of {space.name} inside warp_map",
            expected="SMEM(...) and Barrier(...), of which each warp gets its own",
            got=types.describe(ref.aval),
            hint="allocate outside the warp_map, around it",
        )


def _refuse_accumulator(aval: Any, name: str) -> None:
    if isinstance(aval, types.AccumulatorRef):
        raise _refusal(
            "an accumulator inside warp_map",
            expected="references to memory and barriers",
            got=f"{name} on an accumulator, which is in the registers of all four "
            "warps",
            hint="use it outside the warp_map",
        )


def _refuse_tmem(aval: Any, name: str) -> None:
    # PTX ISA, tcgen05.ld, "Access restrictions".
    if aval.memory_space is types.TMEM:
        raise _refusal(
            "access to elements of TMEM inside warp_map",
            expected="products of it, and copies to it",
            got=f"{name} on {types.describe(aval)}, of whose lanes a warp reaches a "
            "quarter",
            hint="read and write it outside the warp_map",
        )


def _check_layout(op: Op) -> None:
    """Raises LayoutError for a layout that distributes an array over several warps."""
    layout = op.params.get("layout")
    if not isinstance(layout, layouts.Layout | layouts.RegisterLayout):
        return
    placement = place(layout, op.results[0].shape)
    if isinstance(placement, layouts.WGSplatLayout) or is_of_warp(placement):
        return
    raise errors.LayoutError(
        f"{op.name} inside warp_map: the layout distributes the array over "
        "several warps",
        expected="a layout that repeats the array in each warp: "
        "warp_dims=(plgpu.Replicated(4),)",
        got=layout,
        hint="omit the layout: the default one is over the 32 lanes of the warp",
    )


def _text(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _refusal(what: str, **rows: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(f"{what} is not supported", **rows)
