# SPDX-License-Identifier: Apache-2.0
"""Calls of functions that users pass, with an error for arguments that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_gpu import errors, expect


def call(who: str, f: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Calls a function.

    Raises:
      ArgumentTypeError: its signature does not match the arguments.
    """
    try:
        return f(*args, **named)
    except TypeError:
        _require_signature(who, f, args, named)
        raise


def _require_signature(who: str, f: Callable[..., Any], args: Any, named: Any) -> None:
    mismatch = expect.signature_mismatch(f, args, named, "arguments")
    if mismatch is not None:
        raise errors.ArgumentTypeError(
            f"{who}: the function's signature does not match its arguments",
            expected=f"a function of {mismatch[0]}",
            got=mismatch[1],
            hint="pass a function of these arguments",
        ) from None


def times(who: str, timer: Callable[..., Any], run: Callable[[], Any]) -> Any:
    """Returns the times that a user's timer measures, checked.

    Raises:
      ArgumentTypeError: they are not pairs of a name and a number.
    """
    found = call(who, timer, run)
    pairs: Any = found if expect.is_sequence(found) else (None,)
    if all(expect.is_sequence(p) and len(p) == 2 for p in pairs):
        named = [(name, expect.number(x, f"{who}: a time")) for name, x in pairs]
        if all(isinstance(name, str) for name, _ in named):
            return named
    raise expect.wrong_type(
        f"{who}: what the timer returned",
        "a sequence of kernels and their times",
        "[(name, milliseconds), ...]",
        found,
        "omit timer to measure with CUPTI",
    )
