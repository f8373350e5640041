# SPDX-License-Identifier: Apache-2.0
"""Poison: the content of fresh memory, and values in registers that depend on it.

Fresh memory is NaN for floats and a recognizable pattern for integers. Reading it is no
mistake yet, because a `where` may remove what was read: the value carries a mask of its
poisoned elements. Pure computations have masks for their results, SMEM stores them, and
everything else that uses such a value is an error: a branch, an address, an operand of
a rule, a store to a result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors

# Signalling NaNs (IEEE 754: exponent all ones, quiet bit clear) that spell A5 in a
# dump; the eight-bit formats can only represent a plain NaN.
_NAN_BITS = {
    "float64": 0x7FF4_A5A5_A5A5_A5A5,
    "float32": 0x7FA5_A5A5,
    "float16": 0x7DA5,
    "bfloat16": 0x7FA5,
    "float8_e5m2": 0x7D,
    "float8_e4m3fn": 0x7F,
}


@functools.cache
def poison(dtype: Any) -> np.ndarray:
    """Returns the content of fresh memory of a dtype, as an array of shape ()."""
    dtype = jnp.dtype(dtype)
    if dtype.name in _NAN_BITS:
        word = np.dtype(f"u{dtype.itemsize}")
        return np.array(_NAN_BITS[dtype.name], word).view(dtype)
    if dtype.kind in "iu":
        pattern = np.frombuffer(b"\xa5" * dtype.itemsize, dtype)
        return pattern.reshape(())
    if dtype == np.bool_:
        return np.array(True)
    if jnp.issubdtype(dtype, jnp.integer):
        # 5 of the pattern's 4 bits, 1 of its 2.
        return np.array(1 if "2" in dtype.name else 5).astype(dtype)
    return np.array(np.nan if jnp.issubdtype(dtype, jnp.inexact) else 1).astype(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where elements without a value come from.

    Attributes:
      what: the read or the copy, for messages.
      got: the first of the elements.
      hint: how to avoid it.
      where: the kernel's line.
      buffer, element: the array's name, and the first of its elements.
    """

    what: str
    got: str
    hint: str
    where: str | None
    buffer: str | None = None
    element: Sequence[int] | None = None

    def error(self) -> errors.UninitializedReadError:
        """Returns the error for a use of the elements."""
        return errors.UninitializedReadError(
            self.what,
            expected="an earlier store or copy to it",
            got=self.got,
            hint=self.hint,
            where=self.where,
        ).about(buffer=self.buffer, elements=self._elements())

    def _elements(self) -> tuple[tuple[int, int], ...] | None:
        if self.element is None:
            return None
        return tuple((int(i), int(i) + 1) for i in self.element)


class Poisoned:
    """A value some of whose elements are poison.

    Whoever is unaware of masks converts it to an array or a number, or compares it,
    which raises.

    Attributes:
      value: all elements, the poisoned ones arbitrary.
      mask: True where an element is poison.
      origin: where they come from.
    """

    __slots__ = ("mask", "origin", "value")

    def __init__(self, value: Any, mask: np.ndarray, origin: Origin):
        self.value = value
        self.mask = mask
        self.origin = origin

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise self.origin.error()

    __array__ = __bool__ = __int__ = __index__ = __float__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore
    __hash__ = None  # type: ignore[assignment]


def apply(fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Evaluates a pure computation some of whose operands are poisoned.

    An element of a result is poison where it depends on the content of poison: the
    computation is repeated with other contents, and such elements differ. So masks need
    no rule per operation, and `where`, `& 0` or a loop over a part are exact. Equality
    is noticed with 0, and not with every number.
    """
    origin = next(x.origin for x in operands if isinstance(x, Poisoned))
    with np.errstate(all="ignore"):
        first, *others = (
            np.asarray(fn(*[_filled(x, sign) for x in operands]))
            for sign in (None, 1, -1, 0)
        )
    mask = functools.reduce(np.bitwise_or, [_differs(first, x) for x in others])
    value = first[()] if first.ndim == 0 else first
    return Poisoned(value, mask, origin) if mask.any() else value


def _filled(x: Any, sign: int | None) -> Any:
    """Returns an operand with other contents of its poisoned elements.

    Neighbours get extremes of either sign that differ from each other, so that neither
    a comparison nor a difference of two of them hides that they are arbitrary.

    Args:
      x: the operand.
      sign: of the first extreme; 0 for zeros, None for the contents that it has.
    """
    if not isinstance(x, Poisoned) or sign is None:
        return x.value if isinstance(x, Poisoned) else x
    value = np.array(x.value)
    index = np.arange(value.size).reshape(value.shape)
    low, high = _extremes(value.dtype)
    extreme = np.where((index + (sign > 0)) % 2, high, low) * (sign != 0)
    extreme -= np.sign(extreme) * ((index % 13 + 1) * (abs(extreme) / 64))
    value[x.mask] = extreme.astype(value.dtype)[x.mask]
    return value[()] if value.ndim == 0 else value


def _extremes(dtype: Any) -> tuple[float, float]:
    if dtype == np.bool_:
        return 0.0, 1.0
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return float(info.min), float(info.max)
    limit = float(jnp.finfo(dtype).max)
    return -limit, limit


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.itemsize > 8:
        return np.asarray(a != b)
    word = np.dtype(f"u{a.dtype.itemsize}")
    differs = np.asarray(a.view(word) != b.view(word))
    if jnp.issubdtype(a.dtype, jnp.floating):
        differs &= ~(np.isnan(a) & np.isnan(b))
    return differs
