# SPDX-License-Identifier: Apache-2.0
"""Attention of float8 operands: types, scales, and V as the tensor core reads it.

The tensor core's 8-bit operands have their summed dimension in adjacent bytes. For the
second product that is the rows of V, so V is transposed before the kernel; XLA does it
in the pass that makes V float8, if there is one in the same program.

The probabilities come out of the first product with two adjacent columns in a thread,
and go into the second with four. Neither moves: in each group of 16 rows of V, those
that a thread has take the places where the tensor core expects them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors

DTYPE = jnp.float8_e4m3fn
# K of a product of 8-bit operands: PTX ISA, wgmma.mma_async, shapes.
DEPTH = 32
# Probabilities are multiplied by 2 to this power: of float8_e4m3fn's range, 2**-9 to
# 448, they use the upper part.
EXPONENT = 8
# A row of the first product is held by four threads, with two columns of each eight;
# one of the second's left operand with four of each sixteen: PTX ISA, wgmma.mma_async,
# register fragments. (halves of a group, threads, columns)
_GROUP = 2, 4, 2
_GROUP_ROWS = 16
_OUT_DTYPES = jnp.bfloat16, jnp.float16


def is_narrow(dtype: Any) -> bool:
    return bool(jnp.dtype(dtype) == DTYPE)


def result_dtype(dtype: Any, out_dtype: Any) -> Any:
    """Returns the type of the result.

    Raises:
      DTypeError: it is not supported for operands of this type.
    """
    allowed = _OUT_DTYPES if is_narrow(dtype) else (dtype,)
    if out_dtype is None:
        return jnp.dtype(allowed[0])
    try:
        found = jnp.dtype(out_dtype)
    except TypeError:
        found = None
    if found is None or found not in {jnp.dtype(x) for x in allowed}:
        raise errors.DTypeError(
            "attention: out_dtype is not supported for these operands",
            expected=" or ".join(jnp.dtype(x).name for x in allowed),
            got=out_dtype if found is None else found.name,
            hint="omit out_dtype, and convert the result with astype",
        )
    return found


def scales(q: Any, k: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> Any:
    """Returns factors of the scores and of the result, or None.

    Returns:
      (batch or 1, heads, 2) float32; heads are those of Q.

    Raises:
      ArgumentError: factors of operands that are not float8, or not positive.
      ShapeError, DTypeError: factors that do not fit the operands.
    """
    given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    if not is_narrow(q.dtype):
        for name, value in given.items():
            if value is not None:
                raise errors.ArgumentError(
                    f"attention: {name} without operands of float8",
                    expected="None, or q, k and v of float8_e4m3fn",
                    got=f"{name} and q of {jnp.dtype(q.dtype).name}",
                    hint="sm_scale is a factor of the scores",
                )
        return None
    heads, kv_heads, batch = q.shape[-2], k.shape[-2], q.shape[0]
    found = []
    for (name, value), own in zip(
        given.items(), (heads, kv_heads, kv_heads), strict=True
    ):
        array = _of_heads(name, value, batch, own)
        found.append(jnp.repeat(array, heads // own, axis=1))
    of_q, of_k, of_v = found
    return jnp.stack(jnp.broadcast_arrays(of_q * of_k, of_v), axis=2)


def _of_heads(name: str, value: Any, batch: int, heads: int) -> Any:
    if value is None:
        value = 1.0
    if not hasattr(value, "shape"):
        if not 0 < value < float("inf"):
            raise errors.ArgumentError(
                f"attention: {name} is not a positive number",
                expected="a positive number, or an array of them",
                got=value,
                hint=f"{name} makes of the float8 numbers the ones they stand for",
            )
        return jnp.full((1, heads), value, jnp.float32)
    shape = tuple(value.shape)
    if shape not in ((), (1,), (heads,), (1, heads), (batch, heads)):
        raise errors.ShapeError(
            f"attention: the shape of {name} does not match",
            expected=f"(), (1,), ({heads},) or {(batch, heads)}",
            got=shape,
            hint="one for all, for each head, or for each batch and head",
        )
    if value.dtype != jnp.float32:
        raise errors.DTypeError(
            f"attention: {name} is not of type float32",
            expected="float32",
            got=jnp.dtype(value.dtype).name,
            hint="convert it with astype(jnp.float32)",
        )
    batches = shape[0] if len(shape) == 2 else 1
    value = jnp.reshape(value, (batches, shape[-1] if shape else 1))
    return jnp.broadcast_to(value, (batches, heads))


def transposed(v: Any) -> Any:
    """Returns V, (batch, kv_len, heads, v_dim), as the kernel reads it.

    Returns:
      (batch, heads, v_dim, rows): in each group of 16 rows, those of a thread are
      adjacent; see the head of the file. Rows that are added are zeros.
    """
    batch, kv_len, heads, v_dim = v.shape
    missing = -kv_len % _GROUP_ROWS
    if missing:
        v = jnp.pad(v, ((0, 0), (0, missing), (0, 0), (0, 0)))
    v = v.reshape(batch, -1, *_GROUP, heads, v_dim)
    v = v.transpose(0, 5, 6, 1, 3, 2, 4)
    return v.reshape(batch, heads, v_dim, kv_len + missing)


def probabilities(wide: Any) -> Any:
    """Returns those of a tile as the left operand of a product with `transposed` V.

    No element leaves its thread.
    """
    rows, columns = wide.shape
    groups = wide.astype(DTYPE).reshape(rows, columns // _GROUP_ROWS, *_GROUP)
    found = lax.transpose(groups, (0, 1, 3, 2, 4)).reshape(rows, columns)
    return plgpu.layout_cast(found, plgpu.Layout.WGMMA_8BIT)
