# SPDX-License-Identifier: Apache-2.0
"""Products without the tensor core: multiplied element by element, and added."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import types
from pallas_gpu.composites.mma import padded
from pallas_gpu.composites.wgmma import Matrix, in_layout
from pallas_gpu.entry.expand import Kernel
from pallas_gpu.entry.scoped import run_scoped
from pallas_gpu.layouts.registers.fragments import MmaShape
from pallas_gpu.primitives import tma
from pallas_gpu.primitives.registers import layout_cast, load
from pallas_gpu.primitives.tensor_cores.dot_general import Problem

# Terms that are multiplied at once without scratch memory: 32 for each thread.
_TERMS = 128 * 32


def product(problem: Problem, a: Any, b: Any, kernel: Kernel) -> jax.Array:
    """Returns a product in which one operand has no dimension of its own.

    Its dimensions are those of both operands, those of `a` and those of `b`.
    """
    wide = jnp.result_type(*map(_summed_in, (a.dtype, b.dtype, problem.out)))
    simple = max(a.ndim, b.ndim) <= 2 and not problem.batch[0]
    if simple and len(problem.contracted[0]) == 1:
        (axis_a,), (axis_b,) = problem.contracted
        return _of_vector(a.astype(wide), b.astype(wide), axis_a, axis_b, kernel)
    if a.ndim == b.ndim == 1 and not problem.batch[0]:
        return _of_columns(a.astype(wide), b.astype(wide), kernel)
    left, right = (_arranged(problem, i, x.astype(wide)) for i, x in enumerate((a, b)))
    sums = range(left.ndim - len(problem.contracted[0]), left.ndim)
    return jnp.sum(left * right, axis=tuple(sums))


def of_matrices(problem: Problem, a: Matrix, b: Matrix, kernel: Kernel) -> jax.Array:
    """Returns a product of matrices, added term by term in registers.

    PTX: st.shared, then ld.shared, and fma for each term. Both are stored by the terms
    of the sum, so that each step loads a row of either.
    """
    (m, k), n = a.shape, b.shape[1]
    wide = jnp.result_type(*map(_summed_in, (a.dtype, b.dtype, problem.out)))
    if kernel.mesh.warpgroups > 1:
        return _in_registers(a.value().astype(wide), b.value().astype(wide))
    # Only for the division of the result among the threads.
    shape = MmaShape.cheapest(m, n, 8, 32).padded
    rows, columns = _layouts(shape, kernel)

    def add_up(left: Any, right: Any) -> jax.Array:
        left[...] = padded(a.T.value(), (k, shape.m)).astype(wide)
        right[...] = padded(b.value(), (k, shape.n)).astype(wide)
        # TMA may write to the same bytes when they belong to a later scope.
        tma.commit_smem()

        def step(i: Any, total: Any) -> Any:
            x = load(left.at[i], layout=rows, optimized=False)
            y = load(right.at[i], layout=columns, optimized=False)
            return total + x[:, None] * y[None, :]

        start = in_layout(jnp.zeros((shape.m, shape.n), wide), shape.acc, kernel)
        return jax.lax.fori_loop(0, k, step, start)

    scratch = [types.SMEM((k, s), wide).as_internal() for s in (shape.m, shape.n)]
    return run_scoped(add_up, *scratch)[:m, :n]


def _in_registers(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a product of matrices whose columns and rows are cut out of registers.

    One of several warpgroups cannot declare scratch memory; the exchanges of a slice
    go through memory that each of them has.
    """
    (m, k), n = a.shape, b.shape[1]
    terms = math.gcd(k, max(1, _TERMS // (m * n)))

    def step(i: Any, total: Any) -> Any:
        left = jax.lax.dynamic_slice_in_dim(a, i * terms, terms, 1)
        right = jax.lax.dynamic_slice_in_dim(b, i * terms, terms, 0)
        return total + jnp.sum(left[:, :, None] * right[None, :, :], axis=1)

    return jax.lax.fori_loop(0, k // terms, step, jnp.zeros((m, n), a.dtype))


def _layouts(shape: MmaShape, kernel: Kernel) -> tuple[Any, Any]:
    """Returns the layouts of a column and of a row of the result."""
    if kernel.semantics is types.LoweringSemantics.Warpgroup:
        return None, None
    return shape.acc.reduce(1), shape.acc.reduce(0)


def _arranged(problem: Problem, i: int, x: Any) -> Any:
    """Returns an operand with all dimensions, of size one where it has none."""
    batch, free, contracted = problem.batch[i], problem.free(i), problem.contracted[i]
    x = jnp.transpose(x, (*batch, *free, *contracted))
    others = len(problem.free(1 - i))
    first = len(batch) + (0 if i else len(free))
    return jnp.expand_dims(x, tuple(range(first, first + others)))


def _of_vector(a: Any, b: Any, axis_a: int, axis_b: int, kernel: Kernel) -> jax.Array:
    """Returns the product of a vector with a vector or a matrix.

    Args:
      a, b: values with at most two dimensions, of which one has one.
      axis_a, axis_b: the dimensions over which to add.
    """
    if a.ndim == b.ndim:
        return jnp.sum(a * b)
    vector, matrix, axis = (a, b, axis_b) if a.ndim == 1 else (b, a, axis_a)
    layout = _layout(matrix.shape, kernel)
    if layout is not None:
        matrix = layout_cast(matrix, layout)
    return jnp.sum(matrix * _along(vector, axis, layout), axis=axis)


def _of_columns(a: Any, b: Any, kernel: Kernel) -> jax.Array:
    """Returns the products of all elements of a vector with all of another."""
    layout = _layout((a.size, b.size), kernel)
    rows = jnp.broadcast_to(_along(a, 0, layout), (a.size, b.size))
    return in_layout(rows, layout, kernel) * _along(b, 1, layout)


def _layout(shape: tuple[int, int], kernel: Kernel) -> Any:
    """Returns a layout of a matrix whose rows and columns have layouts, too.

    None if layout inference finds one, or if none fits the shape.
    """
    if kernel.semantics is types.LoweringSemantics.Warpgroup:
        return None
    division = MmaShape.cheapest(*shape, 8, 32)
    return division.acc if division == division.padded else None


def _along(vector: Any, axis: int, layout: Any) -> Any:
    """Returns a vector along an axis of a matrix in a layout, if there is one."""
    if layout is not None:
        vector = layout_cast(vector, layout.reduce(1 - axis))
    return vector[None, :] if axis == 1 else vector[:, None]


def _summed_in(dtype: Any) -> Any:
    if jnp.dtype(dtype).itemsize >= 4:
        return dtype
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
