# SPDX-License-Identifier: Apache-2.0
"""The emulator for all kernels of a program, whatever their `interpret` is.

The choice is a part of JAX's cache keys: a function is traced again under another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from pallas_gpu import expect, types

_FORCED = jax.make_user_context(None)
_PARAMS = expect.optional(
    expect.instance(types.InterpretParams, written="plgpu.InterpretParams(...)")
)


def forced() -> types.InterpretParams | None:
    """Returns the parameters that replace every kernel's `interpret`, if any."""
    return _FORCED.value


@expect.arguments(params=_PARAMS)
def force_gpu_interpret_mode(
    params: types.InterpretParams | None = types.InterpretParams(),  # noqa: B008
) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager: kernels that are called in it run in the emulator.

    Issued by: the host.

    Args:
      params: replaces `interpret` of every kernel. None: their own `interpret` decides.

    Raises:
      ArgumentTypeError: not parameters of the emulator.

    Example:
      >>> with plgpu.force_gpu_interpret_mode():
      ...     kernel(x)
    """
    return _forcing(params)


@contextlib.contextmanager
def _forcing(params: types.InterpretParams | None) -> Iterator[None]:
    with _FORCED(params):
        yield


@expect.arguments(params=_PARAMS)
def set_gpu_interpret_mode(
    params: types.InterpretParams | None = types.InterpretParams(),  # noqa: B008
) -> None:
    """Makes all kernels of the program run in the emulator from now on.

    Issued by: the host.

    Args:
      params: replaces `interpret` of every kernel. None: their own `interpret` decides.

    Raises:
      ArgumentTypeError: not parameters of the emulator.
    """
    _FORCED.set_global(params)
