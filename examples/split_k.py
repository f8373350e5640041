# SPDX-License-Identifier: Apache-2.0
"""A matrix product whose K is divided among CTAs, which add in a fixed order"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from examples import Case, normal

TILE = 64


def split_k(a: jax.Array, b: jax.Array, splits: int) -> jax.Array:
    """Returns a @ b in float32: a is (m, k), b is (k, n), multiples of the tiles.

    The CTAs of a tile take turns: each waits until those before it have added their
    products, so that the sum is the same in every run. Later CTAs wait for earlier
    ones only: they need not be resident at once.
    """
    (m, k), n = a.shape, b.shape[1]
    part = k // splits

    def body(a_ref, b_ref, o_ref):
        i, j, split = (lax.axis_index(name) for name in ("i", "j", "split"))
        turns = plgpu.get_global(plgpu.SemaphoreType.REGULAR((m // TILE, n // TILE)))
        turn = turns.at[i, j]
        rows, columns = plgpu.ds(i * TILE, TILE), plgpu.ds(j * TILE, TILE)
        inner = plgpu.ds(split * part, part)
        product = jnp.dot(
            a_ref[rows, inner],
            b_ref[inner, columns],
            preferred_element_type=jnp.float32,
        )
        # The wait leaves zero, so that it is zero when the last one has added.
        plgpu.semaphore_wait(turn, split, memory_scope="gpu")

        @plgpu.when(split == 0)
        def _():
            o_ref[rows, columns] = product

        @plgpu.when(split > 0)
        def _():
            o_ref[rows, columns] += product

        @plgpu.when(split < splits - 1)
        def _():
            plgpu.semaphore_signal(turn, split + 1, memory_scope="gpu")

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(m // TILE, n // TILE, splits),
        grid_names=("i", "j", "split"),
    )(a, b)


def _reference(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


_A = normal(0, 128, 512, dtype=jnp.float16)
_B = normal(1, 512, 64, dtype=jnp.float16)
CASES = [Case(lambda a, b: split_k(a, b, 4), _reference, (_A, _B), 1e-3)]
