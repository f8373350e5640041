# SPDX-License-Identifier: Apache-2.0
"""Which kernel is being traced; read by functions that ask for its grid."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.types import Mesh

_MESH: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar(
    "pallas_gpu_mesh", default=None
)


@contextlib.contextmanager
def tracing(mesh: Mesh) -> Iterator[None]:
    """Marks the extent in which a kernel's body is traced."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def current_mesh(who: str) -> Mesh:
    """Returns the mesh of the kernel that is being traced.

    Raises:
      KernelError: no kernel is being traced.
    """
    mesh = _MESH.get()
    if mesh is None:
        raise errors.KernelError(
            f"{who} is called outside of a kernel",
            expected="a call from a body that kernel() or pallas_call() traces",
            hint="move the call into the body",
            where=_jax.where_now(),
        )
    return mesh


def location(fn: Callable[..., Any]) -> str | None:
    """Returns `file:line (name)` of a function's definition."""
    fn = inspect.unwrap(getattr(fn, "func", fn))
    code = getattr(fn, "__code__", None)
    if code is None:
        return None
    return f"{code.co_filename}:{code.co_firstlineno} ({fn.__name__})"
