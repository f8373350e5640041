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


@refused_by(run)
def test_a_load_stays_inside(x, o):
    o[0:8] = plgpu.load(x.at[plgpu.ds(60, 8)])  # HERE


@refused_by(run)
def test_a_layout_is_a_layout(x, o):
    plgpu.load(x, layout="wgmma")  # HERE


@refused_by(run)
def test_a_layout_cast_names_a_layout(x, o):
    plgpu.layout_cast(x[...], None)  # HERE


@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_an_iota_counts_along_its_dimension(dimension):
    def body(x, o):
        o[...] = plgpu.broadcasted_iota(jnp.float32, (64, 128), dimension)

    expected = lax.broadcasted_iota(jnp.float32, (64, 128), dimension % 2)
    np.testing.assert_array_equal(run(body), expected)


@refused_by(run)
def test_an_iota_has_its_dimension(x, o):
    plgpu.broadcasted_iota(jnp.float32, (64, 128), 2)  # HERE


@refused_by(run)
def test_vmap_inside_a_body_does_not_reach_a_load(x, o):
    def load(i):
        return plgpu.load(x.at[i])  # HERE

    jax.vmap(load)(lax.iota(jnp.int32, 4))


def test_vmap_of_pure_operations_works_inside_a_body():
    def body(x, o):
        o[...] = jax.vmap(lambda row: row - row.max())(x[...])

    x = numbers()
    np.testing.assert_array_equal(run(body), x - x.max(1, keepdims=True))
