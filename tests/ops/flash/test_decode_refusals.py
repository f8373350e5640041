# SPDX-License-Identifier: Apache-2.0
"""Decode: what it refuses, and what it says then."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.ops.flash.decode import decode_attention
from pallas_gpu.ops.flash.decode_config import DecodeConfig


def zeros(*shape, dtype=jnp.float16):
    return np.zeros(shape, dtype)


def arguments(**changes):
    return {"q": zeros(2, 1, 4, 64), "k": zeros(2, 32, 2, 64), **changes}


def refused(error, what, **changes):
    """Checks the error of a call, and that it has all parts."""
    given = arguments(**changes)
    given.setdefault("v", given["k"])
    with pytest.raises(error) as caught:
        decode_attention(**given)
    assert caught.value.what == f"decode_attention: {what}"
    assert caught.value.expected and caught.value.got is not None and caught.value.hint


TABLE = np.zeros((2, 3), jnp.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {"k": zeros(3, 32, 2, 64)},
        {"k": zeros(2, 32, 3, 64)},
        {"k": zeros(2, 32, 2, 32)},
        {"v": zeros(2, 48, 2, 64)},
        {"k": zeros(2, 0, 2, 64)},
        {"kv_layout": "HND"},
    ],
)
def test_shapes_match(changes):
    refused(errors.ShapeError, "the shapes do not match", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"q": zeros(4, 64)},
        {"k": zeros(2, 32, 64)},
        {"v": None},
        {"k": zeros(2, 2, 32, 2, 64), "v": None},
        {"kv_axis": 0},
    ],
)
def test_dimensions(changes):
    what = "the operands do not have these dimensions"
    refused(errors.ShapeError, what, **changes)


def test_keys_and_values_in_one_array():
    what = "the cache does not consist of keys and values"
    changes = {"k": zeros(2, 3, 32, 2, 64), "v": None, "kv_axis": 1}
    refused(errors.ShapeError, what, **changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"q": zeros(2, 1, 4, 24), "k": zeros(2, 32, 2, 24)},
            "this head_dim is not supported",
        ),
        (
            {"q": zeros(2, 1, 4, 272), "k": zeros(2, 32, 2, 272)},
            "this head_dim is not supported",
        ),
        (
            {
                "q": zeros(2, 1, 4, 80),
                "k": zeros(2, 32, 2, 80, dtype=jnp.int8),
            },
            "this head_dim is not supported for elements of 8 bits",
        ),
        ({"q": zeros(2, 9, 4, 64)}, "too many queries for one launch"),
        (
            {"k": zeros(9, 24, 2, 64), "page_table": TABLE},
            "this page size is not supported",
        ),
        (
            {"k": zeros(9, 4, 2, 64), "page_table": TABLE},
            "this page size is not supported",
        ),
        (
            {"k": zeros(9, 16, 2, 64), "page_table": TABLE[0]},
            "the page table does not have a row for each sequence",
        ),
        (
            {"lengths": np.zeros((3,), jnp.int32)},
            "lengths do not have one element for each sequence",
        ),
        ({"k_scale": zeros(3, dtype=jnp.float32)}, "invalid k_scale"),
        ({"v_scale": zeros(2)}, "invalid v_scale"),
    ],
)
def test_sizes(changes, what):
    refused(errors.ShapeError, what, **changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"q": zeros(2, 1, 4, 64, dtype=jnp.float32)}, None),
        ({"k": zeros(2, 32, 2, 64, dtype=jnp.bfloat16)}, None),
        ({"v": zeros(2, 32, 2, 64, dtype=jnp.int8)}, None),
        ({"lengths": np.zeros((2,), jnp.uint32)}, "lengths are not int32"),
        (
            {"k": zeros(9, 16, 2, 64), "page_table": TABLE.astype(jnp.int16)},
            "the page table is not int32",
        ),
    ],
)
def test_types(changes, what):
    what = what or "these element types are not supported"
    refused(errors.DTypeError, what, **changes)


@pytest.mark.parametrize("name", ["sm_scale", "soft_cap", "k_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_factors_are_positive(name, value):
    what = f"{name} is not a positive number"
    refused(errors.ArgumentError, what, **{name: value})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"block_kv": 96}, "the tensor core does not support this block"),
        ({"block_kv": 320}, "the tensor core does not support this block"),
        ({"consumers": 2}, "the warpgroups cannot divide a block"),
        ({"consumers": 0}, "the warpgroups cannot divide a block"),
        ({"cluster": 17}, "invalid size of a cluster"),
    ],
)
def test_configurations(changes, what):
    with pytest.raises(errors.ArgumentError) as caught:
        DecodeConfig(**changes)
    assert caught.value.what == f"DecodeConfig: {what}"


def test_the_rings_fit_shared_memory():
    q, k = zeros(1, 1, 4, 128), zeros(1, 64, 1, 128)
    with pytest.raises(errors.OutOfResources, match="needs more SMEM"):
        decode_attention(q, k, k, config=DecodeConfig(stages=8))


def test_the_target_has_wgmma():
    params = plgpu.CompilerParams(target="sm_100a")
    what = "the target has no wgmma"
    refused(errors.TargetError, what, compiler_params=params)


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad])
def test_there_is_no_derivative(transform):
    given = arguments()

    def f(q):
        return decode_attention(q, given["k"], given["k"]).astype(jnp.float32).sum()

    with pytest.raises(errors.DifferentiationError) as caught:
        transform(f)(given["q"])
    assert caught.value.what == "decode_attention: it has no derivative"
    assert "ops.attention" in caught.value.hint
