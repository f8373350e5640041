# SPDX-License-Identifier: Apache-2.0
"""docs/triton.md: its code runs, and what it names exists."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tools.source_tree import ROOT

TEXT = (ROOT / "docs" / "triton.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names():
    found: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        exec(block, found)
    return found


def test_the_first_tutorial(names):
    x, y = np.arange(1500.0, dtype=np.float32), np.ones(1500, np.float32)
    np.testing.assert_array_equal(names["add"](x, y), x + y)
    np.testing.assert_array_equal(names["add"](x[:10], y[:10]), x[:10] + 1)


def test_the_product(names):
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(rng.integers(-4, 5, shape), jnp.bfloat16)
        for shape in ((200, 136), (136, 136))
    )
    exact = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    got = np.asarray(names["matmul"](a, b), np.float32)
    np.testing.assert_allclose(got, exact, rtol=2**-8)


def test_the_sparse_attention(names):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(128, 64)).astype(jnp.bfloat16) for _ in range(3))
    table = np.array([[1, 0, 0], [1, 1, 1]], np.int32)
    got = names["sparse_attention"](table, q, k, v)
    q, k, v = (np.asarray(x, np.float32).reshape(2, 64, 64) for x in (q, k, v))
    keys, values = (x[table].reshape(2, -1, 64) for x in (k, v))
    p = jax.nn.softmax(np.einsum("bqd,bkd->bqk", q, keys) / 8)
    expected = np.einsum("bqk,bkd->bqd", p, values).reshape(128, 64)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=0.03)


def test_the_lock(names):
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(names["total"](x), [x.sum()])


def test_what_the_page_names_exists():
    for root, module in (("plgpu", plgpu), ("jax", jax), ("jnp", jnp)):
        for path in re.findall(rf"\b{root}\.([\w.]*\w)", TEXT):
            functools.reduce(getattr, path.removeprefix("numpy.").split("."), module)
