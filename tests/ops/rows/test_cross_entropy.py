# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy fused with a linear layer, against float32; refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops
from pallas_gpu.ops.rows import cross_entropy
from tests.support import emulated, host
from tests.support.semantics import Warpgroup

CASES = [
    # rows, depth, classes, transpose_w
    (70, 64, 300, False),
    (130, 72, 256, True),
    (5, 30, 101, False),
    (5, 30, 101, True),
]


def operands(rows, depth, classes, transposed, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return host.array(rng.standard_normal(shape) / 4, dtype)

    w = normal(*((classes, depth) if transposed else (depth, classes)))
    # Some rows have no label.
    labels = rng.integers(-1, classes + 2, rows)
    return normal(rows, depth), w, jnp.asarray(labels, jnp.int32)


def reference(x, w, labels, transpose_w=False):
    x, w = (y.astype(jnp.float32) for y in (x, w))
    logits = x @ (w.T if transpose_w else w)
    has_loss = (labels >= 0) & (labels < logits.shape[-1])
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    at = jnp.where(has_loss, labels, 0)[..., None]
    picked = jnp.take_along_axis(logits, at, -1)[..., 0]
    return tuple(jnp.where(has_loss, y, 0.0) for y in (logsumexp - picked, logsumexp))


def derivatives(function, x, w, labels):
    """Of a weighted sum of the losses, and a penalty on the logarithms of sums."""
    weights = jnp.cos(jnp.arange(labels.size, dtype=jnp.float32))

    def loss(x, w):
        losses, logsumexp = function(x, w, labels)
        return jnp.sum(losses * weights) + 0.1 * jnp.sum(logsumexp**2)

    return jax.grad(loss, (0, 1))(x, w)


@pytest.mark.parametrize("case", CASES)
def test_losses(case):
    x, w, labels = operands(*case)

    def make(interpret):
        return lambda *args: ops.linear_cross_entropy(
            *args, transpose_w=case[3], return_logsumexp=True, interpret=interpret
        )

    expected = reference(x, w, labels, case[3])
    emulated.check(make, [x, w, labels], expected, atol=1e-5, executed=[Warpgroup])


@pytest.mark.parametrize(
    ("case", "workspace"),
    [*zip(CASES, (70 * 2 * 128, 70 * 2 * 128, None, None), strict=True)],
)
def test_derivatives(case, workspace, monkeypatch):
    if workspace is not None:
        # Several chunks of classes.
        monkeypatch.setattr(cross_entropy, "_WORKSPACE", workspace)
    args = operands(*case)
    options = {"transpose_w": case[3]}
    ours = functools.partial(ops.linear_cross_entropy, return_logsumexp=True, **options)
    got = derivatives(ours, *args)
    expected = derivatives(functools.partial(reference, **options), *args)
    for a, b in zip(got, expected, strict=True):
        a, b = (np.asarray(y, np.float64) for y in (a, b))
        assert np.linalg.norm(a - b) < 2**-7 * np.linalg.norm(b)


def test_leading_dimensions():
    x, w, labels = operands(6, 16, 40, False, jnp.float16)
    got = ops.linear_cross_entropy(x.reshape(2, 3, 16), w, labels.reshape(2, 3))
    expected = reference(x, w, labels)[0].reshape(2, 3)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_under_vmap():
    x, w, labels = operands(10, 64, 90, False)
    x, labels = x.reshape(2, 5, 64), labels.reshape(2, 5)

    def loss(x, labels):
        return ops.linear_cross_entropy(x, w, labels).sum()

    losses, derivatives = jax.vmap(jax.value_and_grad(loss))(x, labels)
    for i in range(2):
        expected = jax.value_and_grad(loss)(x[i], labels[i])
        np.testing.assert_array_equal(losses[i], expected[0])
        np.testing.assert_array_equal(derivatives[i], expected[1])


def test_approximate_exponentials_are_the_default():
    args = operands(*CASES[0])

    def lowered(**options):
        function = functools.partial(ops.linear_cross_entropy, **options)
        (report,) = plgpu.offline.lower(function, *args)
        return report.mlir

    exact = plgpu.CompilerParams(approx_math=False)
    assert lowered() != lowered(compiler_params=exact)


def test_compiler_parameters_reach_every_kernel_of_the_derivatives():
    lane = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    x, w, labels = operands(*CASES[0])

    def loss(x, w):
        return ops.linear_cross_entropy(x, w, labels, compiler_params=lane).sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w))
    kernels = jaxpr.count("pallas_gpu_kernel[")
    assert kernels == jaxpr.count("lowering_semantics=<LoweringSemantics.Lane") == 4
