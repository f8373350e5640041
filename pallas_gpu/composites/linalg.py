# SPDX-License-Identifier: Apache-2.0
"""Factorizations and triangular systems of small matrices, in registers.

One step for each row or column: it is selected by a masked sum, so every step costs the
elements of the matrices over the threads. Batches are leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, errors
from pallas_gpu.entry.expand import Composite, composite

# A matrix of that many rows and columns takes 128 registers of each thread.
_MOST_ROWS = 128


def _require_small(what: str, shape: Sequence[int]) -> None:
    if max(shape[-2:]) <= _MOST_ROWS:
        return
    raise errors.UnsupportedError(
        f"{what} of a large matrix in a kernel",
        expected=f"at most {_MOST_ROWS} rows and columns, which fit registers",
        got=f"shape {tuple(shape)}",
        hint="compute it outside the kernel and pass the result as an argument, or in "
        "blocks of fewer rows",
    )


def _indices(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row and the column of each element."""
    rank = len(x.shape)
    rows = lax.broadcasted_iota(jnp.int32, x.shape, rank - 2)
    return rows, lax.broadcasted_iota(jnp.int32, x.shape, rank - 1)


def _line(x: jax.Array, number: Any, axis: int) -> jax.Array:
    """A row (axis -2) or a column (axis -1), as an array with one of them."""
    at = _indices(x)[axis]
    return jnp.sum(jnp.where(at == number, x, 0), axis=axis, keepdims=True)


def _element(x: jax.Array, row: Any, column: Any) -> jax.Array:
    """An element of each matrix, as one of one element."""
    return _line(_line(x, row, -2), column, -1)


@composite("cholesky")
def _cholesky(composite: Composite, a: jax.Array) -> jax.Array:
    """Column by column; all elements are NaN unless the matrix is positive definite."""
    _require_small("the Cholesky factor", a.shape)
    rows, columns = _indices(a)

    def step(k: Any, a: jax.Array) -> jax.Array:
        column = _line(a, k, -1) / jnp.sqrt(_element(a, k, k))
        row = jnp.swapaxes(column, -1, -2)
        behind = jnp.where((columns > k) & (rows >= columns), a - column * row, a)
        return jnp.where((columns == k) & (rows >= k), column, behind)

    result = lax.fori_loop(0, a.shape[-1], step, a)
    diagonal = jnp.where(rows == columns, result, 1)
    valid = jnp.all(diagonal > 0, axis=(-2, -1), keepdims=True)
    return jnp.where(valid, result, jnp.nan)


@composite("triangular_solve")
def _triangular_solve(composite: Composite, a: jax.Array, b: jax.Array) -> jax.Array:
    """Row by row of the unknowns, or column by column where they are on the left."""
    _require_small("a triangular system", a.shape)
    _require_small("a triangular system with a right-hand side", b.shape)
    params, n = composite.params, a.shape[-1]
    left, unit = params["left_side"], params["unit_diagonal"]
    # The equation that remains for unknown k has the line of `a` behind its diagonal.
    by_rows = left == params["transpose_a"]
    forward = params["lower"] != by_rows
    along = -2 if left else -1
    position = _indices(b)[along]

    def step(i: Any, b: jax.Array) -> jax.Array:
        k = i if forward else n - 1 - i
        unknown = _line(b, k, along)
        if not unit:
            unknown = unknown / _element(a, k, k)
        factors = _line(a, k, -2 if by_rows else -1)
        if by_rows == left:
            factors = jnp.swapaxes(factors, -1, -2)
        others = position > k if forward else position < k
        left_over = jnp.where(others, b - factors * unknown, b)
        return jnp.where(position == k, unknown, left_over)

    return lax.fori_loop(0, n, step, b)


@composite("lu")
def _lu(composite: Composite, a: jax.Array) -> list[jax.Array]:
    """With the largest element of the rest of the column as the pivot, as LAPACK."""
    _require_small("the LU factors", a.shape)
    pivots, permutation = composite.out_avals[1:]
    rows, columns = _indices(a)
    line = lax.broadcasted_iota(jnp.int32, permutation.shape, len(a.shape) - 2)
    number = lax.broadcasted_iota(jnp.int32, pivots.shape, len(a.shape) - 2)

    def step(k: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        a, chosen, order = state
        column = jnp.where(columns == k, jnp.abs(a), 0)
        size = jnp.where(line >= k, jnp.max(column, axis=-1), -1)
        pivot = jnp.argmax(size, axis=-1, keepdims=True).astype(jnp.int32)
        there = pivot[..., None]
        top, low = _line(a, k, -2), _line(a, there, -2)
        a = jnp.where(rows == k, low, jnp.where(rows == there, top, a))
        first = jnp.sum(jnp.where(line == k, order, 0), axis=-1, keepdims=True)
        other = jnp.sum(jnp.where(line == pivot, order, 0), axis=-1, keepdims=True)
        order = jnp.where(line == k, other, jnp.where(line == pivot, first, order))
        chosen = jnp.where(number == k, pivot, chosen)
        # Of a singular matrix the column is zeros, and stays so.
        head = _element(a, k, k)
        factors = jnp.where(head == 0, 0, _line(a, k, -1) / head)
        behind = jnp.where(columns > k, a - factors * low, a)
        behind = jnp.where(columns == k, factors, behind)
        return jnp.where(rows > k, behind, a), chosen, order

    start = a, jnp.zeros(pivots.shape, jnp.int32), line
    return list(lax.fori_loop(0, pivots.shape[-1], step, start))


@composite("custom_linear_solve")
def _linear_solve(composite: Composite, *operands: Any) -> Any:
    """The function that solves, applied: the others are for derivatives."""
    jaxprs, counts = composite.params["jaxprs"], composite.params["const_lengths"]
    first = counts.matvec + counts.vecmat
    consts = operands[first : first + counts.solve]
    right = operands[sum(counts) :]
    solve = jaxprs.solve
    return _jax.eval_jaxpr(solve.jaxpr, solve.consts, *consts, *right)
