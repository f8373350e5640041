# SPDX-License-Identifier: Apache-2.0
"""Kernels made by chance at the edges: parts over the edge, sizes of 0 and 1, tilings.

Many are refused; what matters is that emulator and lowering refuse the same ones.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu

SIZES = (1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16, 20, 32, 32, 64, 64, 100, 128, 256)
DTYPES = (jnp.float32, jnp.float16, jnp.float16, jnp.uint8, jnp.int32, jnp.int16)
TILES = (
    None, (8, 64), (8, 32), (8, 16), (8, 128), (16, 64), (1, 32), (8, 1, 64),
    (32,), (64,), (4, 8), (2, 4, 32), (8, 8),
)  # fmt: skip
MAX_ELEMENTS = 1 << 13
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel and its arguments.

    Attributes:
      kind: what it does.
      function: of the arguments; declaring and tracing it may raise.
      arguments: arrays.
      dynamic: whether a start is known at run time only, so that only a run shows that
        it is wrong.
    """

    kind: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    dynamic: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """An index expression: for each axis a start, a size (None squeezes it).

    Attributes:
      scalar: the axis whose start the kernel reads from its last argument, or None.
    """

    starts: Shape
    sizes: tuple[int | None, ...]
    scalar: int | None

    @property
    def shape(self) -> Shape:
        return tuple(size for size in self.sizes if size is not None)

    @property
    def value(self) -> int:
        return 0 if self.scalar is None else self.starts[self.scalar]

    def of(self, ref: Any, scalars: Any) -> Any:
        index = []
        for axis, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            start = scalars[0] if axis == self.scalar else start
            index.append(start if size is None else plgpu.ds(start, size))
        return ref.at[tuple(index)]


def _shape(rng: random.Random, rank: int | None = None) -> Shape:
    rank = rng.choice((1, 2, 2, 2, 3, 3, 4)) if rank is None else rank
    shape = [rng.choice(SIZES) for _ in range(rank)]
    if rng.random() < 0.7:
        shape[-1] = rng.choice((16, 32, 64, 64, 128))
    while math.prod(shape) > MAX_ELEMENTS:
        shape[rng.randrange(rank)] = rng.choice((1, 2, 3, 8))
    if rng.random() < 0.03:
        shape[rng.randrange(rank)] = 0
    return tuple(shape)


def _part(rng: random.Random, shape: Shape, over: bool) -> Part:
    """A part of an array; `over`: TMA admits ranges over its edge."""
    starts, sizes = [], []
    for n in shape:
        size = n if rng.random() < 0.4 else rng.choice(SIZES)
        size = size if over and rng.random() < 0.5 else min(size, n)
        squeezed = size == 1 and n > 0 and rng.random() < 0.4
        low, high = 0, max(n - size, 0)
        if over and not squeezed and rng.random() < 0.5:
            low, high = -size, n
        start = rng.choice((0, rng.randint(low, high), rng.randint(low, high) // 8 * 8))
        starts.append(start)
        sizes.append(None if squeezed else size)
    scalar = rng.randrange(len(shape)) if shape and rng.random() < 0.25 else None
    return Part(tuple(starts), tuple(sizes), scalar)


def _transforms(rng: random.Random, dtype: Any) -> tuple[Any, ...]:
    if rng.random() < 0.5:
        return ()
    tile = rng.choice(TILES)
    swizzle = rng.choice((None, None, 32, 64, 128))
    if tile is not None and swizzle and rng.random() < 0.7:
        tile = (*tile[:-1], swizzle // jnp.dtype(dtype).itemsize)
    return (
        *([] if tile is None else [plgpu.TilingTransform(tile)]),
        *([] if swizzle is None else [plgpu.SwizzleTransform(swizzle)]),
    )


def _array(shape: Shape, dtype: Any) -> jax.Array:
    return jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape).astype(dtype)


def _scalars(*parts: Part) -> jax.Array:
    values = [part.value for part in parts if part.scalar is not None]
    return jnp.asarray([values[0] if values else 0], jnp.int32)


def _one_dynamic(parts: list[Part]) -> list[Part]:
    """At most one part has a dynamic start: they share the scalar."""
    kept, seen = [], False
    for part in parts:
        if seen:
            part = dataclasses.replace(part, scalar=None)
        seen |= part.scalar is not None
        kept.append(part)
    return kept


def _fitting(rng: random.Random, shape: Shape) -> tuple[Shape, Part]:
    """An array and a part of it that has a shape."""
    if rng.random() < 0.5:
        return shape, Part((0,) * len(shape), shape, None)
    lead = rng.choice((2, 3, 4))
    if rng.random() < 0.5 or not shape:
        number = rng.randrange(lead)
        part = Part((number, *(0,) * len(shape)), (None, *shape), None)
        if rng.random() < 0.4:
            part = dataclasses.replace(part, scalar=0)
        return (lead, *shape), part
    start = rng.randrange(lead) * shape[0]
    part = Part((start, *(0,) * (len(shape) - 1)), shape, None)
    if rng.random() < 0.4:
        part = dataclasses.replace(part, scalar=0)
    return (lead * shape[0], *shape[1:]), part


def _kernel(
    body: Any, shape: Shape, dtype: Any, scratch: Callable[[], list[Any]], **options
) -> Any:
    """A function that declares the kernel, which may raise, and calls it."""
    out = jax.ShapeDtypeStruct(shape, dtype)
    return lambda *args: plgpu.kernel(
        body, out_type=out, scratch_types=scratch(), **options
    )(*args)


# --- kinds ----------------------------------------------------------------------------


def copy_in(rng: random.Random) -> Program:
    """A TMA copy of a part of GMEM to a part of SMEM."""
    shape, dtype = _shape(rng), rng.choice(DTYPES)
    source = _part(rng, shape, over=True)
    smem, target = _fitting(rng, source.shape)
    source, target = _one_dynamic([source, target])
    transforms = _transforms(rng, dtype)

    def body(x, n, o, s, barrier):
        plgpu.copy_gmem_to_smem(source.of(x, n), target.of(s, n), barrier)
        plgpu.barrier_wait(barrier)
        o[...] = target.of(s, n)[...]

    def scratch():
        return [plgpu.SMEM(smem, dtype, transforms=transforms), plgpu.Barrier()]

    function = _kernel(body, source.shape, dtype, scratch)
    arguments = _array(shape, dtype), _scalars(source, target)
    return Program("copy_in", function, arguments, _dynamic(source, target))


def copy_out(rng: random.Random) -> Program:
    """A TMA copy of a part of SMEM to a part of GMEM."""
    shape, dtype = _shape(rng), rng.choice(DTYPES)
    target = _part(rng, shape, over=True)
    smem, source = _fitting(rng, target.shape)
    target, source = _one_dynamic([target, source])
    transforms = _transforms(rng, dtype)

    def body(x, n, o, s, zeros):
        zeros[...] = jnp.zeros(shape, dtype)
        s[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(zeros, o)
        plgpu.wait_smem_to_gmem(0)
        plgpu.copy_smem_to_gmem(source.of(s, n), target.of(o, n))
        plgpu.wait_smem_to_gmem(0)

    def scratch():
        source = plgpu.SMEM(smem, dtype, transforms=transforms)
        return [source, plgpu.SMEM(shape, dtype)]

    function = _kernel(body, shape, dtype, scratch)
    arguments = _array(smem, dtype), _scalars(target, source)
    return Program("copy_out", function, arguments, _dynamic(source, target))


def access(rng: random.Random) -> Program:
    """A read of a part, and a store to one, in GMEM and SMEM."""
    shape, dtype = _shape(rng), rng.choice(DTYPES)
    part = _part(rng, shape, over=rng.random() < 0.1)
    target, place = _fitting(rng, part.shape)
    part, place = _one_dynamic([part, place])
    in_smem, transforms = rng.random() < 0.6, _transforms(rng, dtype)

    def body(x, n, o, s):
        o[...] = jnp.zeros(target, dtype)
        source = x
        if in_smem:
            s[...] = x[...]
            source = s
        place.of(o, n)[...] = part.of(source, n)[...]

    def scratch():
        return [plgpu.SMEM(shape, dtype, transforms=transforms if in_smem else ())]

    function = _kernel(body, target, dtype, scratch)
    arguments = _array(shape, dtype), _scalars(part, place)
    return Program("access", function, arguments, _dynamic(part, place))


def multicast(rng: random.Random) -> Program:
    """A copy that the CTAs of a cluster share."""
    shape, dtype = _shape(rng), rng.choice(DTYPES)
    count, transforms = rng.choice((2, 2, 3, 4)), _transforms(rng, dtype)

    def body(x, o, s, barrier, free):
        plgpu.barrier_arrive(free)
        plgpu.barrier_wait(free)
        plgpu.copy_gmem_to_smem(x, s, barrier, collective_axes="c")
        plgpu.barrier_wait(barrier)
        o[lax.axis_index("c")] = s[...]

    def scratch():
        tile = plgpu.SMEM(shape, dtype, transforms=transforms)
        return [tile, plgpu.Barrier(), plgpu.ClusterBarrier(collective_axes=("c",))]

    cluster = {"cluster": (count,), "cluster_names": ("c",)}
    function = _kernel(body, (count, *shape), dtype, scratch, **cluster)
    return Program("multicast", function, (_array(shape, dtype),))


def blocks(rng: random.Random) -> Program:
    """A pallas_call whose blocks may be wider than the array."""
    shape, dtype = _shape(rng, rng.choice((1, 2, 2, 3))), rng.choice(DTYPES)
    block = tuple(n if rng.random() < 0.4 else rng.choice(SIZES) for n in shape)
    grid = tuple(max(1, -(-n // max(b, 1))) for n, b in zip(shape, block, strict=True))
    transforms = _transforms(rng, dtype) if rng.random() < 0.3 else ()

    def body(x, o):
        o[...] = x[...] + jnp.ones((), dtype)

    def function(x):
        spec = plgpu.BlockSpec(block, lambda *i: i, transforms=transforms)
        plain = plgpu.BlockSpec(block, lambda *i: i)
        return plgpu.pallas_call(body, x, grid=grid, in_specs=[spec], out_specs=plain)(
            x
        )

    return Program("blocks", function, (_array(shape, dtype),))


def product(rng: random.Random) -> Program:
    """A wgmma with operands of any type, order and storage."""
    dtype, acc = rng.choice((
        (jnp.float16, jnp.float32), (jnp.float16, jnp.float16),
        (jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32),
        (jnp.int8, jnp.int32), (jnp.uint8, jnp.int32),
        (jnp.float8_e4m3fn, jnp.float32), (jnp.float8_e5m2, jnp.float16),
    ))  # fmt: skip
    m = rng.choice((64, 64, 64, 128, 32))
    n = rng.choice((8, 16, 24, 32, 64, 128, 256, 260))
    k = rng.choice((16, 32, 32, 48, 64, 128, 8))
    turned = rng.random() < 0.3, rng.random() < 0.5
    shapes = (k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n)
    storage = []
    for _ in shapes:
        swizzle = rng.choice((None, 32, 64, 128))
        tile = (8, (swizzle or 0) // jnp.dtype(dtype).itemsize)
        storage.append(
            (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle))
            if swizzle
            else ()
        )

    def body(a, b, o, sa, sb, barrier, total):
        plgpu.copy_gmem_to_smem(a, sa, barrier)
        plgpu.copy_gmem_to_smem(b, sb, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.wgmma(total, sa.T if turned[0] else sa, sb.T if turned[1] else sb)
        o[...] = total[...]

    def scratch():
        operands = (
            plgpu.SMEM(shape, dtype, transforms=transforms)
            for shape, transforms in zip(shapes, storage, strict=True)
        )
        return [*operands, plgpu.Barrier(num_arrivals=2), plgpu.ACC((m, n), acc)]

    function = _kernel(body, (m, n), acc, scratch)
    return Program("product", function, tuple(jnp.ones(s, dtype) for s in shapes))


def _dynamic(*parts: Part) -> bool:
    return any(part.scalar is not None for part in parts)


KINDS = (copy_in, copy_in, copy_out, access, access, multicast, blocks, product)


def make(seed: int) -> Program:
    """Returns the program of a seed."""
    rng = random.Random(seed)
    return rng.choice(KINDS)(rng)
