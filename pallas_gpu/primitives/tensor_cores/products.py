# SPDX-License-Identifier: Apache-2.0
"""What all products of the tensor core require of their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_gpu import errors, types
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS, TmemKind
from pallas_gpu.layouts.tmem.mma_instruction import K_BYTES
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _operands as ops

# What inference chooses from, the widest first; authors may also leave it out.
_SWIZZLES = (128, 64, 32)


def require_shapes(
    acc: Any,
    a: Any,
    b: Any,
    who: str,
    hint: str = "pass an operand stored transposed as ref.T",
) -> None:
    """Raises ShapeError unless acc is (M, N), a (M, K) and b (K, N)."""
    shapes = tuple(acc.shape), tuple(a.shape), tuple(b.shape)
    two = all(len(s) == 2 for s in shapes)
    if two and shapes[0] == (shapes[1][0], shapes[2][1]) and shapes[1][1] == b.shape[0]:
        return
    raise errors.ShapeError(
        f"{who}: the shapes do not form a product",
        expected="acc (M, N), a (M, K), b (K, N)",
        got="acc {}, a {}, b {}".format(*shapes),
        hint=hint,
    )


def require_depth(a: Any, who: str) -> None:
    """Raises ShapeError unless K is a multiple of that of wgmma and tcgen05.mma."""
    step = K_BYTES * 8 // types.itemsize_bits(a.dtype)
    if a.shape[1] % step:
        raise errors.ShapeError(
            f"{who}: K is not a multiple of the instruction's K",
            expected=f"a multiple of {step} ({K_BYTES} bytes)",
            got=a.shape[1],
            hint="pad K with zeros",
        )


def require_packed(ref: Any, what: str) -> None:
    """Raises LayoutError unless an array in TMEM has its elements side by side."""
    layout = types.base_aval(ref).storage.layout
    packing = COLUMN_BITS // types.itemsize_bits(ref.dtype)
    if layout.kind is TmemKind.DEFAULT and layout.packing == packing:
        return
    raise errors.LayoutError(
        f"{what} is not packed",
        expected=f"the default layout with {packing} elements per column",
        got=str(layout),
        hint="declare it with plgpu.TMEM(shape, dtype, packed=True)",
    )


def readable[T](
    operand: Any, plan: Callable[[SmemLayout, Window], T], what: str
) -> list[T]:
    """Returns how an SMEM operand may be read: in its storage, or those inferred.

    Args:
      operand: the reference. Dynamic starts are multiples of a tile, as promised.
      plan: returns how a part of an array is read, or raises LayoutError.
      what: the operand, for messages.
    """
    aval = types.base_aval(operand)
    window = types.resolve(aval.shape, ops.operand(operand).transforms)
    window = window.at([s if isinstance(s, int) else 0 for s in window.starts])
    found, refused = [], None
    for transforms in [aval.transforms] if aval.transforms else _inferable(aval.dtype):
        try:
            layout = types.smem_layout(aval.shape, aval.dtype, transforms)
            bits = types.itemsize_bits(operand.dtype)
            found.append(plan(layout.reinterpreted(window.array_shape, bits), window))
        except errors.LayoutError as error:
            refused = error
    if found or refused is None:
        return found
    raise errors.LayoutError(
        f"{what} is not stored as the tensor core reads it",
        expected=refused.expected,
        got=refused.got,
        hint=refused.hint or refused.what,
    )


def _inferable(dtype: Any) -> list[tuple[types.Transform, ...]]:
    bits = types.itemsize_bits(dtype)
    return [
        (types.TilingTransform((8, s * 8 // bits)), types.SwizzleTransform(s))
        for s in _SWIZZLES
    ]
