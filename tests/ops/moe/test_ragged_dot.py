# SPDX-License-Identifier: Apache-2.0
"""Ragged products: groups of any sizes, derivatives, and what is refused."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu.ops import RaggedDotConfig, ragged_dot, ragged_dot_general
from tests.support import emulated, host, ragged
from tests.support.ragged import ROUNDING, normal
from tests.support.semantics import Warpgroup

SMALL = RaggedDotConfig(
    tile_m=64, tile_n=64, tile_k=32, stages=2, blocks=3, strip=2, epilogue_n=32
)
# One row, less and more than a tile of 64, none at all, and rows of no group.
ODD = (1, 63, 0, 65, 20)


def numbers(lhs, rhs, groups):
    dims = ((lhs,), (rhs,)), ((), ())
    return jax.lax.RaggedDotDimensionNumbers(dims, (0,), groups)


TRANSPOSED, CONTRACTED = numbers(1, 2, (0,)), numbers(0, 0, ())


def assert_close(got, expected):
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, expected, atol=ROUNDING["float16"])


def check(m, n, k, sizes, c=SMALL, dtype=jnp.float16, out=None, executed=(Warpgroup,)):
    a, b = normal(m, k, dtype=dtype), normal(len(sizes), k, n, dtype=dtype)
    given = {"preferred_element_type": out, "config": c}
    atol = ROUNDING[jnp.dtype(out or dtype).name]
    args = [a, b, jnp.array(sizes, jnp.int32)]
    emulated.check(
        lambda interpret: functools.partial(ragged_dot, interpret=interpret, **given),
        *(args, ragged.product(a, b, sizes), executed),
        atol=atol,
    )


def check_general(dimension_numbers, args, expected):
    def make(interpret):
        return lambda *args: ragged_dot_general(
            *args, dimension_numbers, config=SMALL, interpret=interpret
        )

    emulated.check(make, args, expected, [Warpgroup], atol=ROUNDING["float16"])


@pytest.mark.parametrize(
    ("m", "n", "k", "sizes"),
    [
        (160, 64, 32, ODD),
        (200, 128, 96, (0, 130, 0, 70)),
        (129, 64, 64, (0, 0, 0)),
        (70, 64, 32, (5, 0, 65)),
        (3, 64, 32, (1, 1, 1)),
        # Rows beyond the array do not exist.
        (100, 64, 32, (70, 50, 30)),
        # No tile divides these.
        *((150, n, k, ODD) for n, k in ((136, 48), (75, 64), (64, 43), (33, 1))),
    ],
)
def test_groups_of_any_size(m, n, k, sizes):
    check(m, n, k, sizes)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [("bfloat16", "float32"), ("float16", "bfloat16")],
)
def test_types_of_operands_and_result(dtype, out):
    check(160, 64, 32, ODD, dtype=jnp.dtype(dtype), out=out)


@pytest.mark.parametrize(
    "changes",
    [
        *({"strip": 1}, {"strip": 3}, {"stages": 4}, {"tile_m": 128}),
        *({"tile_n": 96, "epilogue_n": 32}, {"epilogue_n": 64}),
        {"tile_k": 64, "epilogue_n": 16},
        *({"cluster": "n"}, {"consumers": 3}),
    ],
)
def test_any_configuration(changes):
    c = dataclasses.replace(SMALL, **changes)
    check(200, 200, 96, (3, 130, 40), c, executed=())


@pytest.mark.parametrize("blocks", [1, 5])
def test_any_number_of_blocks(blocks):
    a, b, sizes = normal(160, 200), normal(160, 72), jnp.array(ODD)
    c = dataclasses.replace(SMALL, blocks=blocks)
    got = ragged_dot_general(a, b, sizes, CONTRACTED, config=c)
    assert_close(got, ragged.contracted(a, b, ODD))


def test_many_groups():
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 3, 130)
    check(200, 64, 32, tuple(map(int, sizes)), executed=())


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_some_groups_have_their_matrices_elsewhere(offset):
    sizes, matrices = (40, 3, 70, 2, 60, 9), 3
    a, b = normal(200, 32), normal(matrices, 32, 64)

    def make(interpret):
        return lambda *args: ragged_dot(
            *args[:3], group_offset=args[3], config=SMALL, interpret=interpret
        )

    emulated.check(
        make,
        [a, b, jnp.array(sizes), host.array([offset])],
        _product_of_part(a, b, sizes, offset),
        atol=ROUNDING["float16"],
        executed=[Warpgroup],
    )


def _product_of_part(a, b, sizes, offset):
    every = np.zeros((len(sizes), *b.shape[1:]))
    every[offset : offset + len(b)] = np.asarray(b)
    return ragged.product(a, every, sizes)


def test_the_sizes_are_not_read_on_the_host():
    a, b = normal(100, 32), normal(3, 32, 64)
    f = jax.jit(functools.partial(ragged_dot, config=SMALL))
    for sizes in ((10, 20, 70), (0, 0, 1)):
        got = f(a, b, jnp.array(sizes, jnp.uint8))
        assert_close(got, ragged.product(a, b, sizes))


# --- other products, and derivatives --------------------------------------------------


def test_transposed_matrices():
    a, b = normal(160, 40), normal(len(ODD), 72, 40)
    expected = ragged.product(a, np.swapaxes(b, 1, 2), ODD)
    check_general(TRANSPOSED, [a, b, jnp.array(ODD)], expected)


@pytest.mark.parametrize(
    ("rows", "m", "n", "sizes"),
    [
        (64, 40, 200, (64, 0)),
        (200, 136, 72, (0, 130, 0, 70)),
        (150, 35, 43, (7, 100)),
    ],
)
def test_products_over_the_rows_of_groups(rows, m, n, sizes):
    a, b = normal(rows, m), normal(rows, n, seed=1)
    # What is behind the groups does not count, be it infinite.
    a[sum(sizes) :], b[sum(sizes) :] = np.nan, np.inf
    expected = ragged.contracted(a, b, sizes)
    check_general(CONTRACTED, [a, b, jnp.array(sizes)], expected)


def test_a_producer_without_indices_leaves_its_registers_to_the_others():
    args = normal(64, 40), normal(64, 72), jnp.array((64, 0)), CONTRACTED
    text = str(jax.make_jaxpr(lambda: ragged_dot_general(*args, config=SMALL))())
    assert "action=increase n=232" in text


@pytest.mark.parametrize("dimension_numbers", [numbers(1, 1, (0,)), TRANSPOSED])
def test_the_derivatives_of_a_product(dimension_numbers):
    transposed = dimension_numbers is TRANSPOSED
    a, weights = normal(160, 40), normal(160, 72, dtype=jnp.float32, seed=2)
    b = normal(len(ODD), *((72, 40) if transposed else (40, 72)))
    _check_derivatives(dimension_numbers, a, b, weights)


def test_the_derivatives_of_a_product_over_rows():
    weights = normal(len(ODD), 40, 72, dtype=jnp.float32, seed=2)
    _check_derivatives(CONTRACTED, normal(160, 40), normal(160, 72, seed=1), weights)


def _check_derivatives(dimension_numbers, a, b, weights):
    # What the cotangent becomes: JAX has no derivative of a product over rows.
    weights = weights.astype(a.dtype).astype(jnp.float32)

    def ours(x, y):
        return ragged_dot_general(
            *(x, y, jnp.array(ODD), dimension_numbers),
            preferred_element_type=jnp.float32,
            config=SMALL,
        )

    ends = np.cumsum(ODD)[:, None]
    row = np.arange(len(a))
    of_group = ((row < ends) & (row >= ends - np.array(ODD)[:, None])).astype(float)
    products = {CONTRACTED: "gr,rm,rn->gmn", TRANSPOSED: "gr,rk,gnk->rn"}
    product = products.get(dimension_numbers, "gr,rk,gkn->rn")
    plain = functools.partial(jnp.einsum, product, of_group, precision="highest")

    def derivatives(f, *operands):
        return jax.grad(lambda x, y: jnp.sum(f(x, y) * weights), (0, 1))(*operands)

    reference = derivatives(plain, a.astype(jnp.float32), b.astype(jnp.float32))
    for got, expected in zip(derivatives(ours, a, b), reference, strict=True):
        assert got.dtype == a.dtype
        assert_close(got, expected)


def test_derivatives_of_matrices_of_some_groups():
    sizes, offset = (40, 3, 70, 2), 1
    a, b = normal(130, 32), normal(2, 32, 64)
    g = normal(130, 64, seed=1)

    def f(x, w):
        return ragged_dot(
            x, w, jnp.array(sizes), group_offset=host.array([offset]), config=SMALL
        )

    out, backward = jax.vjp(f, a, b)
    d_a, d_b = backward(g)
    assert_close(out, _product_of_part(a, b, sizes, offset))
    assert_close(d_a, _product_of_part(g, np.swapaxes(b, 1, 2), sizes, offset))
    assert_close(d_b, ragged.contracted(a, g, sizes)[offset : offset + 2])


def test_vmap_makes_a_batch():
    a, b = normal(2, 100, 32), normal(2, 3, 32, 64)
    sizes = host.array([[50, 0, 50], [1, 64, 30]])
    got = jax.vmap(functools.partial(ragged_dot, config=SMALL))(a, b, sizes)
    for i in range(2):
        assert_close(got[i], ragged.product(a[i], b[i], sizes[i].tolist()))


@pytest.mark.parametrize(
    ("m", "k", "n", "groups"), [(0, 4, 8, 2), (4, 0, 8, 2), (4, 8, 0, 2), (4, 8, 8, 0)]
)
def test_nothing_to_multiply(m, k, n, groups):
    x, w = host.ones((m, k), jnp.float16), host.ones((groups, k, n), jnp.float16)
    out = ragged_dot(x, w, jnp.full(groups, m // max(groups, 1)))
    np.testing.assert_array_equal(out, np.zeros((m, n)))


# --- orders of events, and what the compiler makes of it ------------------------------


def test_the_default_configurations():
    few, many = RaggedDotConfig.default(16), RaggedDotConfig.default(128)
    assert few.epilogue_n > many.epilogue_n
    few, many = (RaggedDotConfig.default(x, contracted=True) for x in (16, 128))
    assert few.strip < many.strip
    blocked = RaggedDotConfig.default(16, blocked=True)
    assert (blocked.tile_n, blocked.consumers, blocked.cluster) == (128, 3, "n")


@pytest.mark.parametrize("precision", [None, "highest", jax.lax.Precision.HIGH])
def test_a_precision_changes_nothing(precision):
    operands = normal(8, 16), normal(2, 16, 24), host.array([3, 5])
    exact = ragged_dot(*operands, config=SMALL)
    got = ragged_dot(*operands, precision, config=SMALL)
    np.testing.assert_array_equal(got, exact)
