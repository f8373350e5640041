# SPDX-License-Identifier: Apache-2.0
"""Tilings and swizzles as part of an SMEM array's type."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_gpu as plgpu
from pallas_gpu import types
from tests.support.refusal import refused

F16, F32 = jnp.float16, jnp.float32


def tiled(*tiling: int, swizzle: int | None = None) -> tuple:
    steps = [plgpu.TilingTransform(tiling)]
    return (*steps, plgpu.SwizzleTransform(swizzle)) if swizzle else tuple(steps)


# --- find_swizzle ---------------------------------------------------------------------


@given(st.integers(1, 4096))
def test_find_swizzle_takes_the_widest_that_divides(chunks):
    found = plgpu.find_swizzle(chunks * 128)
    fitting = [s for s in (16, 32, 64, 128) if chunks * 128 % (s * 8) == 0]
    assert found == max(fitting)


# --- declarations ---------------------------------------------------------------------


def smem(*shape, dtype=F16, space=plgpu.SMEM, **options):
    return lambda: space(shape, dtype, **options)  # HERE


EIGHT = tiled(8, 64)
MISTAKES = {
    "a width of 8 bits": lambda: plgpu.find_swizzle(8, "lhs"),  # HERE
    "a width of 64 bits": lambda: plgpu.find_swizzle(64, "lhs"),  # HERE
    "a width of 129 bits": lambda: plgpu.find_swizzle(129, "lhs"),  # HERE
    "a tiling without sizes": lambda: plgpu.TilingTransform(()),  # HERE
    "a tiling of size 0": lambda: plgpu.TilingTransform((0, 64)),  # HERE
    "a tiling of size -8": lambda: plgpu.TilingTransform((-8, 64)),  # HERE
    "a swizzle of 0": lambda: plgpu.SwizzleTransform(0),  # HERE
    "a swizzle of 8": lambda: plgpu.SwizzleTransform(8),  # HERE
    "a swizzle of 48": lambda: plgpu.SwizzleTransform(48),  # HERE
    "a swizzle of 256": lambda: plgpu.SwizzleTransform(256),  # HERE
    "a tiling that does not divide": smem(60, 128, transforms=EIGHT),
    "a tiling of more dimensions": smem(128, transforms=EIGHT),
    "a tile wider than the swizzle": smem(
        64, 128, dtype=F32, transforms=tiled(8, 64, swizzle=128)
    ),
    "two tilings": smem(64, 128, transforms=EIGHT * 2),
    "an unknown transform": smem(64, 128, transforms=["tile"]),
    "an array of size 0": smem(0, 4),
    "an array of size -1": smem(-1),
    "an array of size 1.5": smem(1.5),
    "an array of size n": smem("n"),
    "a tiling in GMEM": smem(64, 128, space=plgpu.GMEM, transforms=EIGHT),
    "a tiling in TMEM": smem(64, 128, space=plgpu.TMEM, transforms=EIGHT),
    "a tiling in registers": smem(64, 128, space=plgpu.REGS, transforms=EIGHT),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@refused
def test_a_declaration_that_does_not_fit_is_refused(mistake):
    mistake()


# --- storage --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(F32, 32), (jnp.bfloat16, 16), (jnp.int8, 8), (jnp.bool_, 8), (jnp.int4, 4)],
)
def test_itemsize_bits(dtype, bits):
    assert types.itemsize_bits(dtype) == bits


@given(st.sampled_from([16, 32, 64, 128]), st.integers(1, 3), st.integers(1, 3))
def test_every_fitting_swizzle_is_a_placement_of_all_bytes(swizzle, m, n):
    minor = swizzle // 2
    layout = types.smem_layout(
        (8 * m, minor * n), F16, tiled(8, minor, swizzle=swizzle)
    )
    rows, columns = np.indices((8 * m, minor * n)).reshape(2, -1)
    offsets = layout.byte_offsets(np.stack([rows, columns], axis=-1))
    assert sorted(offsets) == list(range(0, layout.size_bytes, 2))
