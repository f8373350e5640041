# SPDX-License-Identifier: Apache-2.0
"""Reductions, scans and sorts of lax, on the scan unit and the sorter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.sparsecore.emitters import conversions, elementwise, lanes
from pallas_gpu.sparsecore.emitters.values import I32, Array, constant
from pallas_gpu.sparsecore.lowering.state import emits

_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
_SCANS = {"cumsum": "sum", "cummax": "max", "cummin": "min"}


def _unsupported(ctx: Any, expected: str, x: Any) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f"{ctx.op.name} of other elements",
        expected=expected,
        got=f"{np.dtype(x.dtype).name}{list(x.shape)}",
        hint="convert the elements to 32 bits, or loop over registers",
    )


def _across_rows(ctx: Any, x: Array, combine: Any) -> Array | None:
    """Combines registers where leading axes are reduced; None: lanes are, too."""
    axes, shape = sorted(ctx.eqn.params["axes"]), tuple(ctx.out_aval.shape)
    if axes != list(range(len(axes))) or len(axes) == len(x.shape):
        return None
    count = math.prod(shape)
    elements = x.size // len(x.parts)
    if count % elements:
        return None
    each = count // elements
    parts = list(x.parts[:each])
    for first in range(each, len(x.parts), each):
        row = x.parts[first : first + each]
        parts = [combine(a, b) for a, b in zip(parts, row, strict=True)]
    return Array(shape, x.dtype, tuple(parts))


def _reduce(name: str) -> Any:
    kind = _REDUCTIONS[name]

    def rule(ctx: Any, x: Array) -> Array:
        row = elementwise.ROWS[lanes.COMBINES[kind]]
        if x.is_scalar:
            return x.reshaped(ctx.out_aval.shape)
        combine = row.get(elementwise.kind_of(x.dtype))
        made = None if combine is None else _across_rows(ctx, x, combine)
        if made is not None:
            return made
        if ctx.out_aval.shape or not lanes.is_scannable(x.dtype):
            raise _unsupported(ctx, "all of 32-bit elements, or leading axes", x)
        return Array((), x.dtype, (lanes.reduce(kind, x),))

    return rule


def _cumulative(name: str) -> Any:
    kind = _SCANS[name]

    def rule(ctx: Any, x: Array) -> Array:
        if x.is_scalar:
            return x
        if len(x.shape) != 1 or not lanes.is_scannable(x.dtype):
            raise _unsupported(ctx, "a vector of 32-bit elements", x)
        if not ctx.eqn.params["reverse"]:
            return lanes.cumulative(kind, x)
        turned = x.with_parts([lanes.reverse(p) for p in reversed(x.parts)])
        made = lanes.cumulative(kind, turned)
        return x.with_parts([lanes.reverse(p) for p in reversed(made.parts)])

    return rule


def _argument(name: str) -> Any:
    kind = name.removeprefix("arg")

    def rule(ctx: Any, x: Array) -> Array:
        dtype = np.dtype(ctx.eqn.params["index_dtype"])
        if x.is_scalar:
            zero = ctx.kernel.constant(0, dtype)
            return zero.reshaped(ctx.out_aval.shape)
        if len(x.shape) != 1 or not lanes.is_scannable(x.dtype):
            raise _unsupported(ctx, "a vector of 32-bit elements", x)
        found = Array((), I32, (lanes.argument(kind, x),))
        return conversions.astype(found, dtype, ctx.kernel.target.lanes)

    return rule


for _name in _REDUCTIONS:
    emits(_name)(_reduce(_name))
for _name in _SCANS:
    emits(_name)(_cumulative(_name))
for _name in ("argmax", "argmin"):
    emits(_name)(_argument(_name))


def _count(ctx: Any, mask: Array) -> Any:
    width = ctx.kernel.target.lanes
    return lanes.count(conversions.mask_of(mask, width, width), width)


def _of_bools(combine: Any, compare: Any, bound: Callable[[Array], int]) -> Any:
    """The rule of a reduction that compares the number of true elements to a bound."""

    def rule(ctx: Any, x: Array) -> Array:
        if x.is_scalar:
            return x.reshaped(ctx.out_aval.shape)
        made = _across_rows(ctx, x, combine)
        if made is not None:
            return made
        number = _count(ctx, x)
        holds = arith.cmpi(compare, number, constant(bound(x), number.type))
        return Array((), x.dtype, (holds,))

    return rule


emits("reduce_or")(_of_bools(arith.ori, arith.CmpIPredicate.ne, lambda x: 0))
emits("reduce_and")(_of_bools(arith.andi, arith.CmpIPredicate.eq, lambda x: x.size))


@emits("sort")
def _sort(ctx: Any, *xs: Array) -> list[Array]:
    params = ctx.eqn.params
    if (
        len(xs[0].shape) != 1
        or params["num_keys"] != 1
        or (not all(lanes.is_scannable(x.dtype) for x in xs))
    ):
        raise _unsupported(ctx, "one key of 32-bit elements, in a register", xs[0])
    keys = xs[0]
    if keys.is_scalar:
        return list(xs)
    made, found = None, []
    for x in xs[1:] or xs:
        made = lanes.sort(keys.value, x.value, keys.dtype)
        found.append(x.with_parts([made[1]]))
    assert made is not None
    sorted_keys = keys.with_parts([made[0]])
    return [sorted_keys, *found] if len(xs) > 1 else [sorted_keys]
