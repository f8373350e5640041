# SPDX-License-Identifier: Apache-2.0
"""load, layout_cast and broadcasted_iota: results and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support.entry_kernels import f32, numbers, run
from tests.support.refusal import refused_by


def test_load_takes_an_index():
    def body(x, o):
        o[...] = plgpu.load(x, plgpu.ds(8, 8))

    np.testing.assert_array_equal(run(body, out=f32(8, 128)), numbers()[8:16])


CALLS = {
    "a load outside": lambda x: plgpu.load(x.at[plgpu.ds(60, 8)]),
    "a layout by its name": lambda x: plgpu.load(x, layout="wgmma"),
    "a cast to no layout": lambda x: plgpu.layout_cast(x[...], None),
    "an iota of dimension 2": lambda x: plgpu.broadcasted_iota("f4", (64, 128), 2),
    "a load under vmap": lambda x: jax.vmap(lambda i: plgpu.load(x.at[i]))(
        lax.iota(jnp.int32, 4)
    ),
}


@pytest.mark.parametrize("call", CALLS)
@refused_by(run)
def test_the_call_is_refused(x, o, *, call):
    CALLS[call](x)


@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_an_iota_counts_along_its_dimension(dimension):
    def body(x, o):
        o[...] = plgpu.broadcasted_iota(jnp.float32, (64, 128), dimension)

    expected = lax.broadcasted_iota(jnp.float32, (64, 128), dimension % 2)
    np.testing.assert_array_equal(run(body), expected)


def test_vmap_of_pure_operations_works_inside_a_body():
    def body(x, o):
        o[...] = jax.vmap(lambda row: row - row.max())(x[...])

    x = numbers()
    np.testing.assert_array_equal(run(body), x - x.max(1, keepdims=True))
