# SPDX-License-Identifier: Apache-2.0
"""What `kernel` and `pallas_call` return: a function over arrays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect
from pallas_gpu.entry import scope
from pallas_gpu.entry.caching import repeated

# Arguments of launches elsewhere, with what to write instead.
LAUNCH = {
    "num_warps": "pass num_threads=..., a number of warpgroups of 4 warps",
    "num_stages": "those of loops are num_stages=... of plgpu.loop, or of "
    "plgpu.CompilerParams; the buffers of a pipeline are max_concurrent_steps=... of "
    "plgpu.emit_pipeline in the body, or of the plgpu.CompilerParams of a pallas_call",
}
# Arguments of `kernel` and `pallas_call`, not of what they return.
_OPTIONS = ("compiler_params", "debug", "grid", "interpret", "num_threads")


class OverArrays:
    """A kernel as a function over arrays, with the name and docstring of its body.

    Tracebacks of its errors contain the user's frames only, as JAX's do, and errors
    without a line get that of the call. The body's parameters are references: the
    signature is that of the function, because JAX binds arguments to the signature it
    finds (`jax.custom_vjp`, `static_argnames`).
    """

    __wrapped__: Callable[..., Any]
    # What has `__getitem__` is an iterable for Python otherwise.
    __iter__ = None
    __contains__ = None

    def __init__(
        self,
        function: Callable[..., Any],
        body: Callable[..., Any],
        kept: repeated.Kept | None = None,
    ):
        functools.update_wrapper(self, body)
        if not hasattr(body, "__name__"):
            inner = body
            while isinstance(inner, functools.partial):
                inner = inner.func
            name = getattr(inner, "__name__", type(inner).__name__)
            self.__name__ = self.__qualname__ = name
        self.__signature__ = inspect.signature(function)
        self._function = function
        self._kept = kept

    def __reduce__(self) -> str:
        """Pickles by name, and copies to itself, as a function does."""
        return self.__qualname__

    @_jax.api_boundary
    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            if named:
                raise self._by_name(named)
            launch = None if self._kept is None else self._kept.launch(args)
            if launch is not None:
                return launch()
            return self._function(*args)
        except errors.PallasGpuError as error:
            error.with_location(scope.called_at())
            raise

    def __getitem__(self, grid: Any) -> Any:
        """Refuses a launch as in Triton."""
        name = self.__name__
        raise errors.ArgumentTypeError(
            f"{name} is indexed, but a kernel is called with arrays only",
            expected=f"{name}(x, ...), which returns the results",
            got=f"{name}[{expect.shown(grid)}]",
            hint="the grid is an argument of plgpu.kernel and plgpu.pallas_call: "
            "grid=(...), and with plgpu.kernel grid_names=(...)",
            where=scope.called_at(),
        )

    @property
    def lower(self) -> Any:
        """Refuses a request to compile what JAX has not been asked to compile."""
        raise AttributeError(
            f"a kernel has no attribute 'lower': jax.jit({self.__name__}).lower(...)",
            name="lower",
            obj=self,
        )

    def __repr__(self) -> str:
        where = scope.location(self.__wrapped__)
        return f"<kernel {self.__name__}{f' at {where}' if where else ''}>"

    def _by_name(self, named: dict[str, Any]) -> errors.ArgumentTypeError:
        """Returns the error for arguments by name, which no array of a kernel has."""
        key = next((key for key, x in named.items() if not _has_arrays(x)), None)
        hint = (
            'a dict of arrays is one argument, which the body reads as p["name"][...]'
        )
        if key in LAUNCH:
            hint = f"in plgpu.kernel and plgpu.pallas_call {LAUNCH[key]}"
        elif key in _OPTIONS:
            hint = f"{key}=... is an argument of plgpu.kernel or plgpu.pallas_call"
        elif key is not None:
            hint = (
                "a constant is a variable of the function around the body, or bound to "
                f"the body: functools.partial(body, {key}={expect.shown(named[key])})"
            )
        return errors.ArgumentTypeError(
            f"{self.__name__} is called with arguments by name",
            expected="arrays by position, in the order of the body's references",
            got=", ".join(f"{key}={expect.shown(x)}" for key, x in named.items()),
            hint=f"pass arrays by position; {hint}",
        )


def _has_arrays(x: Any) -> bool:
    return any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))
