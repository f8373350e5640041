# SPDX-License-Identifier: Apache-2.0
"""How an error leaves the emulator under `jit`: with the kernel's line as traceback.

The launch is a callback, and JAX's runtime raises an error of its own. Its text is the
Python stack, outwards from the innermost frame of the traceback, and the exception. A
traceback that ends in one frame without a caller makes it the kernel's line, followed
by the report.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import _jax, errors

_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+) \((?P<function>.+)\)")


def from_the_kernels_line[T](run: Callable[[], T]) -> T:
    """Calls a function; its errors have the kernel's line instead of our frames.

    The frames stay with `JAX_TRACEBACK_FILTERING=off`, as JAX's own do, and in errors
    of the package.
    """
    # Not a context manager: contextlib would restore the traceback.
    try:
        return run()
    except errors.PallasGpuError as error:
        if not _is_report(error):
            raise
        raise error.with_traceback(_traceback(error.where)) from None


def _is_report(error: BaseException) -> bool:
    """True for errors that say all that there is to say."""
    return (
        isinstance(error, errors.PallasGpuError)
        and not isinstance(error, errors.InternalError)
        and jax.config.jax_traceback_filtering != "off"
    )


def _traceback(where: str | None) -> types.TracebackType | None:
    """Returns a traceback of one frame, at `file:line (function)`."""
    place = _PLACE.match(where or "")
    if place is None:
        return None
    # The frame of a generator that is suspended has no caller. It refers to the
    # generator, which would otherwise be closed here.
    code = (lambda _: (yield)).__code__.replace(
        co_filename=place["file"],
        co_firstlineno=int(place["line"]),
        co_name=place["function"],
        co_qualname=place["function"],
    )
    kept: list[Any] = []
    suspended = types.FunctionType(code, {})(kept)
    kept.append(suspended)
    next(suspended)
    frame = suspended.gi_frame
    return types.TracebackType(None, frame, frame.f_lasti, int(place["line"]))


_jax.log_no_failed_callback(_is_report)
