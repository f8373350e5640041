# SPDX-License-Identifier: Apache-2.0
"""Products of values: their scratch memory, registers, and those of attention."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.semantics import BOTH, under
from tests.support.value_products import (
    TOLERANCE,
    check_product,
    float64,
    kernel,
    numbers,
    sum_type,
)

F32 = jnp.float32


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("expression", ["mk,kn->mn", "km,kn->mn", "mk,nk->mn"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int32"])
@pytest.mark.parametrize("k", [64, 80, 96])
def test_no_warning_names_scratch_that_no_author_declared(
    rng, semantics, expression, dtype, k
):
    """Sizes that are not powers of two, in either order."""
    sizes = {"m": 64, "n": 80, "k": k}
    left, right = expression.split("->")[0].split(",")
    a = numbers(rng, dtype, *(sizes[d] for d in left))
    b = numbers(rng, dtype, *(sizes[d] for d in right))
    out = sum_type(dtype)

    def body(a_ref, b_ref, o_ref):
        o_ref[...] = jnp.einsum(
            expression, a_ref[...], b_ref[...], preferred_element_type=out
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.PerformanceWarning)
        tolerance = TOLERANCE.get(dtype, 0.0)
        check_product(body, a, b, expression, out, tolerance, semantics=[semantics])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("expression", ["mk,nk->mn", "km,kn->mn"])
def test_products_of_a_matrix_with_its_transpose(rng, dtype, expression):
    x = numbers(rng, dtype, 64, 128)

    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = (x @ x.T if expression == "mk,nk->mn" else x.T @ x).astype(F32)

    exact = np.einsum(expression, float64(x), float64(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.PerformanceWarning)
        make = kernel(body, exact.shape)
        everywhere.check(make, [x], exact, atol=2.0 if dtype == "bfloat16" else 0.5)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_matrix_and_its_transpose_are_one_copy_in_scratch(semantics, dtype):
    x = jax.ShapeDtypeStruct((64, 128), jnp.dtype(dtype))

    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = (x @ x.T).astype(F32)

    function = under(semantics, kernel(body, (64, 64))(None))
    (report,) = plgpu.offline.compile(function, x)
    copy = x.size * x.dtype.itemsize
    assert copy <= report.resources.smem_bytes < 2 * copy


def attention(interpret, rows=64, columns=64, depth=64):
    """Returns attention along a sequential axis: a softmax between two products."""

    def body(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
        @plgpu.when(plgpu.program_id(1) == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, -1e30)
            l_ref[...] = jnp.zeros_like(l_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=F32) / 8
        m = jnp.maximum(m_ref[...], jnp.max(s, axis=1))
        p, alpha = jnp.exp(s - m[:, None]), jnp.exp(m_ref[...] - m)
        m_ref[...] = m
        l_ref[...] = l_ref[...] * alpha + jnp.sum(p, axis=1)
        acc_ref[...] = acc_ref[...] * alpha[:, None] + jnp.dot(
            p.astype(jnp.bfloat16), v_ref[...], preferred_element_type=F32
        )

        @plgpu.when(plgpu.program_id(1) == plgpu.num_programs(1) - 1)
        def _():
            o_ref[...] = acc_ref[...] / l_ref[...][:, None]

    def call(q, k, v):
        return plgpu.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(q.shape, F32),
            grid=(q.shape[0] // rows, k.shape[0] // columns),
            in_specs=[
                plgpu.BlockSpec((rows, depth), lambda i, j: (i, 0)),
                plgpu.BlockSpec((columns, depth), lambda i, j: (j, 0)),
                plgpu.BlockSpec((columns, depth), lambda i, j: (j, 0)),
            ],
            out_specs=plgpu.BlockSpec((rows, depth), lambda i, j: (i, 0)),
            scratch_shapes=[
                plgpu.SMEM((rows,), F32),
                plgpu.SMEM((rows,), F32),
                plgpu.SMEM((rows, depth), F32),
            ],
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary")
            ),
        )(q, k, v)

    return call


def test_attention_along_a_sequential_axis(rng):
    q, k, v = (numbers(rng, "bfloat16", n, 64) for n in (128, 192, 192))
    scores = float64(q) @ float64(k).T / 8
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = weights @ float64(v) / weights.sum(axis=1)[:, None]
    everywhere.check(attention, [q, k, v], expected, atol=2e-2)


@pytest.mark.offline
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_attention_does_not_spill(target):
    q = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
    (report,) = plgpu.offline.compile(attention(None), q, q, q, target=target)
    assert report.resources.spill_load_bytes == 0
