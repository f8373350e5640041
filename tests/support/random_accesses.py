# SPDX-License-Identifier: Apache-2.0
"""Steps of random bodies that access references by elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.support.random_bodies import BOOL, F32, I32, U32, Body, Ref, step


def _mask(b: Body, shape: tuple[int, ...]) -> Any:
    x = b.as_shape(b.any(), shape)
    return x if x.dtype == BOOL else x > 0


def _places(b: Body, n: int, count: int) -> Any:
    """Indices below n that values determine; some are equal."""
    x = b.as_type(b.as_shape(b.any(), (count,)), I32)
    return x % np.int32(n)


def _index(b: Body, ref: Ref, unique: bool) -> tuple[tuple, tuple[int, ...]]:
    """An index with an array, strides and integers, and the shape that it selects."""
    rank = len(ref.shape)
    arrays = b.rng.randrange(rank)
    index: list[Any] = []
    shape: list[int] = []
    for axis, n in enumerate(ref.shape):
        if axis == arrays and b.rng.random() < 0.6:
            if unique:
                odd = b.rng.choice([k for k in (1, 3, 5, 7) if math.gcd(k, n) == 1])
                line = b.api.iota(I32, (n,), 0) * np.int32(odd)
                index.append((line + np.int32(b.rng.randrange(n))) % np.int32(n))
                shape.append(n)
            else:
                count = b.rng.choice([n, 8, 64])
                index.append(_places(b, n, count))
                shape.append(count)
        elif n > 1 and b.rng.random() < 0.5:
            stride = b.rng.choice([2, 3])
            start = b.rng.randrange(min(stride, n))
            index.append(slice(start, None, stride))
            shape.append(len(range(start, n, stride)))
        else:
            index.append(slice(None))
            shape.append(n)
    return tuple(index), tuple(shape)


@step(1)
def masked_load(b: Body) -> Any:
    ref = b.rng.choice(b.refs)
    mask = _mask(b, ref.shape)
    return b.api.masked_load(ref.handle, mask, b.constant(ref.dtype))


@step(1)
def masked_store(b: Body) -> None:
    ref = b.rng.choice([r for r in b.refs if r.written])
    x = b.as_type(b.as_shape(b.any(), ref.shape), ref.dtype)
    b.api.masked_store(ref.handle, _mask(b, ref.shape), x)


@step(1)
def indexed_load(b: Body) -> Any:
    ref = b.rng.choice(b.refs)
    return b.api.load(ref.handle, _index(b, ref, False)[0], None, False)


@step(1)
def indexed_store(b: Body) -> None:
    ref = b.rng.choice([r for r in b.refs if r.written])
    index, shape = _index(b, ref, True)
    x = b.as_type(b.as_shape(b.any(), shape), ref.dtype)
    b.api.store(ref.handle, index, x)


@step(1)
def view(b: Body) -> Any:
    """A reference in another shape, transposed."""
    ref = b.rng.choice(b.refs)
    size = math.prod(ref.shape)
    n = b.rng.choice([k for k in (1, 2, 4, 8) if size % k == 0])
    return b.api.view(ref.handle, (size // n, n))


@step(1)
def atomic(b: Body) -> Any:
    """Sums of integers, which wrap, and maxima: no order changes them."""
    refs = [r for r in b.refs if r.written and r.dtype in (I32, U32, F32)]
    if not refs:
        return None
    ref = b.rng.choice(refs)
    index, shape = _index(b, ref, False)
    x = b.as_type(b.as_shape(b.any(), shape), ref.dtype)
    name = "max" if ref.dtype == F32 else b.rng.choice(["add", "max", "min"])
    mask = _mask(b, shape) if b.rng.random() < 0.5 else None
    b.api.atomic(ref.handle, index, x, name, mask)
    return None
