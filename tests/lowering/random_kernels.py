# SPDX-License-Identifier: Apache-2.0
"""Kernels made by chance: a seed gives a body, which JAX traces and NumPy runs.

All values stay small whole numbers, so that every order of sums gives the same bits.
What a body does depends on the seed and on shapes and dtypes alone: JAX traces a loop's
body any number of times, NumPy runs it for each turn.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.mosaic.registers import place

Layout = plgpu.Layout
F32, F16, BF16 = (
    np.dtype(np.float32),
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
)
I32, U8, I8, BOOL = (np.dtype(n) for n in ("int32", "uint8", "int8", "bool"))
I16, U32 = np.dtype(np.int16), np.dtype(np.uint32)
INTEGERS = I32, U8, I8, I16, U32
DTYPES = (F32, F32, F32, F16, F16, BF16, I32, I32, U8, I8, I16, U32, BOOL)
# Whole numbers up to here survive a sum of 256 in float16, and of 32 in bfloat16.
LIMIT = 8
SHAPES = [
    (64, 64), (64, 64), (64, 128), (128, 64), (32, 64), (128, 128), (128,), (256,),
    (64, 8), (8, 64), (16, 16), (2, 64, 32), (4, 16, 64), (3, 64, 8), (10, 6), (100,),
    (2, 2, 8, 32), (128, 32), (192, 24), (1, 64), (64, 1),
]  # fmt: skip
LAYOUTS = (
    Layout.WGMMA, Layout.WGMMA_TRANSPOSED, Layout.WGMMA_8BIT, Layout.WGMMA_UPCAST_2X,
    Layout.WGMMA_UPCAST_4X, Layout.WGMMA_ACC_32BIT, Layout.TCGEN05, Layout.WGMMA_ROW,
    Layout.WGMMA_COL, Layout.TCGEN05_TRANSPOSED, Layout.TCGEN05_TMEM_NATIVE,
    Layout.TCGEN05_ROW, Layout.TCGEN05_COL, Layout.TMA_INDICES,
)  # fmt: skip


def is_float(dtype: Any) -> bool:
    return np.dtype(dtype) in (F32, F16, BF16)


# --- the two ways to run a body -------------------------------------------------------


class Traced:
    """Operations as JAX traces them."""

    np = jnp

    def load(self, ref, index, layout, transposed):
        if transposed:
            return plgpu.load(ref.at[index].T, layout=layout, optimized=False)
        if layout is None and index is ...:
            return ref[index]
        return plgpu.load(ref.at[index], layout=layout, optimized=False)

    def store(self, ref, index, value):
        ref[index] = value

    def cast(self, x, layout):
        return plgpu.layout_cast(x, layout)

    def iota(self, dtype, shape, dimension):
        return lax.broadcasted_iota(dtype, shape, dimension)

    def part(self, start, size):
        return plgpu.ds(start, size)

    def loop(self, turns, body, carry):
        return lax.fori_loop(0, turns, body, carry)

    def repeat(self, turns, body, carry):
        def condition(state):
            return state[0] < turns

        def step(state):
            return state[0] + 1, body(state[0], state[1])

        return lax.while_loop(condition, step, (jnp.int32(0), carry))[1]

    def branch(self, condition, yes, no):
        return lax.cond(condition, yes, no)


class Plain:
    """The same in NumPy."""

    np = np

    def load(self, ref, index, layout, transposed):
        value = ref[index]
        return np.array(value.T if transposed else value)

    def store(self, ref, index, value):
        ref[index] = value

    def cast(self, x, layout):
        return x

    def iota(self, dtype, shape, dimension):
        line = np.arange(shape[dimension])
        rest = (1,) * (len(shape) - dimension - 1)
        return np.broadcast_to(line.reshape(-1, *rest), shape).astype(dtype)

    def part(self, start, size):
        return slice(start, start + size)

    def loop(self, turns, body, carry):
        for i in range(turns):
            carry = body(np.int32(i), carry)
        return carry

    repeat = loop

    def branch(self, condition, yes, no):
        return yes() if condition else no()


# --- bodies ---------------------------------------------------------------------------


class Body:
    """Steps of a body, or of a part of one.

    Attributes:
      api: how the steps are done.
      live: values so far.
      refs: references.
      depth: of loops and branches around.
      index: of the innermost loop, None outside of loops.
    """

    def __init__(self, seed: float, api: Any, live: list, refs: list):
        self.rng = random.Random(seed)
        self.api = api
        self.live = list(live)
        self.refs = refs
        self.depth = 0
        self.index: Any = None

    def inner(self, seed: float, carry: Sequence[Any], index: Any = None) -> Body:
        body = Body(seed, self.api, [*self.live, *carry], self.refs)
        body.depth = self.depth + 1
        body.index = index
        return body

    def steps(self, count: int) -> None:
        kinds = list(_STEPS)
        weights = [
            _STEPS[k][0] if self.depth < 2 or k not in _NESTED else 0 for k in kinds
        ]
        for _ in range(count):
            (kind,) = self.rng.choices(kinds, weights)
            result = _STEPS[kind][1](self)
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


_STEPS: dict[str, tuple[float, Callable[[Body], Any]]] = {}
_NESTED = ("loop", "branch", "repeat")


def step(weight: float) -> Callable:
    def enter(function: Callable[[Body], Any]) -> Callable[[Body], Any]:
        _STEPS[function.__name__] = weight, function
        return function

    return enter


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
    return b.as_type(b.any(), b.rng.choice(DTYPES))


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


@dataclasses.dataclass
class Ref:
    """A reference, or the array that stands for it."""

    handle: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    written: bool = False
    tiled: bool = False


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
        n = b.as_type(_element(b), x.dtype)
    return (
        b.small(x + n)
        if b.rng.random() < 0.7
        else b.api.np.where(n > 0, x, b.partner(x))
    )


def _element(b: Body) -> Any:
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
    turns = abs(b.as_type(_element(b), I32)) % np.int32(3)
    result = b.api.repeat(turns, lambda i, c: _turn(b, i, c, seed, count), carry)
    b.live.extend(result)


@step(1.0)
def branch(b: Body) -> Any:
    like, condition = _carry(b), b.as_type(_element(b), I32) > 0
    seeds, count = (b.rng.random(), b.rng.random()), b.rng.randint(0, 3)
    yes, no = (lambda s=s: _turn(b, b.index, like, s, count) for s in seeds)
    b.live.extend(b.api.branch(condition, yes, no))


# --- kernels --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A random kernel.

    Attributes:
      seed, steps: what the body is made from.
      inputs, outputs: shapes and dtypes.
      scratch: an SMEM array.
      room: bytes for relayouts and reductions, None for as many as they need.
    """

    seed: int
    steps: int
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    scratch: plgpu.SMEM
    room: int | None = None

    def body(self, api: Any, handles: Sequence[Any]) -> None:
        types = [*self.inputs, *self.outputs, self.scratch]
        refs = [
            Ref(
                h,
                tuple(t.shape),
                np.dtype(t.dtype),
                i >= len(self.inputs),
                bool(getattr(t, "transforms", ())),
            )
            for i, (h, t) in enumerate(zip(handles, types, strict=True))
        ]
        b = Body(self.seed, api, [], refs)
        inputs = refs[: len(self.inputs)]
        b.live = [api.load(r.handle, ..., None, False) for r in inputs]
        for ref in refs[len(self.inputs) :]:
            x = b.as_type(b.as_shape(b.any(), ref.shape), ref.dtype)
            api.store(ref.handle, ..., x)
        b.steps(self.steps)
        for ref in refs[len(self.inputs) : -1]:
            if b.rng.random() < 0.7:
                x = b.as_type(b.as_shape(b.any(), ref.shape), ref.dtype)
                api.store(ref.handle, ..., x)

    def arguments(self) -> list[np.ndarray]:
        rng = np.random.default_rng(self.seed)
        return [_numbers(rng, t.shape, np.dtype(t.dtype)) for t in self.inputs]

    def expected(self) -> list[np.ndarray]:
        """What the kernel gives, by NumPy."""
        outputs = [np.zeros(t.shape, t.dtype) for t in self.outputs]
        scratch = np.zeros(self.scratch.shape, self.scratch.dtype)
        with np.errstate(all="ignore"):
            self.body(Plain(), [*self.arguments(), *outputs, scratch])
        return outputs

    def function(self, interpret: Any = None) -> Callable:
        return plgpu.kernel(
            lambda *refs: self.body(Traced(), refs),
            out_type=self.outputs,
            scratch_types=[self.scratch],
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=self.room),
            name=f"random_{self.seed}",
        )


def _numbers(rng: np.random.Generator, shape, dtype: np.dtype) -> np.ndarray:
    low, high = (0, 2) if dtype == BOOL else (0, 5) if dtype in (U8, U32) else (-3, 4)
    return rng.integers(low, high, shape).astype(dtype)


def make(seed: int, steps: int | None = None) -> Kernel:
    """Returns the kernel of a seed."""
    rng = random.Random(seed)
    shapes = rng.sample(SHAPES, 2)

    def array() -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(rng.choice(shapes), rng.choice(DTYPES))

    inputs = (array(), array())
    outputs = (array(), array())
    smem = array()
    steps = rng.randint(3, 10) if steps is None else steps
    room = rng.choice([None, None, 4096, 16384])
    scratch = plgpu.SMEM(smem.shape, smem.dtype, transforms=_transforms(rng, smem))
    return Kernel(seed, steps, inputs, outputs, scratch, room)


def _transforms(rng: random.Random, smem: Any) -> tuple:
    swizzle = rng.choice([128, 64, 32])
    columns = swizzle // np.dtype(smem.dtype).itemsize
    fits = len(smem.shape) > 1 and not (smem.shape[-1] % columns or smem.shape[-2] % 8)
    if not fits or rng.random() < 0.7:
        return ()
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)
