# SPDX-License-Identifier: Apache-2.0
"""The emulator for all kernels of a program, whatever their `interpret` is.

The choice is a part of JAX's cache keys: a function is traced again under another.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from pallas_gpu import expect, types

_FORCED = jax.make_user_context(None)
_PARAMS = expect.optional(
    expect.instance(types.InterpretParams, written="plgpu.InterpretParams(...)")
)


# What a kernel's author says of its memory, also where other parameters are forced.
_OF_THE_KERNEL = (
    "inline_mgpu",
    "like_upstream",
    "out_of_bounds_reads",
    "partial_results",
    "uninitialized_memory",
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Observed(types.InterpretParams):
    """Parameters of the launches of a check.

    Attributes:
      recorder: what observes the launches. Those of two checks differ.
    """

    recorder: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Observed) and (
            self.recorder is other.recorder and self.plain() == other.plain()
        )

    def __hash__(self) -> int:
        return hash((id(self.recorder), self.plain()))

    def plain(self) -> types.InterpretParams:
        """Returns the same parameters without the recorder."""
        fields = dataclasses.fields(types.InterpretParams)
        return types.InterpretParams(**{f.name: getattr(self, f.name) for f in fields})

    def each_schedule(self) -> list[types.InterpretParams]:
        """Returns the parameters of every single run, which nothing observes."""
        return self.plain().each_schedule()


def forced(own: Any = None) -> types.InterpretParams | None:
    """Returns the parameters that replace a kernel's `interpret`, if any.

    Args:
      own: the kernel's.
    """
    params = _FORCED.value
    if not isinstance(params, Observed) or not isinstance(own, types.InterpretParams):
        return params
    given = {name: getattr(own, name) for name in _OF_THE_KERNEL}
    default = types.InterpretParams()
    changed = {n: x for n, x in given.items() if x != getattr(default, n)}
    return dataclasses.replace(params, **changed) if changed else params


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
