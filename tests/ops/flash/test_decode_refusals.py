# SPDX-License-Identifier: Apache-2.0
"""Decode: what it refuses, and what it says then."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.decode import decode_attention
from pallas_gpu.ops.flash.decode_config import DecodeConfig
from tests.support import host
from tests.support.refusal import refused


def zeros(*shape, dtype=jnp.float16):
    return host.zeros(shape, dtype)


Q, K = zeros(2, 1, 4, 64), zeros(2, 32, 2, 64)
TABLE = host.zeros((2, 3), jnp.int32)
BLACKWELL = plgpu.CompilerParams(target="sm_100a")
CHANGES = {
    # The shapes match.
    "sequences": {"k": zeros(3, 32, 2, 64)},
    "heads": {"k": zeros(2, 32, 3, 64)},
    "sizes of heads": {"k": zeros(2, 32, 2, 32)},
    "lengths of K and V": {"v": zeros(2, 48, 2, 64)},
    "no keys": {"k": zeros(2, 0, 2, 64)},
    "another layout": {"kv_layout": "HND"},
    # Dimensions.
    "two of q": {"q": zeros(4, 64)},
    "three of k": {"k": zeros(2, 32, 64)},
    "no v": {"v": None},
    "five of k": {"k": zeros(2, 2, 32, 2, 64), "v": None},
    "an axis of two arrays": {"kv_axis": 0},
    "three in one array": {"k": zeros(2, 3, 32, 2, 64), "v": None, "kv_axis": 1},
    # Sizes.
    "head_dim 24": {"q": zeros(2, 1, 4, 24), "k": zeros(2, 32, 2, 24)},
    "head_dim 272": {"q": zeros(2, 1, 4, 272), "k": zeros(2, 32, 2, 272)},
    "80 bytes": {"q": zeros(2, 1, 4, 80), "k": zeros(2, 32, 2, 80, dtype=jnp.int8)},
    "queries": {"q": zeros(2, 9, 4, 64)},
    "pages of 24": {"k": zeros(9, 24, 2, 64), "page_table": TABLE},
    "pages of 4": {"k": zeros(9, 4, 2, 64), "page_table": TABLE},
    "a row of pages": {"k": zeros(9, 16, 2, 64), "page_table": TABLE[0]},
    "lengths": {"lengths": host.zeros((3,), jnp.int32)},
    "k_scale": {"k_scale": zeros(3, dtype=jnp.float32)},
    "v_scale": {"v_scale": zeros(2)},
    # Types.
    "float32": {"q": zeros(2, 1, 4, 64, dtype=jnp.float32)},
    "bfloat16": {"k": zeros(2, 32, 2, 64, dtype=jnp.bfloat16)},
    "int8 of v": {"v": zeros(2, 32, 2, 64, dtype=jnp.int8)},
    "uint32 lengths": {"lengths": host.zeros((2,), jnp.uint32)},
    "int16 pages": {
        "k": zeros(9, 16, 2, 64),
        "page_table": TABLE.astype(jnp.int16),
    },
    # Factors are positive; the target has wgmma.
    **{
        f"{name}={value}": {name: value}
        for name in ("sm_scale", "soft_cap", "k_scale")
        for value in (0.0, -1.0, float("inf"), float("nan"))
    },
    "target": {"compiler_params": BLACKWELL},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@refused
def test_arguments_that_do_not_fit(changes):
    given = {"q": Q, "k": K, **changes}
    given.setdefault("v", given["k"])
    decode_attention(**given)  # HERE


@pytest.mark.parametrize(
    "changes",
    [
        {"block_kv": 96},
        {"block_kv": 320},
        {"consumers": 2},
        {"consumers": 0},
        {"cluster": 17},
    ],
    ids=str,
)
@refused
def test_configurations(changes):
    DecodeConfig(**changes)  # HERE


@refused
def test_the_rings_fit_shared_memory():
    q, k = zeros(1, 1, 4, 128), zeros(1, 64, 1, 128)
    decode_attention(q, k, k, config=DecodeConfig(stages=8))


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad])
@refused
def test_there_is_no_derivative(transform):
    transform(lambda q: decode_attention(q, K, K).astype(jnp.float32).sum())(Q)
