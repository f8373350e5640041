# SPDX-License-Identifier: Apache-2.0
"""Operations that move elements between lanes and registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.sparsecore.emitters import conversions, lanes
from pallas_gpu.sparsecore.emitters.elementwise import ROWS
from pallas_gpu.sparsecore.emitters.values import (
    BOOL,
    I32,
    Array,
    broadcast,
    constant,
    elements_of,
    extract,
    i32,
    known,
    scalar_type,
)
from pallas_gpu.sparsecore.lowering.families.elementwise import filled
from pallas_gpu.sparsecore.lowering.state import emits


def _register(ctx: Any, dtype: Any) -> int:
    return conversions.register_elements(np.dtype(dtype), ctx.kernel.target.lanes)


def _unsupported(ctx: Any, expected: str, x: Any) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f"{ctx.op.name} across registers",
        expected=expected,
        got=f"{np.dtype(x.dtype).name}{list(x.shape)}",
        hint="store the value to VMEM, and load what is needed: plsc.load_gather",
    )


@emits("broadcast_in_dim")
def _broadcast(ctx: Any, x: Array, *_: Any) -> Array:
    shape = tuple(ctx.out_aval.shape)
    if x.is_scalar:
        if math.prod(shape) == 1:
            return x.reshaped(shape)
        return filled(ctx, x, shape, _register(ctx, x.dtype))
    # New axes in front repeat the registers; others would move lanes.
    at = ctx.eqn.params["broadcast_dimensions"]
    own = [a for a, n in zip(at, x.shape, strict=True) if n != 1]
    repeated = [a for a, n in enumerate(shape) if n != 1 and a not in own]
    if any(a > own[0] for a in repeated):
        raise _unsupported(ctx, "new leading dimensions", ctx.out_aval)
    return Array(shape, x.dtype, x.parts * (math.prod(shape) // x.size))


@emits("reshape")
def _reshape(ctx: Any, x: Array, *_: Any) -> Array:
    return x.reshaped(ctx.out_aval.shape)


@emits("squeeze")
def _squeeze(ctx: Any, x: Array) -> Array:
    return x.reshaped(ctx.out_aval.shape)


@emits("iota")
def _iota(ctx: Any) -> Array:
    params, out = ctx.eqn.params, ctx.out_aval
    shape, dtype = tuple(out.shape), np.dtype(out.dtype)
    dimension = params["dimension"]
    if math.prod(shape) == 1:
        return Array(shape, dtype, (constant(0, scalar_type(dtype)),))
    elements = ctx.kernel.target.lanes
    inner = math.prod(shape[dimension + 1 :])
    parts = []
    for first in range(0, math.prod(shape), elements):
        if inner == 1 and shape[dimension] % elements == 0:
            start = first % shape[dimension]
            numbers = lanes.iota(elements)
            if start:
                numbers = arith.addi(numbers, constant(start, numbers.type))
            parts.append(numbers)
        elif inner % elements == 0:
            at = first // inner % shape[dimension]
            parts.append(broadcast(i32(at), elements))
        else:
            raise _unsupported(ctx, "rows of whole registers", out)
    return conversions.astype(Array(shape, I32, tuple(parts)), dtype, elements)


@emits("concatenate")
def _concatenate(ctx: Any, *xs: Array) -> Array:
    return _joined(ctx, ctx.eqn.params["dimension"], xs)


@emits("stack")
def _stack(ctx: Any, *xs: Array) -> Array:
    axis = ctx.eqn.params["axis"] % len(ctx.out_aval.shape)
    rows = [x.reshaped((*x.shape[:axis], 1, *x.shape[axis:])) for x in xs]
    return _joined(ctx, axis, rows)


def _joined(ctx: Any, dimension: int, xs: Sequence[Array]) -> Array:
    """Returns values one after the other in a dimension: whole registers."""
    shape = tuple(ctx.out_aval.shape)
    elements = _register(ctx, xs[0].dtype)
    # Elements of one row of each operand, in row-major order.
    rows = [math.prod(x.shape[dimension:]) for x in xs]
    if any(n % elements or x.is_scalar for n, x in zip(rows, xs, strict=True)):
        raise _unsupported(ctx, f"multiples of {elements} elements", xs[0])
    parts: list[Any] = []
    for i in range(math.prod(shape[:dimension])):
        for x, row in zip(xs, rows, strict=True):
            count = row // elements
            parts += x.parts[i * count : (i + 1) * count]
    return Array(shape, xs[0].dtype, tuple(parts))


@emits("split")
def _split(ctx: Any, x: Array) -> list[Array]:
    dimension, found, start = ctx.eqn.params["axis"], [], 0
    for size in ctx.eqn.params["sizes"]:
        starts, sizes = [0] * len(x.shape), list(x.shape)
        starts[dimension], sizes[dimension] = start, size
        found.append(_sliced(ctx, x, starts, sizes))
        start += size
    return found


@emits("unstack")
def _unstack(ctx: Any, x: Array) -> list[Array]:
    axis, starts, sizes = ctx.eqn.params["axis"], [0] * len(x.shape), list(x.shape)
    sizes[axis], found = 1, []
    for starts[axis], out in enumerate(ctx.op.results):
        found.append(_sliced(ctx, x, starts, sizes).reshaped(out.aval.shape))
    return found


@emits("slice")
def _slice(ctx: Any, x: Array) -> Array:
    params = ctx.eqn.params
    strides = params["strides"] or (1,) * len(x.shape)
    if any(s != 1 for s in strides):
        raise _unsupported(ctx, "a slice without strides", x)
    return _sliced(ctx, x, params["start_indices"], ctx.out_aval.shape)


def _sliced(ctx: Any, x: Array, starts: Sequence[int], sizes: Sequence[int]) -> Array:
    """Returns whole registers of a value, or one element."""
    strides = [math.prod(x.shape[i + 1 :]) for i in range(len(x.shape))]
    first = sum(a * b for a, b in zip(starts, strides, strict=True))
    if x.is_scalar:
        return x.reshaped(sizes)
    elements = elements_of(x.parts[0])
    if math.prod(sizes) == 1:
        # A lane of narrow integers ends libtpu on v5p.
        count = ctx.kernel.target.lanes
        if x.dtype == BOOL:
            wide = conversions.astype(x, I32, count)
        else:
            wide = conversions.widened(x, count)
        elements = elements_of(wide.parts[0])
        lane = extract(wide.parts[first // elements], first % elements)
        scalar = Array(tuple(sizes), wide.dtype, (lane,))
        return conversions.astype(scalar, x.dtype, elements)
    flat = np.arange(x.size).reshape(x.shape)
    where = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
    chosen = flat[where].reshape(-1)
    if chosen.size % elements:
        raise _unsupported(ctx, f"multiples of {elements} elements", ctx.out_aval)
    groups = chosen.reshape(-1, elements)
    whole = groups[:, :1] + np.arange(elements)
    if (groups != whole).any() or (groups[:, 0] % elements).any():
        raise _unsupported(ctx, "whole registers, or one element", ctx.out_aval)
    return Array(
        tuple(sizes), x.dtype, tuple(x.parts[i // elements] for i in groups[:, 0])
    )


@emits("dynamic_slice")
def _dynamic_slice(ctx: Any, x: Array, *starts: Array) -> Array:
    sizes = ctx.eqn.params["slice_sizes"]
    numbers = [known(s.value) for s in starts]
    limits = [n - size for n, size in zip(x.shape, sizes, strict=True)]
    given = [n for n in numbers if n is not None]
    if len(given) == len(numbers):
        inside = [min(max(n, 0), most) for n, most in zip(given, limits, strict=True)]
        return _sliced(ctx, x, inside, sizes)
    if math.prod(sizes) != 1 or len(x.shape) != 1 or not lanes.is_scannable(x.dtype):
        raise _unsupported(ctx, "one element of a vector", ctx.out_aval)
    at = _clamped(starts[0].value, limits[0])
    elements = elements_of(x.parts[0])
    picked = _picked(x, broadcast(at, elements))
    return Array(tuple(sizes), x.dtype, (extract(picked, 0),))


def _clamped(index: Any, most: int) -> Any:
    return ROWS["clamp"]["i"](
        constant(0, index.type), index, constant(most, index.type)
    )


def _picked(x: Array, indices: Any) -> Any:
    """Returns a register with the elements at indices inside a vector."""
    elements = elements_of(x.parts[0])
    if len(x.parts) == 1:
        return lanes.permute(x.value, indices)
    width = constant(elements, indices.type)
    lane, number = arith.remui(indices, width), arith.divui(indices, width)
    found = lanes.permute(x.parts[0], lane)
    for i, part in enumerate(x.parts[1:], 1):
        here = arith.cmpi(arith.CmpIPredicate.eq, number, constant(i, number.type))
        found = arith.select(here, lanes.permute(part, lane), found)
    return found


@emits("gather")
def _gather(ctx: Any, x: Array, indices: Array) -> Array:
    """`x[indices]` of vectors: lanes are permuted."""
    params, out = ctx.eqn.params, ctx.out_aval
    numbers = params["dimension_numbers"]
    is_taken = (
        len(x.shape) == 1
        and tuple(params["slice_sizes"]) == (1,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.offset_dims
        and not numbers.operand_batching_dims
    )
    if not is_taken or not lanes.is_scannable(x.dtype) or x.is_scalar:
        raise _unsupported(ctx, "x[indices] of vectors of 32-bit elements", x)
    mode, most = params["mode"], x.size - 1
    if indices.is_scalar:
        at = broadcast(_clamped(indices.value, most), elements_of(x.parts[0]))
        return Array(tuple(out.shape), x.dtype, (extract(_picked(x, at), 0),))
    parts = []
    for part in indices.parts:
        inside = part
        if mode != lax.GatherScatterMode.PROMISE_IN_BOUNDS:
            inside = _clamped(part, most)
        made = _picked(x, inside)
        if mode == lax.GatherScatterMode.FILL_OR_DROP:
            made = _or_filled(ctx, part, inside, made, x.dtype)
        parts.append(made)
    return Array(tuple(out.shape), x.dtype, tuple(parts))


def _or_filled(ctx: Any, given: Any, inside: Any, made: Any, dtype: Any) -> Any:
    fill = ctx.eqn.params["fill_value"]
    if fill is None:
        # lax: NaN, the least signed and the largest unsigned integer.
        fill = {"f": float("nan"), "i": -(2**31), "u": 2**32 - 1}[dtype.kind]
    is_inside = arith.cmpi(arith.CmpIPredicate.eq, given, inside)
    return arith.select(is_inside, made, constant(fill, made.type))


@emits("rev")
def _rev(ctx: Any, x: Array) -> Array:
    if x.is_scalar:
        return x
    if tuple(ctx.eqn.params["dimensions"]) != tuple(range(len(x.shape))) or (
        not lanes.is_scannable(x.dtype)
    ):
        raise _unsupported(ctx, "vectors of 32-bit elements", x)
    return x.with_parts([lanes.reverse(part) for part in reversed(x.parts)])
