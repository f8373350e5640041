# SPDX-License-Identifier: Apache-2.0
"""The matrix product for Blackwell: pairs of CTAs, choice of the kernel, refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu.ops import BlackwellMatmulConfig, MatmulConfig, matmul
from pallas_gpu.program.bodies import equations
from tests.support import matmuls
from tests.support.matmuls import operands
from tests.support.semantics import BOTH, Warpgroup

SMALL = BlackwellMatmulConfig(tile_n=64, tile_k=64, stages=2, blocks=2, strip=2)
BLACKWELL = plgpu.CompilerParams(target="sm_100a")


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def check(shape, c, dtype=jnp.float16, out_dtype=None, executed=(Warpgroup,)):
    matmuls.check(shape, c, dtype, out_dtype, executed=executed, on_gpu=False)


@pytest.mark.smoke
def test_one_tile():
    check((128, 64, 64), SMALL, executed=BOTH)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((300, 160, 192), {"blocks": 4}),
        ((300, 130, 320), {"blocks": 2, "stages": 3}),
        ((512, 128, 64), {"blocks": 16, "minor": "n"}),
        ((256, 300, 128), {"tile_n": 256, "stages": 3}),
        ((256, 64, 48), {"tile_n": 32, "tile_k": 16, "stages": 1}),
        # Blocks take the next tile when they are free.
        ((300, 130, 128), {"dynamic": True}),
    ],
)
def test_pairs_of_blocks_share_tiles(shape, changes):
    executed = BOTH if "dynamic" in changes else [Warpgroup]
    check(shape, config(collective=True, **changes), executed=executed)


def test_blocks_take_the_next_tile_when_they_are_free():
    check((300, 130, 128), config(dynamic=True))


def test_pairs_store_float32():
    check((512, 128, 64), config(collective=True), jnp.bfloat16, "float32")


def kernel_target(**options):
    a, b = operands(256, 256, 128)
    closed = jax.make_jaxpr(lambda x, y: matmul(x, y, **options))(a, b)
    (params,) = (
        eqn.params["compiler_params"]
        for eqn in equations(closed.jaxpr)
        if "compiler_params" in eqn.params
    )
    return params.target


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, None),
        ({"compiler_params": BLACKWELL}, "sm_100a"),
        ({"config": SMALL}, "sm_100a"),
        ({"config": MatmulConfig(cluster=None)}, None),
    ],
)
def test_target_and_configuration_choose_the_kernel(options, target):
    assert kernel_target(**options) == target
