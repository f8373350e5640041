# SPDX-License-Identifier: Apache-2.0
"""Small matrices: Cholesky and LU factors, triangular and general systems."""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import linalg

from tests.support.entry_kernels import run
from tests.support.functions import check
from tests.support.refusal import refused_by

RNG = np.random.default_rng(0)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def general(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def well_conditioned(*shape: int) -> np.ndarray:
    return general(*shape) + 4 * np.eye(shape[-1], dtype=np.float32)


def positive(*shape: int) -> np.ndarray:
    a = general(*shape)
    return a @ a.swapaxes(-1, -2) + 4 * np.eye(shape[-1], dtype=np.float32)


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(16, 16), (3, 5, 5), (1, 1)], ids=str)
def test_the_cholesky_factor(shape):
    check(jnp.linalg.cholesky, positive(*shape), **CLOSE)


def test_a_matrix_that_is_not_positive_definite_has_no_factor():
    a = np.stack([positive(4, 4), -np.eye(4, dtype=np.float32)])
    check(jnp.linalg.cholesky, a, **CLOSE)


@pytest.mark.parametrize(
    ("left", "lower", "transposed"), list(itertools.product([True, False], repeat=3))
)
def test_triangular_systems(left, lower, transposed):
    unit = lower == transposed
    a = well_conditioned(6, 6) / (8 if unit else 1)
    b = general(6, 3) if left else general(3, 6)

    options = {"left_side": left, "lower": lower, "transpose_a": transposed}
    solve = functools.partial(
        lax.linalg.triangular_solve, unit_diagonal=unit, **options
    )
    check(solve, a, b, **CLOSE)


def test_a_triangular_system_does_not_read_the_other_triangle():
    solve = functools.partial(linalg.solve_triangular, lower=True)
    a = np.where(np.tri(5, dtype=bool), well_conditioned(5, 5), np.nan)
    check(solve, a.astype(np.float32), general(5, 2), **CLOSE)
    # A batch with one right hand side each.
    check(solve, well_conditioned(3, 4, 4), general(3, 4, 1), **CLOSE)


@pytest.mark.parametrize("shape", [(2, 4, 4), (6, 4), (4, 6)], ids=str)
def test_lu_factors_and_pivots(shape):
    check(lambda a: list(lax.linalg.lu(a)), general(*shape), **CLOSE)


def test_lu_factors_of_a_singular_matrix():
    a = np.zeros((4, 4), np.float32)
    a[:, 1:] = general(4, 3)
    check(lambda a: list(lax.linalg.lu(a)), a, **CLOSE)


@pytest.mark.parametrize(
    "function",
    [
        jnp.linalg.inv,
        lambda a: jnp.linalg.solve(a, a[:, :2]),
        jnp.linalg.det,
        lambda a: linalg.cho_solve((a, True), a[:, :3]),
    ],
    ids=["inv", "solve", "det", "cho_solve"],
)
def test_what_jax_makes_of_them(function):
    check(function, well_conditioned(5, 5), rtol=1e-4, atol=1e-4)


@refused_by(run)
def test_a_large_matrix_is_refused(x, o):
    a = jnp.concatenate([x[...]] * 3)[:130, :1] * jnp.ones((130, 130))
    o[...] = jnp.linalg.cholesky(a)[:64, :128]  # HERE
