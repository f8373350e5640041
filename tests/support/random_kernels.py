# SPDX-License-Identifier: Apache-2.0
"""Kernels made by chance: a seed gives a body, which JAX traces and NumPy runs.

What a body does depends on the seed and on shapes and dtypes alone: JAX traces a loop's
body any number of times, NumPy runs it for each turn.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support import (  # noqa: F401 - enter steps
    random_accesses,
    random_functions,
    random_operations,
    random_steps,
)
from tests.support.random_bodies import BOOL, DTYPES, U8, U32, WIDE_DTYPES, Body, Ref

SHAPES = [
    (64, 64), (64, 64), (64, 128), (128, 64), (32, 64), (128, 128), (128,), (256,),
    (64, 8), (8, 64), (16, 16), (2, 64, 32), (4, 16, 64), (3, 64, 8), (10, 6), (100,),
    (2, 2, 8, 32), (128, 32), (192, 24), (1, 64), (64, 1),
    (129,), (1001,), (65, 3), (50, 77), (5, 7, 11), (2, 129), (1, 300), (33, 40),
]  # fmt: skip


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

    def add_to(self, ref, index, value):
        jax.ref.addupdate(ref, index, value)

    def masked_load(self, ref, mask, other):
        return plgpu.load(ref, mask=mask, other=other)

    def masked_store(self, ref, mask, value):
        plgpu.store(ref, (), value, mask=mask)

    def view(self, ref, shape):
        return ref.reshape(shape).T[...]

    def atomic(self, ref, index, value, name, mask):
        getattr(plgpu, f"atomic_{name}")(ref.at[index], value, mask=mask)

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

    def add_to(self, ref, index, value):
        ref[index] += value

    def masked_load(self, ref, mask, other):
        return np.where(mask, ref, other)

    def masked_store(self, ref, mask, value):
        ref[...] = np.where(mask, value, ref)

    def view(self, ref, shape):
        return np.array(ref.reshape(shape).T)

    def atomic(self, ref, index, value, name, mask):
        function = {"add": np.add, "max": np.maximum, "min": np.minimum}[name]
        places = np.arange(ref.size).reshape(ref.shape)[index]
        chosen = np.broadcast_to(True if mask is None else mask, places.shape)
        function.at(ref.reshape(-1), places[chosen], np.asarray(value)[chosen])

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


# --- kernels --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A random kernel.

    Attributes:
      seed, steps: what the body is made from.
      inputs, outputs: shapes and dtypes.
      scratch: an SMEM array.
      room: bytes for relayouts and reductions, None for as many as they need.
      wide: whether values have types of 64 bits too, which `jax.enable_x64` permits.
    """

    seed: int
    steps: int
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    scratch: plgpu.SMEM
    room: int | None = None
    wide: bool = False

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
        b.dtypes = WIDE_DTYPES if self.wide else DTYPES
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
    wide = seed % 4 == 3
    dtypes = WIDE_DTYPES if wide else DTYPES
    shapes = rng.sample(SHAPES, 2)

    def array() -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(rng.choice(shapes), rng.choice(dtypes))

    inputs = (array(), array())
    outputs = (array(), array())
    smem = array()
    steps = rng.randint(3, 10) if steps is None else steps
    room = rng.choice([None, None, 4096, 16384])
    scratch = plgpu.SMEM(smem.shape, smem.dtype, transforms=_transforms(rng, smem))
    return Kernel(seed, steps, inputs, outputs, scratch, room, wide)


def _transforms(rng: random.Random, smem: Any) -> tuple:
    swizzle = rng.choice([128, 64, 32])
    columns = swizzle // np.dtype(smem.dtype).itemsize
    fits = len(smem.shape) > 1 and not (smem.shape[-1] % columns or smem.shape[-2] % 8)
    if not fits or rng.random() < 0.7:
        return ()
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)
