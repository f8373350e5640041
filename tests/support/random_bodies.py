# SPDX-License-Identifier: Apache-2.0
"""Bodies made by chance: the values so far, and how values are made to fit.

All values stay small whole numbers, so that every order of sums gives the same bits.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.registers.placement import place

Layout = plgpu.Layout
F32, F16, BF16 = (
    np.dtype(np.float32),
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
)
I32, U8, I8, BOOL = (np.dtype(n) for n in ("int32", "uint8", "int8", "bool"))
I16, U32 = np.dtype(np.int16), np.dtype(np.uint32)
F64, I64 = np.dtype(np.float64), np.dtype(np.int64)
INTEGERS = I32, U8, I8, I16, U32, I64
DTYPES = (F32, F32, F32, F16, F16, BF16, I32, I32, U8, I8, I16, U32, BOOL)
# With `jax.enable_x64`.
WIDE_DTYPES = (*DTYPES, F64, F64, F64, I64, I64, I64)
# Whole numbers up to here survive a sum of 256 in float16, and of 32 in bfloat16.
LIMIT = 8
LAYOUTS = (
    Layout.WGMMA, Layout.WGMMA_TRANSPOSED, Layout.WGMMA_8BIT, Layout.WGMMA_UPCAST_2X,
    Layout.WGMMA_UPCAST_4X, Layout.WGMMA_ACC_32BIT, Layout.TCGEN05, Layout.WGMMA_ROW,
    Layout.WGMMA_COL, Layout.TCGEN05_TRANSPOSED, Layout.TCGEN05_TMEM_NATIVE,
    Layout.TCGEN05_ROW, Layout.TCGEN05_COL, Layout.TMA_INDICES,
)  # fmt: skip


def is_float(dtype: Any) -> bool:
    return np.dtype(dtype) in (F32, F16, BF16, F64)


@dataclasses.dataclass
class Ref:
    """A reference, or the array that stands for it."""

    handle: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    written: bool = False
    tiled: bool = False


class Body:
    """Steps of a body, or of a part of one.

    Attributes:
      api: how the steps are done.
      live: values so far.
      refs: references.
      depth: of loops and branches around.
      index: of the innermost loop, None outside of loops.
      dtypes: those that values may have.
    """

    def __init__(self, seed: float, api: Any, live: list, refs: list):
        self.rng = random.Random(seed)
        self.api = api
        self.live = list(live)
        self.refs = refs
        self.depth = 0
        self.index: Any = None
        self.dtypes: Sequence[np.dtype] = DTYPES

    def inner(self, seed: float, carry: Sequence[Any], index: Any = None) -> Body:
        body = Body(seed, self.api, [*self.live, *carry], self.refs)
        body.depth = self.depth + 1
        body.index = index
        body.dtypes = self.dtypes
        return body

    def steps(self, count: int) -> None:
        kinds = list(STEPS)
        weights = [
            STEPS[k][0] if self.depth < 2 or k not in NESTED else 0 for k in kinds
        ]
        for _ in range(count):
            (kind,) = self.rng.choices(kinds, weights)
            result = STEPS[kind][1](self)
            if result is not None:
                self.live.append(result)

    # --- choices ----------------------------------------------------------------------

    def any(self, wanted: Callable[[Any], bool] = lambda x: True) -> Any:
        found = [x for x in self.live if wanted(x)]
        if not found:
            return None
        recent = found[-4:] if self.rng.random() < 0.7 else found
        return self.rng.choice(recent)

    def layout(self, shape: tuple[int, ...], linear: bool = False) -> Any:
        found = []
        for layout in LAYOUTS:
            try:
                found.append((layout, place(layout, shape)))
            except plgpu.errors.PallasGpuError:
                continue
        for vector in (1, 2, 4):
            if math.prod(shape) % (128 * vector) == 0:
                strided = Layout.WG_STRIDED(shape, vector)
                found.append((strided, place(strided, shape)))
        found = [x for x, p in found if not linear or isinstance(p, LinearLayout)]
        return self.rng.choice(found) if found else None

    # --- conversions ------------------------------------------------------------------

    def small(self, x: Any, dtype: Any = None) -> Any:
        """Keeps floats small, and of their dtype; integers wrap, exactly."""
        dtype = np.dtype(x.dtype if dtype is None else dtype)
        if is_float(dtype):
            low, high = (np.asarray(v, dtype) for v in (-LIMIT, LIMIT))
            return self.api.np.clip(x, low, high).astype(dtype)
        return x

    def as_type(self, x: Any, dtype: np.dtype) -> Any:
        if x.dtype == dtype:
            return x
        if is_float(dtype) and x.dtype in INTEGERS:
            low = 0 if x.dtype in (U8, U32) else -LIMIT
            x = self.api.np.clip(x, x.dtype.type(low), x.dtype.type(LIMIT))
        if is_float(x.dtype) and dtype in (U8, U32):
            x = abs(x)
        return self.small(x.astype(dtype))

    def as_shape(self, x: Any, shape: tuple[int, ...]) -> Any:
        xp, rng = self.api.np, self.rng
        if x.shape == shape:
            return x
        if x.shape == shape[::-1] and rng.random() < 0.7:
            return x.T
        if x.size == math.prod(shape) and rng.random() < 0.7:
            return x.reshape(shape)
        if len(x.shape) == len(shape) and all(
            a % b == 0 for a, b in zip(x.shape, shape, strict=True)
        ):
            starts = [
                rng.randrange(a // b) * b for a, b in zip(x.shape, shape, strict=True)
            ]
            parts = zip(starts, shape, strict=True)
            return x[tuple(slice(s, s + n) for s, n in parts)]
        for axis, n in enumerate(shape):
            if x.shape == (n,):
                rest = [1] * len(shape)
                rest[axis] = n
                return xp.broadcast_to(x.reshape(rest), shape)
            if n in x.shape and len(x.shape) > 1:
                kept = x.shape.index(n)
                axes = tuple(a for a in range(len(x.shape)) if a != kept)
                return self.as_shape(self.reduced(x, axes, False), shape)
        return xp.broadcast_to(
            self.reduced(x, tuple(range(len(x.shape))), False), shape
        )

    def reduced(self, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
        if not axes:
            return x
        xp, dtype = self.api.np, x.dtype
        count = math.prod(x.shape[a] for a in axes)
        if dtype == BOOL:
            function = self.rng.choice([xp.any, xp.all])
            return function(x, axis=axes, keepdims=keepdims)
        exact = {F16: 256, BF16: 32}.get(np.dtype(dtype), 1 << 20)
        functions = [xp.max, xp.min] + [xp.sum] * (2 * (count <= exact))
        function = self.rng.choice(functions)
        if function is xp.sum:
            total = xp.sum(x, axis=axes, keepdims=keepdims, dtype=dtype)
            return self.small(total)
        return function(x, axis=axes, keepdims=keepdims)

    def partner(self, x: Any, dtype: Any = None) -> Any:
        """Another value of the shape of x."""
        dtype = x.dtype if dtype is None else dtype
        if self.rng.random() < 0.1:
            return self.constant(dtype)
        other = self.any(lambda y: y.shape == x.shape and y.dtype == dtype)
        if other is None or self.rng.random() < 0.3:
            other = self.any()
        return self.as_type(self.as_shape(other, x.shape), dtype)

    def constant(self, dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        low = 0 if dtype in (U8, U32, BOOL) else -3
        return self.api.np.asarray(
            self.rng.randint(low, 1 if dtype == BOOL else 3), dtype
        )


STEPS: dict[str, tuple[float, Callable[[Body], Any]]] = {}
NESTED = ("loop", "branch", "repeat")


def step(weight: float) -> Callable:
    def enter(function: Callable[[Body], Any]) -> Callable[[Body], Any]:
        STEPS[function.__name__] = weight, function
        return function

    return enter
