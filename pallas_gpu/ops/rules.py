# SPDX-License-Identifier: Apache-2.0
"""Rules for the arguments that all ready kernels pass on."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors, expect

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


def as_dtype(value: Any) -> jnp.dtype | None:
    """Returns an element type; None for an array, and for what is no type."""
    if hasattr(value, "shape") and not isinstance(value, jnp.dtype):
        return None
    try:
        return jnp.dtype(value)
    except (TypeError, ValueError):
        return None


def result_type(
    who: str,
    dtype: Any,
    allowed: Sequence[jnp.dtype],
    hint: str = "convert the result",
    *,
    expected: str | None = None,
    what: str = "the result",
) -> jnp.dtype:
    found = as_dtype(dtype)
    if found in allowed:
        return found  # type: ignore[return-value]
    raise errors.DTypeError(
        f"{who}: {what} cannot have this type",
        expected=expected or ", ".join(x.name for x in allowed),
        got=found if dtype is not None and found else expect.shown(dtype),
        hint=hint,
    )


def require_type(
    who: str, what: str, x: Any, fits: bool, expected: str, got: Any = None
) -> None:
    if not fits:
        raise errors.DTypeError(
            f"{who}: {what} cannot have this type",
            expected=expected,
            got=expect.shown(x) if got is None else got,
            hint="convert it with astype",
        )


def check_operands(
    who: str,
    a: Any,
    b: Any,
    transposed: bool,
    hint: str,
    *,
    rows: str = "M",
    groups: str = "",
) -> tuple[int, int]:
    """Returns K and N of (rows, K) and (groups K, N), transposed: (groups N, K)."""
    deep, wide = (-1, -2) if transposed else (-2, -1)
    ranks = len(a.shape) == 2 or (rows == "..." and len(a.shape) > 0)
    ranks &= len(b.shape) == (3 if groups else 2)
    if not ranks or a.shape[-1] != b.shape[deep]:
        matrix = "N, K" if transposed else "K, N"
        raise no_product(who, f"({rows}, K) and ({groups}{matrix})", a, b, hint)
    return b.shape[deep], b.shape[wide]


def check_narrow(who: str, a: Any, b: Any, other: jnp.dtype, hint: str) -> None:
    """Raises DTypeError unless both are 8-bit floats, or both of another type."""
    types = jnp.dtype(a.dtype), jnp.dtype(b.dtype)
    if not set(types) <= {*FLOAT8} and set(types) != {other}:
        wanted = "float8_e4m3fn or float8_e5m2 for each operand, or "
        raise no_types(who, f"{wanted}{other.name} for both", a, b, hint=hint)


def no_product(who: str, expected: str, a: Any, b: Any, hint: str) -> Exception:
    return errors.ShapeError(
        f"{who}: the shapes do not form a product",
        expected=expected,
        got=f"{tuple(a.shape)} and {tuple(b.shape)}",
        hint=hint,
    )


def check_array(
    who: str,
    name: str,
    x: Any,
    shapes: Sequence[tuple[int, ...]],
    each: str,
    dtype: Any = None,
) -> None:
    """Checks an array's shape, one of several, and its element type, if it is given.

    Args:
      each: what its elements are, in the hint.
    """
    if tuple(x.shape) not in shapes:
        *others, last = map(str, dict.fromkeys(map(tuple, shapes)))
        raise errors.ShapeError(
            f"{who}: the shape of {name} does not match",
            expected=f"{', '.join(others)} or {last}" if others else last,
            got=tuple(x.shape),
            hint=each,
        )
    if dtype is not None and x.dtype != dtype:
        wanted = jnp.dtype(dtype).name
        raise errors.DTypeError(
            f"{who}: {name} is not of type {wanted}",
            expected=wanted,
            got=jnp.dtype(x.dtype).name,
            hint=f"convert it with astype(jnp.{wanted})",
        )


def check_bias(who: str, bias: Any, n: int) -> None:
    if bias is not None:
        each = "it is added to each row of the result"
        check_array(who, "the bias", bias, [(n,)], each)


def as_int32(who: str, what: str, x: Any) -> jax.Array:
    """Returns integers as int32; raises DTypeError for other arrays."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise errors.DTypeError(
            f"{who}: {what} are not integers",
            expected="int32, or another integer type",
            got=x.dtype,
            hint=f"{what}.astype(jnp.int32)",
        )
    return x.astype(jnp.int32)


def no_types(who: str, expected: str, *arrays: Any, hint: str = "") -> Exception:
    return errors.DTypeError(
        f"{who}: these element types are not supported",
        expected=expected,
        got=" and ".join(jnp.dtype(x.dtype).name for x in arrays if x is not None),
        hint=hint or "convert the operands with astype",
    )


def bits(dtype: Any) -> int:
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return info(dtype).bits


def padded(x: jax.Array, size: int, axis: int = -1) -> jax.Array:
    """Appends zeros along an axis up to a size."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths) if widths[axis][1] else x


def aligned(x: jax.Array, multiple: int = 1) -> jax.Array:
    """Appends zeros to rows, up to a multiple and to one of 16 bytes, for TMA."""
    step = math.lcm(multiple, 128 // bits(x.dtype))
    return padded(x, plgpu.align_to(x.shape[-1], step))


def without_derivative(run: Any, refusal: Exception) -> Any:
    """Returns a function of arrays that refuses to be differentiated."""
    call = jax.custom_jvp(lambda *operands: run(*operands))

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise refusal

    return call


def no_derivative(who: str, rounding: str) -> Exception:
    """Returns the error that a product of rounded operands has no derivative."""
    return errors.UnsupportedError(
        f"{who}: there is no derivative",
        expected="a call that is not differentiated",
        got="jax.grad, jax.jvp or jax.vjp of it",
        hint=f"wrap the {rounding} and the product in a jax.custom_vjp",
    )


_kernels: list[Any] = []


def cached(make_kernel: Any) -> Any:
    """Keeps what a function of static arguments returns: traced kernels."""
    kept = functools.lru_cache(maxsize=256)(make_kernel)
    _kernels.append(kept)
    return kept


def clear_cache() -> None:
    """Forgets traced kernels; for measurements of tracing."""
    for kept in _kernels:
        kept.cache_clear()


def array(value: Any, what: str) -> jax.Array:
    """Accepts arrays of JAX, tracers among them, and of NumPy, which become JAX's.

    Without `jax_enable_x64` NumPy's 64-bit types are narrowed to 32 bits, as
    `jax.numpy` does.
    """
    if isinstance(value, jax.Array):
        return value
    hint = "pass jnp.asarray(...)"
    if isinstance(value, (np.ndarray, np.generic)):
        # NumPy has objects, text and dates, too.
        with contextlib.suppress(TypeError):
            return jnp.asarray(value)
        hint = "JAX has no such element type: convert it with astype"
    elif hasattr(value, "shape") and not isinstance(value, type):
        hint = "for shapes alone, wrap the call in jax.eval_shape"
    raise expect.wrong_type(what, "an array", "an array of JAX or NumPy", value, hint)


def number_or_array(value: Any, what: str) -> Any:
    if isinstance(value, type) or not hasattr(value, "shape"):
        return expect.number(value, what)
    return array(value, what)


def positive(what: str, name: str, value: float | None, hint: str) -> None:
    """Refuses a factor that is not a positive finite number; None is a default."""
    if value is not None and not 0 < value < math.inf:
        raise errors.ArgumentError(
            f"{what}: {name} is not a positive number",
            expected="a positive number, or None for the default",
            got=value,
            hint=hint,
        )


# Annotations of parameters, with their rules.
Positive = Annotated[int, expect.integer(1)]
Strip = Annotated[int, expect.integer(1, hint="strip is a number of tiles, e.g. 8")]
# Buffers of a ring: one is released when the next product has started.
Stages = Annotated[
    int, expect.integer(2, hint="four hide the latency of copies on an H200")
]
# Rows, columns and depth of a tile of 16-bit types. wgmma: M is a multiple of 64, N at
# most 256, K a multiple of 16; TMA's 16-byte rows and the swizzle need N in multiples
# of 16.
_NO_OTHERS = "the tensor core supports no others"
TileM = Annotated[int, expect.multiple(64, hint=_NO_OTHERS)]
TileN = Annotated[int, expect.multiple(16, 256, hint=_NO_OTHERS)]
TileK = Annotated[int, expect.multiple(16, hint=_NO_OTHERS)]
Array = Annotated[Any, array]
Factor = Annotated[Any, expect.optional(number_or_array)]
Interpret = Annotated[
    bool | plgpu.InterpretParams | None,
    expect.optional(
        expect.instance(
            bool,
            plgpu.InterpretParams,
            written="True, False or plgpu.InterpretParams(...)",
        )
    ),
]


def vary_alike(operands: Any) -> Any:
    """Converts a tree of arrays to vary over the same axes of `jax.shard_map`.

    The derivatives of a product vary where any operand does, and JAX takes such a
    derivative of an operand that varies over fewer axes for a mistake. It does not
    know that they are to be added up: that is the derivative of this conversion.
    """
    axes = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(operands)]
    union = frozenset[str]().union(*axes)

    def convert(x: Any) -> Any:
        missing = union - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(convert, operands) if union else operands
