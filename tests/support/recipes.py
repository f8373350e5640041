# SPDX-License-Identifier: Apache-2.0
"""Kernels made of the code in the hints, each with arguments and expected results.

Under the name `RECIPES`. A hint's code stands in one of them word for word, so that
what it recommends is known to work.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.semantics import BOTH, Warpgroup

F32, I32 = jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A body with data.

    Attributes:
      body: over the references of arguments and results.
      args: the arguments.
      expected: the results.
      scratch: declarations of scratch.
      semantics: those under which it lowers without layouts.
    """

    body: Callable[..., None]
    args: tuple[Any, ...]
    expected: tuple[Any, ...]
    scratch: Sequence[Any] = ()
    semantics: Sequence[Any] = BOTH

    def make(self, interpret: Any) -> Callable[..., Any]:
        """Returns the kernel as a function over arrays."""
        make = everywhere.kernel(self.body, list(self.expected), *self.scratch)
        return make(interpret)

    @property
    def code(self) -> str:
        """The source of the body."""
        return inspect.getsource(self.body)


def _numbers(shape: Sequence[int], seed: int = 0, low: float = -1.0) -> Any:
    return np.random.default_rng(seed).uniform(low, 1.0, shape).astype(np.float32)


X = _numbers((64, 128))
INDEX = np.random.default_rng(1).permutation(64).astype(np.int32)
RECIPES: dict[str, Recipe] = {}


def _recipe(args: Sequence[Any], expected: Sequence[Any], *options: Any, **named: Any):
    def enter(body: Callable[..., None]) -> Callable[..., None]:
        wanted = tuple(np.asarray(e) for e in expected)
        RECIPES[body.__name__] = Recipe(body, tuple(args), wanted, *options, **named)
        return body

    return enter


@_recipe([X], [X[0:32]])
def parts_of_a_constant_size(x_ref, o_ref):
    n = x_ref[0, 0].astype(I32) + 4

    @plgpu.loop(0, n)
    def _(i):
        o_ref[plgpu.ds(8 * i, 8)] = x_ref[plgpu.ds(8 * i, 8)]


@_recipe([X], [np.maximum(X[0:32], X[1:33])])
def windows(x_ref, o_ref):
    o_ref[...] = jnp.maximum(x_ref[0:32], x_ref[1:33])


W = _numbers((4,), 2)


@_recipe([X, W], [sum(W[k] * X[k : k + 32] for k in range(4))])
def a_convolution(x_ref, w_ref, o_ref):
    @plgpu.loop(0, 4, init_carry=jnp.zeros((32, 128), F32))
    def y(k, y):
        y += w_ref[k] * x_ref[plgpu.ds(k, 32)]
        return y

    o_ref[...] = y


A, B = _numbers((64, 64), 3).astype(np.float16), _numbers((64, 64), 4).astype("f2")
_TILE = plgpu.SMEM(
    (64, 64),
    jnp.float16,
    transforms=[plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)],
)


@_recipe(
    [A, B],
    [A.astype(np.float32) @ B.astype(np.float32)],
    [_TILE, _TILE, plgpu.Barrier(num_arrivals=2), plgpu.ACC((64, 64))],
)
def a_product(a_ref, b_ref, o_ref, a_smem, b_smem, loaded, acc_ref):
    plgpu.copy_gmem_to_smem(a_ref, a_smem, loaded)
    plgpu.copy_gmem_to_smem(b_ref, b_smem, loaded)
    plgpu.barrier_wait(loaded)
    plgpu.wgmma(acc_ref, a_smem, b_smem)
    o_ref[...] = acc_ref[...]


V = _numbers((128,), 5)


@_recipe([X, V], [X @ V, X + X], semantics=[Warpgroup])
def a_product_with_a_vector(x_ref, v_ref, o_ref, sum_ref):
    a, v = x_ref[...], v_ref[...]
    o_ref[...] = jnp.sum(a * v[None, :], axis=1)
    b = a
    sum_ref[...] = a + b


Q = _numbers((64, 64), 8)


@_recipe([X], [-np.sort(-X, axis=1)[:, :4]])
def the_largest(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = jax.lax.top_k(x, 4)[0]


@_recipe([X], [X + 1, X])
def a_printed_value(x_ref, o_ref, debug_ref):
    x = x_ref[...]
    debug_ref[...] = x
    o_ref[...] = x + 1
