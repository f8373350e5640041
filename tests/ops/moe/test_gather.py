# SPDX-License-Identifier: Apache-2.0
"""Ragged products whose rows are gathered, and those with an activation or a gate."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu.ops import RaggedDotConfig, ragged_dot, ragged_dot_general
from tests.support import emulated, ragged
from tests.support.ragged import ROUNDING, normal
from tests.support.semantics import Warpgroup

SMALL = RaggedDotConfig(
    tile_m=64, tile_n=64, tile_k=32, stages=2, blocks=3, strip=2, epilogue_n=32
)
# The indices are of all rows of the product, those of no group included.
SIZES, TOKENS, ROWS = (1, 63, 0, 65, 20), 40, 160
CONTRACTED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def indices(rows=ROWS):
    # Some tokens occur several times, some never.
    return np.random.default_rng(0).integers(0, TOKENS, rows).astype(np.int32)


def check(function, args, expected, **options):
    """Of rows that are gathered."""

    def make(interpret):
        given = {"config": SMALL, "interpret": interpret, **options}
        return lambda *args: function(*args[:-1], rows=args[-1], **given)

    emulated.check(make, args, expected, [Warpgroup], atol=ROUNDING["float16"])


@pytest.mark.parametrize(("n", "k"), [(64, 64), (72, 40), (33, 21)])
def test_rows_of_tokens(n, k):
    x, w, rows = normal(TOKENS, k), normal(len(SIZES), k, n), indices()
    expected = ragged.product(np.asarray(x)[rows], w, SIZES)
    check(ragged_dot, [x, w, jnp.array(SIZES), rows], expected)


@pytest.mark.parametrize(("m", "n"), [(128, 64), (40, 75)])
def test_products_over_rows_of_tokens(m, n):
    x, y, rows = normal(TOKENS, m), normal(ROWS, n), indices()
    expected = ragged.contracted(np.asarray(x)[rows], y, SIZES)
    dims = {"ragged_dot_dimension_numbers": CONTRACTED}
    check(ragged_dot_general, [x, y, jnp.array(SIZES), rows], expected, **dims)


def test_derivatives_add_up_where_a_token_occurs_again():
    x, w, rows = normal(TOKENS, 40), normal(len(SIZES), 40, 72), indices()
    g = normal(ROWS, 72, seed=1)
    f = functools.partial(
        ragged_dot, group_sizes=jnp.array(SIZES), rows=jnp.array(rows), config=SMALL
    )
    d_x, d_w = jax.vjp(f, x, w)[1](g)
    of_rows = ragged.product(g, np.swapaxes(w, 1, 2), SIZES)
    expected = np.zeros(x.shape)
    np.add.at(expected, rows, of_rows)
    np.testing.assert_allclose(d_x, expected, atol=4 * ROUNDING["float16"])
    expected = ragged.contracted(np.asarray(x)[rows], g, SIZES)
    np.testing.assert_allclose(d_w, expected, atol=ROUNDING["float16"])


# --- activations and gates ------------------------------------------------------------


def _plain(x, w, gate, activation):
    """The same in float32, by JAX."""
    out = ragged_of_jax(x, w)
    if gate is None:
        return activation(out)
    return activation(ragged_of_jax(x, gate)) * out


def ragged_of_jax(x, w):
    product = functools.partial(jax.lax.ragged_dot, group_sizes=jnp.array(SIZES))
    return product(x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    None: jax.nn.silu,
}


def _operands(gated):
    x, w = normal(ROWS, 40), normal(len(SIZES), 40, 72)
    return x, w / 6, normal(len(SIZES), 40, 72, seed=1) / 6 if gated else None


@pytest.mark.parametrize(
    ("activation", "gated"),
    [("gelu", False), ("relu", False), (None, True), ("gelu", True)],
)
def test_an_activation_or_a_gate(activation, gated):
    x, w, gate = _operands(gated)

    def make(interpret):
        given = {"activation": activation, "config": SMALL, "interpret": interpret}
        return lambda x, w, *gate: ragged_dot(
            x, w, jnp.array(SIZES), gate=gate[0] if gate else None, **given
        )

    args = [x, w] if gate is None else [x, w, gate]
    expected = _plain(x, w, gate, ACTIVATIONS[activation])
    emulated.check(make, args, expected, atol=2e-2, executed=[Warpgroup])


@pytest.mark.parametrize("gated", [False, True])
def test_derivatives_of_an_activation(gated):
    x, w, gate = _operands(gated)
    weights = normal(ROWS, 72, dtype=jnp.float32, seed=2)

    def ours(x, w, gate):
        sizes = jnp.array(SIZES)
        return ragged_dot(x, w, sizes, activation="silu", gate=gate, config=SMALL)

    def derivatives(f):
        def loss(*operands):
            return jnp.sum(f(*operands) * weights)

        return jax.grad(loss, argnums=(0, 1, 2) if gated else (0, 1))(x, w, gate)

    plain = functools.partial(_plain, activation=jax.nn.silu)
    for got, expected in zip(derivatives(ours), derivatives(plain), strict=True):
        assert got.dtype == expected.dtype
        got, expected = (np.asarray(y, np.float32) for y in (got, expected))
        np.testing.assert_allclose(got, expected, atol=0.1)


def test_rows_of_no_group_are_not_activated():
    x, w, _ = _operands(False)
    out = ragged_dot(x, w, jnp.array(SIZES), activation=jnp.cos, config=SMALL)
    assert not np.any(np.asarray(out)[sum(SIZES) :])
