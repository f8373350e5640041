# SPDX-License-Identifier: Apache-2.0
"""Matrix products by mma.sync: any shape, on every target."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import types
from pallas_gpu.composites.wgmma import Matrix, in_layout
from pallas_gpu.entry.expand import Kernel
from pallas_gpu.layouts.registers.fragments import MmaShape
from pallas_gpu.primitives.registers import layout_cast, load
from pallas_gpu.primitives.tensor_cores import mma
from pallas_gpu.primitives.tensor_cores.dot_general import Problem

# K that is loaded from SMEM at once, in bytes: the width of the widest swizzle, so that
# parts of tiled arrays consist of whole tiles.
_K_BYTES = 128


def multiplies(problem: Problem) -> bool:
    """Whether mma.sync multiplies elements of the operands' types."""
    wanted = problem.operand_type
    if wanted is None:
        return True
    # Of 4 bits K is a multiple of 64, which no other product of values needs.
    return wanted in mma.TYPES and types.itemsize_bits(wanted) >= 8


def product(
    a: Matrix,
    b: Matrix,
    kernel: Kernel,
    init: Any = None,
    reason: mma.InsteadOfWgmma | None = None,
) -> jax.Array:
    """Multiplies two matrices, each warp a part of the rows and columns.

    Sizes that are not multiples of the instructions' are padded with zeros.

    Args:
      a: (M, K).
      b: (K, N).
      init: a value to which the product is added.
      reason: why wgmma does not multiply them, if it could.

    Returns:
      (M, N) in float32, or in int32 for 8-bit integers.
    """
    (m, k), n = a.shape, b.shape[1]
    dtype = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
    shape = MmaShape.cheapest(m, n, k, 8 * a.dtype.itemsize)
    whole = shape.padded
    total = jnp.zeros((whole.m, whole.n), dtype)
    is_whole = (m, n) == (whole.m, whole.n)
    if init is not None and is_whole:
        total = init
    total = in_layout(total, shape.acc, kernel)
    lane = kernel.semantics is types.LoweringSemantics.Lane
    for left, right in _pieces(a, b):
        part = MmaShape(m, n, left.shape[1], shape.bits, shape.m_warps).padded
        x = _value(left, (part.m, part.k), shape.lhs if lane else None)
        y = _value(right, (part.k, part.n), shape.rhs if lane else None)
        total = mma.multiplied(total, x, y, reason)
    if is_whole:
        return total
    total = total[:m, :n]
    return total if init is None else init + total


def _pieces(a: Matrix, b: Matrix) -> list[tuple[Any, Any]]:
    """Returns both operands, in several parts along K if they are in SMEM.

    So that not all of both has to be in registers at once.
    """
    k, step = b.shape[0], _K_BYTES // a.dtype.itemsize
    if not are_read_in_parts(k, a.dtype) or not (a.is_ref and b.is_ref):
        return [(a.view(), b.view())]
    parts = [slice(start, start + step) for start in range(0, k, step)]
    return [(a.view().at[:, part], b.view().at[part]) for part in parts]


def are_read_in_parts(k: int, dtype: Any) -> bool:
    """Whether operands in SMEM are read in several parts."""
    step = _K_BYTES // jnp.dtype(dtype).itemsize
    return k > step and k % step == 0


def _value(x: Any, shape: tuple[int, int], layout: Any) -> Any:
    """Returns an operand in registers, with zeros around it.

    Args:
      x: a value or a part of a reference.
      shape: the padded shape.
      layout: its layout; None for layout inference to choose.
    """
    whole = tuple(x.shape) == shape
    if types.base_aval(x) is not None:
        x = load(x, layout=layout if whole else None, optimized=False)
    x = padded(x, shape)
    return x if layout is None else layout_cast(x, layout)


def padded(x: Any, shape: tuple[int, int]) -> Any:
    """Returns a value with zeros behind its elements."""
    missing = [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x
