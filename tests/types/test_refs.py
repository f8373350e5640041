# SPDX-License-Identifier: Apache-2.0
"""Abstract references: equality, updates, descriptions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.types import KernelRef, base_aval, describe
from tests.support.entry_kernels import TILE, run

TILED = plgpu.SMEM((64, 128), jnp.float32, transforms=[plgpu.TilingTransform((8, 32))])


def test_storage_is_part_of_the_type():
    assert TILE.to_ref() == TILE.to_ref()
    assert TILE.to_ref() != TILED.to_ref()
    assert hash(TILED.to_ref()) == hash(TILED.to_ref())


def test_an_update_keeps_what_it_does_not_name():
    ref = TILED.to_ref()
    smaller = ref.update(inner_aval=jax.core.ShapedArray((8, 32), jnp.float16))
    assert isinstance(smaller, KernelRef)
    assert (smaller.shape, smaller.memory_space) == ((8, 32), plgpu.SMEM)
    assert smaller.transforms == ref.transforms


def test_values_are_no_references():
    assert base_aval(np.zeros(3)) is None
    assert base_aval("text") is None
    assert describe(3) == "3, not a reference"


def test_attributes_of_references_and_views():
    seen = {}

    def body(x, o, tile):
        part = tile.at[8:16].T
        seen["ref"] = (x.shape, x.dtype, x.ndim, x.size, len(x))
        seen["view"] = (part.shape, part.dtype, part.ndim, part.size, len(part))
        seen["text"] = (describe(x), describe(part))
        o[...] = x[...]

    run(body, scratch_types=[TILE])
    assert seen["ref"] == ((64, 128), jnp.float32, 2, 64 * 128, 64)
    assert seen["view"] == ((128, 8), jnp.float32, 2, 1024, 128)
    assert seen["text"] == ("GMEM float32[64, 128]", "SMEM float32[128, 8]")


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda x: 2 * x, "arithmetic on a reference"),
        (lambda x: x + 1, "arithmetic on a reference"),
        (lambda x: x[...] + x, "a function of arrays is called on a reference"),
        (lambda x: -x, "arithmetic on a reference"),
        (lambda x: x @ x, "arithmetic on a reference"),
        (lambda x: plgpu.when(x > 1), "arithmetic on a reference"),
        (lambda x: x.T + 1, "arithmetic on a reference"),
        (lambda x: 2 * x.at[0:8], "arithmetic on a reference"),
        (lambda x: x.sum(), "a reference has no `sum`: arrays have"),
        (lambda x: x.T.max(), "a reference has no `max`: arrays have"),
        (lambda x: x.astype(jnp.int32), "a reference has no `astype`: arrays have"),
        (lambda x: x.at[0:8].mean(), "a reference has no `mean`: arrays have"),
        (lambda x: x.real, "a reference has no `real`: arrays have"),
        (lambda x: jnp.exp(x), "a function of arrays is called on a reference"),
        (lambda x: jnp.sum(x), "a function of arrays is called on a reference"),
        (lambda x: jnp.maximum(x, 0), "a function of arrays is called on a reference"),
        (lambda x: jnp.exp(x.at[0]), "a function of arrays is called on a reference"),
        (lambda x: np.exp(x), "a function of arrays is called on a reference"),
        (lambda x: jax.lax.exp(x), "exp is called on a reference"),
        (lambda x: x if x else None, "a reference is a condition"),
        (lambda x: x if x.at[0] else None, "a reference is a condition"),
        (lambda x: float(x), "a reference is converted with float()"),
        (lambda x: float(x.at[0]), "a reference is converted with float()"),
        (lambda x: int(x), "a reference is converted with int()"),
        (lambda x: complex(x), "a reference is converted with complex()"),
        (lambda x: range(x), "a reference is an index"),
        (lambda x: list(x), "a loop runs over a reference"),
        (lambda x: list(x.T), "a loop runs over a reference"),
        (lambda x: 3.0 in x, "`in` searches a reference"),
        (lambda x: round(x), "a reference is rounded"),
        (lambda x: x.unknown, "a reference has no attribute 'unknown'"),
        (lambda x: x.T.unknown, "a reference has no attribute 'unknown'"),
        (lambda x: x.at[0].unknown(), "a reference has no attribute 'unknown'"),
    ],
)
def test_a_reference_used_as_a_value_says_how_to_read_it(use, what):
    def body(x, o):
        o[...] = use(x)

    with pytest.raises(plgpu.errors.ArgumentTypeError) as info:
        run(body)
    assert info.value.what == what
    assert "x_ref[...]" in info.value.hint
    assert "test_refs.py" in info.value.where


@pytest.mark.parametrize("like", [jnp.ones_like, jnp.zeros_like])
def test_an_array_is_made_like_a_part_of_a_reference(like):
    found = []

    def body(x, o):
        found.append(like(x.at[0:2, 3]))

    out = jax.ShapeDtypeStruct((8, 16), jnp.float16)
    jax.eval_shape(plgpu.kernel(body, out_type=out), out)
    assert found[0].shape == (2,)
    assert found[0].dtype == jnp.float16
