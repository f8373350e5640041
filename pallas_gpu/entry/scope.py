# SPDX-License-Identifier: Apache-2.0
"""The kernel that is being traced, for functions that use its grid."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import inspect
import os
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect
from pallas_gpu.types import Mesh

_Context = contextlib.AbstractContextManager[None]

_MESH: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar(
    "pallas_gpu_mesh", default=None
)

_POSITION: contextvars.ContextVar[tuple[tuple[Any, ...], tuple[Any, ...]] | None] = (
    contextvars.ContextVar("pallas_gpu_position", default=None)
)

# The decorators that the body has made and not applied, with the lines.
_DECORATORS: contextvars.ContextVar[dict[int, tuple[str, str | None]] | None] = (
    contextvars.ContextVar("pallas_gpu_decorators", default=None)
)

_IN_WARP: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "pallas_gpu_in_warp", default=False
)


@contextlib.contextmanager
def setting[T](variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Sets a context variable inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Python's garbage collector does not run inside.

    Most of what tracing and lowering make lives until they end. To visit it meanwhile,
    again and again, took a tenth of the time that a large kernel takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def tracing(mesh: Mesh) -> Iterator[None]:
    """Sets the current mesh while a kernel's body is traced."""
    with setting(_MESH, mesh), setting(_DECORATORS, {}):
        yield


def require_applied() -> None:
    """Raises KernelError for a `when(condition)` that no function was passed to."""
    for who, where in (_DECORATORS.get() or {}).values():
        raise errors.KernelError(
            f"{who} is called and decorates no function",
            expected=f"@plgpu.{who}(...) above a function",
            got=f"{who}(...) as a statement of its own",
            hint="write the @",
            where=where,
        )


def decorator(who: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run`, which decorates a function; see `require_applied`."""
    left = _DECORATORS.get()
    if left is None:
        return run
    number = max(left, default=0) + 1
    left[number] = who, _jax.where_now()

    def decorate(body: Callable[..., Any]) -> Any:
        left.pop(number, None)
        return run(body)

    return decorate


def at_position(indices: Sequence[Any], sizes: Sequence[Any]) -> _Context:
    """Sets the position on a grid of which a body sees one step after another."""
    return setting(_POSITION, (tuple(indices), tuple(sizes)))


def position() -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Returns the indices and sizes of that grid; None if there is none."""
    return _POSITION.get()


def one_warp() -> _Context:
    """Records that the function of a warp_map is being traced."""
    return setting(_IN_WARP, True)


def in_warp() -> bool:
    """True while the function of a warp_map is traced."""
    return _IN_WARP.get()


def in_kernel() -> bool:
    """True while a kernel's body is traced."""
    return _MESH.get() is not None


def current_mesh(who: str) -> Mesh:
    """Returns the mesh of the kernel that is being traced; raises where none is."""
    mesh = _MESH.get()
    if mesh is None:
        raise errors.KernelError(
            f"{who} is called outside a kernel",
            expected="a call from a body that kernel() or pallas_call() traces",
            got="a call outside a body",
            hint="move the call into the body; in one of JAX's own pl.pallas_call, use "
            "JAX's function of this name",
            where=_jax.where_now(),
        )
    return mesh


def call(who: str, body: Callable[..., Any], *refs: Any, **named_refs: Any) -> Any:
    """Calls the author's body; errors without a line get that of the author's code."""
    try:
        return body(*refs, **named_refs)
    except errors.PallasGpuError as error:
        error.with_location(raised_at(error))
        raise
    except TypeError:
        _require_signature(who, body, refs, named_refs)
        raise


def require_none(
    who: str,
    body: Callable[..., Any],
    result: Any,
    hint: str = "store to a reference, out_ref[...] = value; or carry it: lax.cond, "
    "loop(init_carry=...)",
) -> None:
    """Raises KernelError for a body that returns a value."""
    if result is not None:
        raise errors.KernelError(
            f"{who}: the body returns a value",
            expected="None",
            got=expect.shown(result),
            hint=hint,
            where=location(body),
        )


_ARGUMENTS_OF_A_KERNEL = (
    "the order is inputs, outputs, scratch: the call passes the inputs only, and "
    "returns the outputs; the body of a pipeline takes the indices first and a carry "
    "last"
)
_ARGUMENTS = {
    "when": "it takes none: @plgpu.when(condition) above def _():",
    "loop": "it takes the index, and with init_carry= the carry: "
    "@plgpu.loop(0, n, init_carry=x) above def result(i, carry):",
    "warp_map": "it takes the index of the warp, 0 to 3: def _(warp_id):",
    "nd_loop": "it takes the info, and with init_carry= the argument carry: "
    "def _(info, carry):",
}


def _require_signature(
    who: str, body: Callable[..., Any], refs: Any, named_refs: Any
) -> None:
    """Raises ArgumentTypeError for a body that references cannot be passed to."""
    kind = "arguments" if who in _ARGUMENTS else "references"
    mismatch = expect.signature_mismatch(body, refs, named_refs, kind)
    if mismatch is not None:
        raise errors.ArgumentTypeError(
            f"{who}: the body's signature does not match its {kind}",
            expected=f"a body with {mismatch[0]}",
            got=mismatch[1],
            hint=_ARGUMENTS.get(who, _ARGUMENTS_OF_A_KERNEL),
            where=location(body),
        ) from None


@contextlib.contextmanager
def locating(body: Callable[..., Any]) -> Iterator[None]:
    """Adds a line to errors without one: the author's that raised it, or the body's."""
    try:
        yield
    except errors.PallasGpuError as error:
        raise error.with_location(raised_at(error) or location(body)) from None


def called_from[T](fn: Callable[..., Any], call: Callable[[], T]) -> T:
    """Calls a function so that JAX records the line where `fn` is defined.

    What the package does on behalf of `fn` then has a line of the kernel's.
    """
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return call()
    frame = _CALL.__code__.replace(
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )
    return types.FunctionType(frame, {})(call)


# Of one line: lines of a code object are counted from its first one.
_CALL: Any = lambda call: call()  # noqa: E731


def raised_at(error: BaseException) -> str | None:
    """Returns `file:line (name)` of the user's innermost frame of an exception."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def called_at() -> str | None:
    """Returns `file:line (name)` of the user's line that is being executed.

    While JAX traces or lowers, it records only the lines of the current function; the
    stack contains those of the caller as well.
    """
    return _jax.where_now() or _innermost(traceback.extract_stack())


def _innermost(frames: Sequence[traceback.FrameSummary]) -> str | None:
    at = innermost(frames)
    if at is None:
        return None
    frame = frames[at]
    return f"{_jax.short_path(frame.filename)}:{frame.lineno} ({frame.name})"


def innermost(frames: Sequence[traceback.FrameSummary]) -> int | None:
    """Returns the position of the user's innermost frame."""
    outside = (os.path.dirname(jax.__file__), os.path.dirname(errors.__file__), "<")
    for at in reversed(range(len(frames))):
        file = frames[at].filename
        python = file.startswith(_LIBRARY) and "site-packages" not in file
        if not python and not file.startswith(outside):
            return at
    return None


# Modules of Python itself, such as contextlib.
_LIBRARY = os.path.dirname(os.__file__)


def location(fn: Callable[..., Any]) -> str | None:
    """Returns `file:line (name)` of a function's definition."""
    fn = inspect.unwrap(fn)
    while isinstance(fn, functools.partial):
        fn = inspect.unwrap(fn.func)
    if (defined_at := getattr(fn, "defined_at", None)) is not None:
        return str(defined_at)  # of a function that JAX has traced already
    code = getattr(fn, "__code__", None)
    if code is None or code.co_filename.startswith(os.path.dirname(errors.__file__)):
        return None  # a ready kernel: the line of its call says more
    return f"{_jax.short_path(code.co_filename)}:{code.co_firstlineno} ({fn.__name__})"


def traced_at(jaxpr: _jax.Jaxpr) -> str | None:
    """Returns `file:line (name)` of the author's function that was traced."""
    name, _, place = _jax.source_of(jaxpr).rpartition(" at ")
    if not name or place.startswith(os.path.dirname(errors.__file__)):
        return None
    file, _, line = place.rpartition(":")
    return f"{_jax.short_path(file)}:{line} ({name})"
