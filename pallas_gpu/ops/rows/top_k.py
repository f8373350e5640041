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
from pallas_gpu.ops.rows.rows import Rows
from pallas_gpu.ops.rules import INTERPRET, PARAMS

_MOST_COLUMNS = 8192


@expect.arguments(
    x=expect.arrays,
    k=expect.integer(),
    compiler_params=PARAMS,
    interpret=INTERPRET,
)
def top_k(
    x: Any,
    k: int,
    *,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest elements of each row, largest first, and their positions.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad` (reverse mode). As `jax.lax.top_k`: of equal elements the first come
    first.

    Args:
      x: (..., columns), float32, float16 or bfloat16; columns up to 8192.
      k: how many; at most columns.
      compiler_params, interpret: see `pallas_call`.

    Returns:
      values (..., k) of the type of x; positions (..., k), int32.

    Raises:
      ShapeError, DTypeError, ArgumentError: an empty array or too long rows, another
        type, a k outside 1 to columns.

    Example:
      >>> weights, experts = ops.top_k(scores, 2)
    """
    rows.check("top_k", x=x)
    columns = x.shape[-1]
    if columns > _MOST_COLUMNS:
        raise errors.ShapeError(
            "top_k: the rows are too long",
            expected=f"up to {_MOST_COLUMNS} columns",
            got=columns,
            hint="use jax.lax.top_k, or take the top k of the parts' top k",
        )
    if not 1 <= k <= columns:
        raise errors.ArgumentError(
            "top_k: there are not as many elements",
            expected=f"k from 1 to {columns}",
            got=k,
            hint="k counts elements of one row",
        )
    return _top_k(x, int(k), compiler_params, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _top_k(x: jax.Array, k: int, compiler_params: Any, interpret: Any) -> Any:
    r = Rows(x.shape)

    def body(x_ref, values_ref, positions_ref) -> None:
        def row(i: Any, carry: Any) -> Any:
            values_ref[i], positions_ref[i] = lax.top_k(x_ref[i], k)
            return carry

        lax.fori_loop(0, r.together, row, jnp.int32(0))

    values, positions = r.call(
        body,
        [x],
        [(k, x.dtype), (k, jnp.int32)],
        name="top_k",
        compiler_params=compiler_params,
        interpret=interpret,
    )
    return values, positions


def _forward(x: jax.Array, k: int, compiler_params: Any, interpret: Any) -> Any:
    values, positions = _top_k(x, k, compiler_params, interpret)
    return (values, positions), (positions, x.shape[-1])


def _backward(k: int, compiler_params: Any, interpret: Any, saved: Any, d: Any) -> Any:
    del k, compiler_params, interpret
    positions, columns = saved
    zeros = jnp.zeros((*positions.shape[:-1], columns), d[0].dtype)
    return (jnp.put_along_axis(zeros, positions, d[0], -1, inplace=False),)


_top_k.defvjp(_forward, _backward)
