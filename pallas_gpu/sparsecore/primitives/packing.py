# SPDX-License-Identifier: Apache-2.0
"""Registers of narrow elements: two to one, and back; bits as another type."""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect
from pallas_gpu.sparsecore.primitives._define import array_type, define, vector
from pallas_gpu.types import values

__all__ = ["PackFormat", "bitcast", "pack", "unpack"]


class PackFormat(enum.Enum):
    """How the lanes of two registers lie in one.

    * `COMPRESSED`: pairs of lanes as a second dimension: (n, 2).
    * `INTERLEAVED`: a0, b0, a1, b1 and so on: (2 * n,).
    """

    COMPRESSED = "compressed"
    INTERLEAVED = "interleaved"


# The types that are packed to, and unpacked to, unless another one is given.
_NARROW = {jnp.dtype(jnp.float32): jnp.bfloat16, jnp.dtype(jnp.int32): jnp.int16}
_WIDE = {jnp.dtype(n): w for w, n in _NARROW.items()}


def _packed(a: Any, b: Any, *, format: str, dtype: Any) -> list[Any]:
    shape = (2 * a.size,) if format == "interleaved" else (a.size, 2)
    return [array_type(shape, dtype)]


pack_p = define("pack", "packing", results=_packed)
unpack_p = define(
    "unpack",
    "packing",
    results=lambda x, *, format, dtype: [array_type((x.size // 2,), dtype)] * 2,
)
bitcast_p = define(
    "bitcast",
    "packing",
    results=lambda x, *, dtype: [array_type(_bitcast_shape(x, dtype), dtype)],
)

_FORMAT = expect.member(PackFormat, "plsc")
_DTYPE = expect.optional(values.element_type)


@expect.arguments(
    None,
    a=expect.anything,
    b=expect.anything,
    format=_FORMAT,
    preferred_element_type=_DTYPE,
)
def pack(
    a: jax.Array, b: jax.Array, /, *, format: Any, preferred_element_type: Any = None
) -> jax.Array:
    """Converts two registers to elements of half the width, in one register.

    Issued by: a vector subcore.

    Args:
      a, b: vectors of one size and type.
      format: a `PackFormat`.
      preferred_element_type: a type of half the width; None: bfloat16 for float32,
        int16 for int32.

    Returns:
      A vector of twice the size, or for `COMPRESSED` of shape (n, 2).

    Raises:
      ShapeError, DTypeError: different operands, or a type of another width.
    """
    a = vector(a, "pack", "the first operand")
    b = vector(b, "pack", "the second operand", (a.dtype,))
    if a.shape != b.shape:
        raise errors.ShapeError(
            "pack: the operands have different shapes",
            expected=f"two vectors of {a.size} elements",
            got=f"{a.size} and {b.size} elements",
            hint="pack registers of one size",
        )
    dtype = _other(a.dtype, preferred_element_type, _NARROW, "pack", 0.5)
    (result,) = pack_p.bind(a, b, format=format.value, dtype=dtype)
    return result


@expect.arguments(
    None, ab=expect.anything, format=_FORMAT, preferred_element_type=_DTYPE
)
def unpack(
    ab: jax.Array, /, *, format: Any, preferred_element_type: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Converts the elements of a register to twice the width, in two registers.

    Issued by: a vector subcore.

    Args:
      ab: what `pack` returns for this format.
      format: a `PackFormat`.
      preferred_element_type: a type of twice the width; None: float32 for bfloat16,
        int32 for int16.

    Returns:
      Two vectors of half the size.

    Raises:
      ShapeError, DTypeError: another shape, or a type of another width.
    """
    ab = values.array(ab, "unpack: the operand")
    flat = format is PackFormat.INTERLEAVED
    if not (ab.ndim == 1 and ab.size % 2 == 0 if flat else ab.shape[1:] == (2,)):
        raise errors.ShapeError(
            "unpack: the operand has another shape",
            expected="a vector of an even size" if flat else "shape (n, 2)",
            got=str(list(ab.shape)),
            hint="pass the format that the elements were packed in",
        )
    dtype = _other(ab.dtype, preferred_element_type, _WIDE, "unpack", 2)
    a, b = unpack_p.bind(ab, format=format.value, dtype=dtype)
    return a, b


def _other(given: Any, preferred: Any, default: Any, who: str, factor: float) -> Any:
    dtype = preferred or default.get(jnp.dtype(given))
    if dtype is None or jnp.dtype(dtype).itemsize != given.itemsize * factor:
        raise errors.DTypeError(
            f"{who}: no type of {'half' if factor < 1 else 'twice'} the width",
            expected="float32 and bfloat16, int32 and int16, or "
            "preferred_element_type of that width",
            got=f"{given.name}"
            + (f" and {jnp.dtype(preferred).name}" if preferred else ""),
            hint="pass preferred_element_type",
        )
    return jnp.dtype(dtype)


@expect.arguments(x=values.array, dtype=values.element_type)
def bitcast(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns the bits of a register as elements of another type.

    If its width is another, the last dimension grows or shrinks.

    Issued by: a vector subcore, or for scalars of one width any.

    Args:
      x: a vector or scalar.
      dtype: the type.

    Returns:
      A value of the same number of bits.

    Raises:
      ShapeError: the bits are not whole elements.
    """
    if x.dtype == dtype:
        return x
    (result,) = bitcast_p.bind(x, dtype=jnp.dtype(dtype))
    return result


def _bitcast_shape(x: Any, dtype: Any) -> tuple[int, ...]:
    before, after = jnp.dtype(x.dtype).itemsize, jnp.dtype(dtype).itemsize
    if before == after:
        return tuple(x.shape)
    if not x.shape or x.shape[-1] * before % after:
        raise errors.ShapeError(
            "bitcast: the last dimension is not whole elements",
            expected=f"a multiple of {after} bytes",
            got=f"{jnp.dtype(x.dtype).name}{list(x.shape)}",
            hint="bitcast a register with as many bits as it has",
        )
    return (*x.shape[:-1], x.shape[-1] * before // after)
