# SPDX-License-Identifier: Apache-2.0
"""Inference gives one answer for one kernel, and its work grows with the kernel."""

from __future__ import annotations

import random

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu.layouts import Layout
from tests.support.inferred import SQUARE, X, array, infer, large_kernel

COUNT = 8
F16 = jnp.float16


def chains(order: list[int]):
    """The answers for chains without common values, each with its own needs."""
    arrays = [plgpu.SMEM(SQUARE, F16)] * COUNT

    def body(*refs):
        inputs, outputs = refs[:COUNT], refs[COUNT : 2 * COUNT]
        smem, acc = refs[2 * COUNT : 3 * COUNT], refs[-1]
        for i in order:
            y = jnp.exp(inputs[i][...])
            if i % 4 == 1:
                y = plgpu.layout_cast(y, Layout.WGMMA)
            if i % 4 == 2:
                y = y - jnp.sum(y, axis=i // 4, keepdims=True)
            if i % 4 == 3:
                narrow = y.astype(F16)
                plgpu.wgmma(acc, narrow, smem[i])
                smem[i - 1][...] = narrow
            outputs[i][...] = -y

    found = infer(body, [X] * COUNT, [X] * COUNT, *arrays, plgpu.ACC(SQUARE))
    rows = [found.layouts(words) for words in ("load", "exp", "neg")]
    ordered = [dict(zip(order, row, strict=True)) for row in rows]
    return found.storages, ordered


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_independent_operations_does_not_matter(seed: int):
    order = list(range(COUNT))
    random.Random(seed).shuffle(order)
    assert chains(order) == chains(list(range(COUNT)))


def test_the_work_grows_about_linearly_with_the_kernel():
    work = [large_kernel(n)().assignment.entries for n in (250, 500, 1000)]
    assert work[1] < 3 * work[0]
    assert work[2] < 3 * work[1]


def keys(body, *args) -> list[int]:
    """The keys of the operations that make arrays."""
    return [v.key for v in infer(body, *args).network.variables]


def test_keys_of_values_do_not_depend_on_what_stands_before_them():
    def plain(x, o):
        o[...] = jnp.exp(x[...])

    def behind_another(x, o):
        o[0, :] = jnp.arange(64, dtype=jnp.float32)
        plain(x, o)

    assert keys(behind_another)[-3:] == keys(plain)


def test_loads_of_different_arrays_have_different_keys():
    def body(x, y, o):
        o[...] = x[...] + y[...]

    first, second, *_ = keys(body, [array(), array()])
    assert first != second
