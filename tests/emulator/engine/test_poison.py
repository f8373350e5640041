# SPDX-License-Identifier: Apache-2.0
"""Poison in registers: masks of results, and the uses that are errors."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emulator.engine.poison import Origin, Poisoned, apply, poison
from tests.support import everywhere
from tests.support.refusal import refused, refused_by

F32 = jnp.float32
I32 = jnp.int32


@pytest.mark.parametrize(
    "dtype",
    [
        np.float64,
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e4m3fn,
    ],
)
def test_poison_of_floats_is_nan(dtype):
    assert np.isnan(poison(dtype))


def test_poison_of_integers_catches_the_eye():
    assert poison(np.uint32) == 0xA5A5A5A5
    assert poison(np.int8).view(np.uint8) == 0xA5


# --- masks ----------------------------------------------------------------------------

DTYPES = [
    np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
    np.int32, np.uint8, ml_dtypes.int4, np.bool_,
]  # fmt: skip


def half_poisoned(dtype, n=8):
    """An array whose first half has values."""
    value = np.full(n, poison(dtype))
    value[: n // 2] = np.ones(n // 2, dtype)
    mask = np.arange(n) >= n // 2
    return Poisoned(value, mask, Origin("it is read", "element [4]", "write it", "k:1"))


def mask_of(fn, *operands):
    result = apply(fn, operands)
    return result.mask if isinstance(result, Poisoned) else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x,
        lambda x: x != x.dtype.type(0),
        lambda x: x.astype(np.float32) + 1,
        lambda x: np.where(x > x.dtype.type(0), 3, 4),
    ],
    ids=["same", "compare", "convert", "where"],
)
def test_results_depend_on_poison_where_an_operand_does(dtype, fn):
    x = half_poisoned(dtype)
    np.testing.assert_array_equal(mask_of(fn, x), x.mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_select_removes_poison(dtype):
    x = half_poisoned(dtype)
    zeros = np.zeros(8, dtype)
    assert mask_of(lambda v: np.where(x.mask, zeros, v), x) is None
    assert mask_of(lambda v: np.where(np.arange(8) < 5, v, zeros), x).sum() == 1


@pytest.mark.parametrize("fn", [np.sum, np.max, np.min, lambda x: x[4] - x[6]])
def test_what_combines_poison_with_values_is_poison(fn):
    for dtype in (np.int32, np.float32):
        assert mask_of(fn, half_poisoned(dtype)).all()


@pytest.mark.parametrize("n", [(), (2,)], ids=["a scalar", "an array"])
@refused
def test_a_poisoned_index_that_selects_one_of_several_is_an_error(n):
    def body(o, index):
        which = index[0] if n == () else index[...]
        o[...] = lax.select_n(which, *[jnp.full(n, i, I32) for i in (1, 2, 3)])

    everywhere.emulate(body, (), np.zeros(n, np.int32), plgpu.SMEM((2,), I32))


def test_zero_times_poison_of_integers_is_no_poison():
    x = half_poisoned(np.int32)
    assert mask_of(lambda v: v * 0, x) is None
    assert mask_of(lambda v: v & 0, x) is None


@pytest.mark.parametrize("use", [np.asarray, bool, int, float, lambda x: x == 1])
def test_who_is_unaware_of_masks_gets_an_error(use):
    scalar = Poisoned(np.int32(1), np.array(True), half_poisoned(F32).origin)
    with pytest.raises(errors.UninitializedReadError, match="it is read"):
        use(scalar)


# --- kernels --------------------------------------------------------------------------

TILE = plgpu.SMEM((8, 16), I32)


def run(body, *scratch, **options):
    return everywhere.emulate(body, [X], X, TILE, *scratch, **options)


X = np.arange(1, 129, dtype=np.int32).reshape(8, 16)
ROWS = np.arange(8)[:, None]


def upper(array):
    """The array where its row is below 4, elsewhere zeros."""
    row = plgpu.broadcasted_iota(I32, (8, 16), 0)
    return jnp.where(row < 4, array, 0)


def test_a_masked_read_of_partly_written_memory_is_no_error():
    def body(x, o, tile):
        tile[0:4] = x[0:4]
        o[...] = upper(tile[...] * 2 + 1)

    np.testing.assert_array_equal(run(body), np.where(ROWS < 4, 2 * X + 1, 0))


@refused_by(run)
def test_poison_is_reported_at_the_read_with_the_line_that_uses_it(x, o, tile):
    tile[0:4] = x[0:4]
    value = tile[...]  # HERE
    o[...] = value + x[...]


def branch(x, o, value):
    @plgpu.when(value > 3)
    def _():
        o[...] = x[...] + 1


def loop(x, o, value):
    o[...] = lax.fori_loop(0, value, lambda i, c: c + 1, x[...])


def address(x, o, value):
    o[value + 1] = x[0]


def predicate(x, o, value):
    def scope(tile):
        plgpu.copy_smem_to_gmem(tile, o, value > 0)

    plgpu.run_scoped(scope, TILE)


def update(x, o, value):
    o[...] = x[...]
    o[1, 1] += value


@pytest.mark.parametrize("use", [branch, loop, address, predicate, update])
@refused_by(run)
def test_poison_may_not_decide_nor_arrive(x, o, tile, *, use):
    use(x, o, tile[1, 1])  # HERE


@refused_by(run, TILE)
def test_poison_is_stored_in_smem_and_known_where_it_came_from(x, o, tile, other):
    tile[0:4] = x[0:4]
    other[...] = tile[...]  # HERE
    o[...] = upper(other[...])
    o[7] = other[7]


def test_poison_passes_through_loops_and_branches_that_do_not_use_it():
    def body(x, o, tile):
        tile[0:4] = x[0:4]
        poisoned = tile[...]

        @plgpu.loop(0, 2, init_carry=poisoned)
        def value(i, carry):
            o[0] = x[i]
            return carry + 1

        o[...] = upper(lax.cond(x[0, 0] > 0, lambda: value, lambda: x[...]))

    np.testing.assert_array_equal(run(body), np.where(ROWS < 4, X + 2, 0))
