# SPDX-License-Identifier: Apache-2.0
"""lax's operations that move elements, in NumPy: rows of `arithmetic.py`'s table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Function = Callable[..., Any]


def _concatenate(eqn: Any) -> Function:
    axis = eqn.params["dimension"]
    return lambda *arrays: np.concatenate(arrays, axis)


def _rev(eqn: Any) -> Function:
    axes = tuple(eqn.params["dimensions"])
    return lambda x: np.flip(x, axes)


def _pad(eqn: Any) -> Function:
    config, shape = eqn.params["padding_config"], eqn.invars[0].aval.shape
    stretched = [
        n + max(n - 1, 0) * interior
        for n, (_, _, interior) in zip(shape, config, strict=True)
    ]
    # The canvas has what is added; what is removed is cut from it afterwards.
    sizes = [
        n + max(low, 0) + max(high, 0)
        for n, (low, high, _) in zip(stretched, config, strict=True)
    ]
    within = tuple(
        slice(max(low, 0), max(low, 0) + n, interior + 1)
        for n, (low, _, interior) in zip(stretched, config, strict=True)
    )
    kept = tuple(
        slice(max(-low, 0), n - max(-high, 0))
        for n, (low, high, _) in zip(sizes, config, strict=True)
    )

    def compute(x: Any, value: Any) -> Any:
        canvas = np.full(sizes, value, x.dtype)
        canvas[within] = x
        return canvas[kept]

    return compute


def _part(eqn: Any, sizes: tuple[int, ...]) -> Callable[..., tuple[slice, ...]]:
    """A function of starts, which it clamps such that the slice is within bounds."""
    shape = eqn.invars[0].aval.shape

    def key(starts: tuple[Any, ...]) -> tuple[slice, ...]:
        first = [
            min(max(int(start), 0), n - size)
            for start, n, size in zip(starts, shape, sizes, strict=True)
        ]
        return tuple(slice(s, s + n) for s, n in zip(first, sizes, strict=True))

    return key


def _dynamic_slice(eqn: Any) -> Function:
    key = _part(eqn, eqn.outvars[0].aval.shape)
    return lambda x, *starts: x[key(starts)]


def _dynamic_update_slice(eqn: Any) -> Function:
    key = _part(eqn, eqn.invars[1].aval.shape)

    def compute(x: Any, part: Any, *starts: Any) -> Any:
        result = np.array(x)
        result[key(starts)] = part
        return result

    return compute


ROWS: dict[str, Callable[[Any], Function]] = {
    "concatenate": _concatenate,
    "rev": _rev,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}
