# SPDX-License-Identifier: Apache-2.0
"""Instructions of inline PTX that work on registers alone.

Each function computes what the PTX ISA says of the instruction whose text was emitted;
approximations are computed in float64 and rounded, so they are closer than the
hardware's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

_TINY = np.float32(np.finfo(np.float32).tiny)


def _flush(x: np.ndarray) -> np.ndarray:
    """`.ftz`: subnormal numbers become zeros of their sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def _special(function: Callable[[np.ndarray], np.ndarray], *, ftz: bool) -> Callable:
    def compute(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.uint32).view(np.float32)
        x = _flush(x) if ftz else x
        with np.errstate(all="ignore"):
            y = function(x.astype(np.float64)).astype(np.float32)
        y = _flush(y) if ftz else y
        return y.view(np.uint32)

    return compute


# PTX ISA, "Floating Point Instructions".
_SPECIAL: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}
_FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def _from_float8(kind: str) -> Callable:
    dtype = _FLOAT8[kind]

    def compute(x: np.ndarray) -> np.ndarray:
        pair = np.ascontiguousarray(x.astype(np.uint16)).view(dtype)
        return pair.astype(np.float16).view(np.uint32)

    return compute


def _to_float8(kind: str) -> Callable:
    dtype = _FLOAT8[kind]
    largest = np.float32(ml_dtypes.finfo(dtype).max)

    def compute(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        pair = np.stack([lower, upper], axis=-1).astype(np.uint32).view(np.float32)
        # `.satfinite`: what is larger becomes the largest; NaN stays NaN.
        pair = np.clip(pair, -largest, largest)
        return pair.astype(dtype).view(np.uint16)[..., 0]

    return compute


def _table() -> dict[str, Callable]:
    rows: dict[str, Callable] = {}
    for name, function in _SPECIAL.items():
        rows[f"{name}.approx.f32"] = _special(function, ftz=False)
        if name != "tanh":
            rows[f"{name}.approx.ftz.f32"] = _special(function, ftz=True)
    for kind in _FLOAT8:
        rows[f"cvt.rn.f16x2.{kind}x2"] = _from_float8(kind)
        rows[f"cvt.rn.satfinite.{kind}x2.f32"] = _to_float8(kind)
    return rows


_INSTRUCTIONS = _table()
_SINGLE = re.compile(r"\s*([\w.]+)\s+\$0((?:\s*,\s*\$\d+)+)\s*;\s*")


def compute(text: str, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
    """The bits that one instruction gives, None where the text is anything else.

    Args:
      text: the template; `$0` is the result, and the inputs are numbered behind it.
      inputs: bits of each operand, in any integer type.
    """
    match = _SINGLE.fullmatch(text)
    function = match and _INSTRUCTIONS.get(match[1])
    if not match or not function:
        return None
    numbers = [int(n) for n in re.findall(r"\$(\d+)", match[2])]
    return function(*(inputs[n - 1] for n in numbers))
