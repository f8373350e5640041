# SPDX-License-Identifier: Apache-2.0
"""The largest elements of each row and their positions, with derivative."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.rows import rows
from pallas_gpu.ops.rows.rows import Launch, Rows
from pallas_gpu.ops.rules import Array, Interpret

# Columns that one warpgroup sorts, and of how many of them the parts of a longer row
# are merged: so each merge is of fewer columns.
_MOST_COLUMNS = 8192
_MOST_OF_PARTS = _MOST_COLUMNS // 2


@expect.arguments()
def top_k(
    x: Array,
    k: int,
    *,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest elements of each row, largest first, and their positions.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode). As `jax.lax.top_k`: of equal elements the first come
    first.

    Args:
      x: (..., columns), float32, float16 or bfloat16. Rows of more than 8192 elements
        are cut into parts, whose largest elements another launch merges.
      k: how many; at most columns, and at most 4096 of rows of more than 8192.
      compiler_params, interpret: see `pallas_call`.

    Returns:
      values (..., k) of the type of x; positions (..., k), int32.

    Raises:
      ShapeError, DTypeError, ArgumentError: an empty array, another type, a k outside
        1 to columns, or too large for long rows.

    Example:
      >>> weights, experts = ops.top_k(scores, 2)
    """
    rows.check("top_k", x=x)
    columns = x.shape[-1]
    if not 1 <= k <= columns:
        raise errors.ArgumentError(
            "top_k: there are not as many elements",
            expected=f"k from 1 to {columns}",
            got=k,
            hint="k counts elements of one row",
        )
    if columns > _MOST_COLUMNS and k > _MOST_OF_PARTS:
        raise errors.ArgumentError(
            "top_k: k is too large for rows of so many elements",
            expected=f"k up to {_MOST_OF_PARTS} for more than {_MOST_COLUMNS} columns",
            got=f"k={k}, {columns} columns",
            hint="use jax.lax.top_k",
        )
    return _of_parts(x, int(k), Launch("top_k", compiler_params, interpret))


def _of_parts(x: jax.Array, k: int, launch: Launch) -> Any:
    """Merges the largest elements of the parts of long rows.

    Equal elements keep their order: parts follow each other, and in each it is kept.
    """
    columns = x.shape[-1]
    if columns <= _MOST_COLUMNS:
        return _top_k(x, k, launch)
    parts = plgpu.cdiv(columns, _MOST_COLUMNS)
    # More than half of the most columns, and so not less than k.
    size = plgpu.cdiv(columns, parts)
    # What is added is never among the largest: it comes after all equal elements.
    end = [(0, 0)] * (x.ndim - 1) + [(0, parts * size - columns)]
    cut = jnp.pad(x, end, constant_values=-jnp.inf)
    cut = cut.reshape(*x.shape[:-1], parts, size)
    values, positions = _top_k(cut, k, launch)
    positions += jnp.arange(parts, dtype=jnp.int32)[:, None] * size
    values, positions = (y.reshape(*x.shape[:-1], -1) for y in (values, positions))
    values, chosen = _of_parts(values, k, launch)
    return values, jnp.take_along_axis(positions, chosen, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _top_k(x: jax.Array, k: int, launch: Launch) -> Any:
    r = Rows(x.shape)

    def body(x_ref, values_ref, positions_ref) -> None:
        def row(i: Any, carry: Any) -> Any:
            values_ref[i], positions_ref[i] = lax.top_k(x_ref[i], k)
            return carry

        lax.fori_loop(0, r.together, row, jnp.int32(0))

    return tuple(r.call(body, [x], [(k, x.dtype), (k, jnp.int32)], launch))


def _forward(x: jax.Array, k: int, launch: Launch) -> Any:
    values, positions = _top_k(x, k, launch)
    return (values, positions), (positions, x.shape[-1])


def _backward(k: int, launch: Launch, saved: Any, d: Any) -> Any:
    del k, launch
    positions, columns = saved
    zeros = jnp.zeros((*positions.shape[:-1], columns), d[0].dtype)
    return (jnp.put_along_axis(zeros, positions, d[0], -1, inplace=False),)


_top_k.defvjp(_forward, _backward)
