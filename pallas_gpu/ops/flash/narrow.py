# SPDX-License-Identifier: Apache-2.0
"""Attention of float8 operands: V and probabilities as the tensor core reads them.

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
from pallas_gpu.ops.rules import padded

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


def is_narrow(dtype: Any) -> bool:
    return bool(jnp.dtype(dtype) == DTYPE)


def transposed(v: Any) -> Any:
    """Returns V, (batch, kv_len, heads, v_dim), as the kernel reads it.

    Returns:
      (batch, heads, v_dim, rows): in each group of 16 rows, those of a thread are
      adjacent; see the head of the file. Rows that are added are zeros.
    """
    batch, kv_len, heads, v_dim = v.shape
    rows = plgpu.align_to(kv_len, _GROUP_ROWS)
    v = padded(v, rows, axis=1).reshape(batch, -1, *_GROUP, heads, v_dim)
    v = v.transpose(0, 5, 6, 1, 3, 2, 4)
    return v.reshape(batch, heads, v_dim, rows)


def probabilities(wide: Any) -> Any:
    """Returns those of a tile as the left operand of a product with `transposed` V.

    No element leaves its thread.
    """
    rows, columns = wide.shape
    groups = wide.astype(DTYPE).reshape(rows, columns // _GROUP_ROWS, *_GROUP)
    found = lax.transpose(groups, (0, 1, 3, 2, 4)).reshape(rows, columns)
    return plgpu.layout_cast(found, plgpu.Layout.WGMMA_8BIT)
