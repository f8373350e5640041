# SPDX-License-Identifier: Apache-2.0
"""The steps of random bodies: each takes values and references, and may give one."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.random_bodies import (
    BOOL,
    F32,
    I32,
    INTEGERS,
    U8,
    U32,
    Body,
    Ref,
    step,
)


@step(3)
def unary(b: Body) -> Any:
    x, xp = b.any(), b.api.np
    if x.dtype == BOOL:
        return ~x
    if x.dtype in INTEGERS:
        return b.rng.choice(
            [lambda: -x, lambda: ~x, lambda: x * x, lambda: xp.abs(x)]
        )()
    return b.rng.choice([
        lambda: -x,
        lambda: xp.abs(x),
        lambda: b.small(x * x),
        lambda: xp.floor(x * np.asarray(0.5, x.dtype)),
        lambda: xp.sign(x),
        lambda: xp.sqrt(x * x),
    ])()  # fmt: skip


@step(5)
def binary(b: Body) -> Any:
    x, xp = b.any(), b.api.np
    y = b.partner(x)
    if b.rng.random() < 0.5:
        x, y = y, x
    if x.dtype == BOOL:
        return b.rng.choice([xp.logical_and, xp.logical_or, xp.logical_xor])(x, y)
    names = [xp.add, xp.subtract, xp.multiply, xp.maximum, xp.minimum]
    if x.dtype in INTEGERS:
        names += [xp.bitwise_and, xp.bitwise_xor]
    return b.small(b.rng.choice(names)(x, y), x.dtype)


@step(1)
def divide(b: Body) -> Any:
    """Quotients, remainders and shifts of integers, by what is not zero."""
    x = b.any(lambda x: x.dtype in INTEGERS)
    if x is None or x.dtype not in INTEGERS:
        return None
    n = x.dtype.type(b.rng.choice([1, 2, 3]))
    y = b.api.np.maximum(b.partner(x), x.dtype.type(1))
    return b.rng.choice([
        lambda: b.api.np.abs(x) // y,
        lambda: x << n,
        lambda: x >> n,
        lambda: b.api.np.clip(x, -n if x.dtype not in (U8, U32) else n, y),
    ])()  # fmt: skip


@step(0.5)
def product(b: Body) -> Any:
    """A product of few elements, of signs alone."""
    x, xp = b.any(lambda x: x.dtype in (F32, I32)), b.api.np
    if x is None:
        return None
    axis = b.rng.randrange(len(x.shape))
    return xp.prod(xp.sign(x), axis=axis, keepdims=True, dtype=x.dtype)


@step(2)
def compare(b: Body) -> Any:
    x, xp = b.any(lambda x: x.dtype != BOOL), b.api.np
    if x is None:
        return None
    return b.rng.choice([xp.less, xp.greater_equal, xp.equal, xp.not_equal])(
        x, b.partner(x)
    )


@step(2)
def choose(b: Body) -> Any:
    x = b.any()
    condition = b.partner(x, BOOL)
    return b.api.np.where(condition, x, b.partner(x))


@step(2)
def convert(b: Body) -> Any:
    return b.as_type(b.any(), b.rng.choice(b.dtypes))


@step(3)
def reduce(b: Body) -> Any:
    x = b.any(lambda x: len(x.shape) > 0)
    if len(x.shape) == 0:
        return None
    count = b.rng.randint(1, len(x.shape) - (b.rng.random() < 0.8 and len(x.shape) > 1))
    axes = tuple(sorted(b.rng.sample(range(len(x.shape)), count)))
    return (
        b.reduced(x, axes, b.rng.random() < 0.5)
        if len(axes) < len(x.shape)
        else (b.api.np.broadcast_to(b.reduced(x, axes, False), x.shape))
    )


@step(3)
def spread(b: Body) -> Any:
    x = b.any(lambda x: 1 in x.shape or len(x.shape) < 2)
    if x is None:
        return None
    shape = tuple(b.rng.choice([8, 16, 64]) if n == 1 else n for n in x.shape)
    if 1 not in x.shape:
        n = b.rng.choice([2, 8, 64])
        if b.rng.random() < 0.5:
            x, shape = x[:, None], (*shape, n)
        else:
            shape = (n, *shape)
    if math.prod(shape) > 1 << 14:
        return None
    return b.api.np.broadcast_to(x, shape)


@step(2)
def transpose(b: Body) -> Any:
    x = b.any(lambda x: len(x.shape) > 1)
    if x is None:
        return None
    order = list(range(len(x.shape)))
    b.rng.shuffle(order)
    return b.api.np.transpose(x, order)


@step(2)
def reshape(b: Body) -> Any:
    x = b.any()
    shape = list(x.shape)
    axis = b.rng.randrange(len(shape))
    match b.rng.choice(["merge", "split", "one", "drop"]):
        case "merge" if len(shape) > 1 and axis:
            shape[axis - 1 : axis + 1] = [shape[axis - 1] * shape[axis]]
        case "split":
            n = b.rng.choice([k for k in (1, 2, 4, 8, 16, 64) if shape[axis] % k == 0])
            shape[axis : axis + 1] = [n, shape[axis] // n]
        case "one":
            shape.insert(axis, 1)
        case "drop":
            shape = [n for n in shape if n > 1] or [1]
    return x.reshape(tuple(shape)) if len(shape) < 5 else None


@step(2)
def cut(b: Body) -> Any:
    x = b.any(lambda x: max(x.shape) > 1)
    index = []
    for n in x.shape:
        size = n if b.rng.random() < 0.5 else b.rng.choice(_parts(n))
        start = b.rng.randrange(n // size) * size
        index.append(slice(start, start + size))
    return x[tuple(index)]


@step(2)
def move(b: Body) -> Any:
    """What moves data between threads, at any start."""
    x, xp = b.any(lambda x: max(x.shape, default=0) > 1), b.api.np
    if x is None or not x.shape:
        return None
    axis = b.rng.randrange(len(x.shape))
    n = x.shape[axis]
    k = b.rng.randrange(n)
    at = (slice(None),) * axis
    match b.rng.choice(["flip", "roll", "join", "part", "every", "pad", "take"]):
        case "flip":
            return xp.flip(x, axis)
        case "roll":
            return xp.concatenate([x[(*at, slice(k, n))], x[(*at, slice(0, k))]], axis)
        case "join" if x.size < 1 << 12:
            return xp.concatenate([x, x], axis)
        case "part":
            return x[(*at, slice(k // 2, n - k // 3))]
        case "every":
            return x[(*at, slice(k, None, b.rng.choice([2, 3])))]
        case "pad" if x.size < 1 << 12:
            widths = [(0, 0)] * len(x.shape)
            widths[axis] = (b.rng.randrange(3), b.rng.randrange(3))
            return xp.pad(x, widths)
        case "take":
            count = b.rng.randint(1, n)
            rows = b.api.iota(I32, (count,), 0) * I32.type(3) % I32.type(n)
            return xp.take(x, rows, axis=axis)
    return None


@step(1)
def iota(b: Body) -> Any:
    shape = b.any().shape
    dimension = b.rng.randrange(len(shape))
    dtype = b.rng.choice([I32, F32])
    return b.small(b.api.iota(dtype, shape, dimension))


@step(2)
def cast(b: Body) -> Any:
    x = b.any()
    layout = b.layout(x.shape)
    return None if layout is None else b.api.cast(x, layout)


def _parts(n: int) -> list[int]:
    return [k for k in (1, 2, 8, 16, 64, n) if n % k == 0]


def _window(b: Body, ref: Ref, sizes: Sequence[int] | None = None) -> tuple:
    """An index of a part; some of its starts are known at run time alone."""
    index = []
    for axis, n in enumerate(ref.shape):
        whole = b.rng.random() < 0.6
        size = n if whole else b.rng.choice(_parts(n))
        size = size if sizes is None else sizes[axis]
        # Parts of a tiled array consist of whole tiles.
        if ref.tiled and axis == len(ref.shape) - 1:
            size = n
        if ref.tiled and axis == len(ref.shape) - 2:
            size = max(size, 8)
        if size == n:
            index.append(slice(None))
        elif b.index is not None and n // size >= 2 and b.rng.random() < 0.7:
            start = (b.index % np.int32(n // size)) * np.int32(size)
            index.append(b.api.part(start, size))
        else:
            odd = not ref.tiled and b.rng.random() < 0.3
            start = b.rng.randrange(n - size + 1 if odd else n // size)
            start = start if odd else start * size
            index.append(slice(start, start + size))
    return tuple(index)


# --- memory ---------------------------------------------------------------------------


@step(3)
def load(b: Body) -> Any:
    ref = b.rng.choice(b.refs)
    index = _window(b, ref)
    drops = len(index) > 1 + ref.tiled and b.rng.random() < 0.2
    if drops:
        n = ref.shape[0]
        first = b.rng.randrange(n) if b.index is None else b.index % np.int32(n)
        index = (first, *index[1:])
    transposed = len(ref.shape) == 2 and not drops and b.rng.random() < 0.2
    layout = None
    if b.rng.random() < 0.3 and not drops:
        sizes = np.empty(ref.shape, BOOL)
        if b.index is None:
            shape = sizes[index].shape
            layout = b.layout(shape[::-1] if transposed else shape)
    return b.api.load(ref.handle, index, layout, transposed)


@step(2)
def store(b: Body) -> None:
    refs = [r for r in b.refs if r.written]
    ref = b.rng.choice(refs)
    x = b.as_type(b.any(), ref.dtype)
    sizes = None
    fits = len(x.shape) == len(ref.shape) and all(map(operator.le, x.shape, ref.shape))
    if fits and not ref.tiled:
        sizes = x.shape
    index = _window(b, ref, sizes)
    if sizes is None:
        index = (slice(None),) * len(ref.shape)
        x = b.as_shape(x, ref.shape)
    b.api.store(ref.handle, index, x)


@step(1)
def store_splat(b: Body) -> None:
    ref = b.rng.choice([r for r in b.refs if r.written])
    index = _window(b, ref)
    shape = b.api.load(ref.handle, index, None, False).shape
    value = b.api.np.full(shape, b.constant(ref.dtype))
    b.api.store(ref.handle, index, value)


@step(1)
def accumulate(b: Body) -> None:
    ref = b.rng.choice([r for r in b.refs if r.written])
    index = _window(b, ref)
    old = b.api.load(ref.handle, index, None, False)
    x = b.as_type(b.as_shape(b.any(), old.shape), ref.dtype)
    if ref.dtype != BOOL and b.rng.random() < 0.3:
        b.api.add_to(ref.handle, index, x)
        old = b.api.load(ref.handle, index, None, False)
        b.api.store(ref.handle, index, b.small(old))
        return
    b.api.store(ref.handle, index, b.small(x ^ old if ref.dtype == BOOL else x + old))


@step(1)
def scalar(b: Body) -> Any:
    """An element, or a reduction over all axes, meets an array."""
    x = b.any(lambda x: x.dtype != BOOL)
    if x is None:
        return None
    if b.rng.random() < 0.5:
        n = b.reduced(x, tuple(range(len(x.shape))), False)
    else:
        n = b.as_type(element(b), x.dtype)
    return (
        b.small(x + n)
        if b.rng.random() < 0.7
        else b.api.np.where(n > 0, x, b.partner(x))
    )


def element(b: Body) -> Any:
    ref = b.rng.choice([r for r in b.refs if not r.tiled])
    index = tuple(b.rng.randrange(n) for n in ref.shape)
    if b.index is not None:
        index = (b.index % np.int32(ref.shape[0]), *index[1:])
    return b.api.load(ref.handle, index, None, False)


# --- control --------------------------------------------------------------------------


def _carry(b: Body) -> list[Any]:
    carry = [b.any() for _ in range(b.rng.randint(1, 2))]
    if b.rng.random() < 0.3:
        x = carry[0]
        carry[0] = b.api.np.broadcast_to(b.constant(x.dtype), x.shape)
    return carry


def _turn(b: Body, index: Any, carry: Sequence[Any], seed: float, steps: int) -> list:
    inner = b.inner(seed, carry, index)
    inner.steps(steps)
    results = []
    for x in carry:
        y = inner.as_type(inner.as_shape(inner.any(), x.shape), x.dtype)
        results.append(y)
    return results


@step(1.0)
def loop(b: Body) -> Any:
    carry, seed, turns = _carry(b), b.rng.random(), b.rng.randint(0, 3)
    count = b.rng.randint(1, 4)
    result = b.api.loop(turns, lambda i, c: _turn(b, i, c, seed, count), carry)
    b.live.extend(result)


@step(0.7)
def repeat(b: Body) -> Any:
    carry, seed, count = _carry(b), b.rng.random(), b.rng.randint(1, 3)
    turns = abs(b.as_type(element(b), I32)) % np.int32(3)
    result = b.api.repeat(turns, lambda i, c: _turn(b, i, c, seed, count), carry)
    b.live.extend(result)


@step(1.0)
def branch(b: Body) -> Any:
    like, condition = _carry(b), b.as_type(element(b), I32) > 0
    seeds, count = (b.rng.random(), b.rng.random()), b.rng.randint(0, 3)
    yes, no = (lambda s=s: _turn(b, b.index, like, s, count) for s in seeds)
    b.live.extend(b.api.branch(condition, yes, no))
