# SPDX-License-Identifier: Apache-2.0
"""What a kernel's body captures: the Python values that its trace depends on.

A call traces its body again if a global variable or a variable of an enclosing function
has changed since, as it would if nothing was kept.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from pallas_gpu.entry import mutable

_FUNCTIONS = types.FunctionType, types.MethodType
# Their functions do not change; what they capture is not looked at.
_FIXED = ("jax", "jaxlib", "numpy", "pallas_gpu", "builtins", "functools", "math")
# Stands for a `jax.Ref` that is being traced.
_TRACED_REF = "a traced jax.Ref"
# Containers that are nested more deeply are compared by identity.
_DEPTH = 4
# Larger NumPy arrays, too: they are no constants of a kernel.
_BYTES = 1 << 16


@dataclasses.dataclass(eq=False, slots=True)
class _Same:
    """An object that is compared by identity, and kept so that its id is not reused."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def captured(functions: tuple[Callable[..., Any], ...]) -> tuple[Any, ...]:
    """Returns a key that differs if what the functions capture differs.

    It contains the values of global variables, of variables of enclosing functions and
    of default arguments, of these functions and of those that they refer to by such a
    variable. Of modules and other objects it contains the attributes that a function
    names. An object that changes in another way is the same object.
    """
    seen: set[int] = set()
    return tuple(key for f in functions for key in _function(f, seen))


def has_mutable(key: Any) -> bool:
    """Whether a key that `captured` has returned contains a `jax.Ref`."""
    pending = [key]
    while pending:
        part = pending.pop()
        if isinstance(part, tuple):
            pending.extend(part)
        elif isinstance(part, _Same):
            if mutable.is_mutable(part.value):
                return True
        elif isinstance(part, str) and part == _TRACED_REF:
            return True
    return False


def _function(function: Any, seen: set[int]) -> Iterator[Any]:
    while isinstance(function, functools.partial):
        yield _value((function.args, function.keywords), (), seen)
        function = function.func
    if not isinstance(function, _FUNCTIONS):
        yield from _wrapped(function, seen)
        function = getattr(function, "__call__", None)  # noqa: B004 - to look into it
    if isinstance(function, types.MethodType):
        code = getattr(function.__func__, "__code__", None)
        names = {} if code is None else _names_of(code)
        # An object may refer to its own methods.
        if id(function.__self__) not in seen:
            seen.add(id(function.__self__))
            yield _value(function.__self__, names, seen)
        function = function.__func__
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    yield from _wrapped(function, seen)
    if str(function.__module__).partition(".")[0] in _FIXED:
        return
    code = function.__code__
    names = _names_of(code)
    yield _Same(code)
    yield _value(function.__defaults__, names, seen)
    yield _value(function.__kwdefaults__, names, seen)
    for cell in function.__closure__ or ():
        try:
            yield _value(cell.cell_contents, names, seen)
        except ValueError:  # not assigned yet
            yield None
    variables = function.__globals__
    for name in names:
        if name in variables:
            yield name, _value(variables[name], names, seen)


def _wrapped(function: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the keys of the function that a decorator has wrapped."""
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        yield from _function(inner, seen)


@functools.lru_cache(maxsize=1024)
def _names_of(code: types.CodeType) -> dict[str, None]:
    """Returns the names of `_names`, in order."""
    return dict.fromkeys(sorted(_names(code)))


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the global variables and attributes that a code names, nested code too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _value(value: Any, names: Any, seen: set[int], depth: int = 0) -> Any:
    """Returns a hashable key of a captured value."""
    # What most calls see, before the tests that are slower.
    if value is None:
        return types.NoneType
    if type(value) is types.ModuleType and value.__name__.partition(".")[0] in _FIXED:
        return _Same(value)
    inner = functools.partial(_value, names=names, seen=seen, depth=depth + 1)
    match value:
        case bool() | int() | float() | complex() | str() | bytes():
            # 1, 1.0 and True are equal, 0.0 and -0.0 as well.
            return type(value), repr(value)
        case np.ndarray() | np.generic() if value.nbytes <= _BYTES:
            return str(value.dtype), value.shape, value.tobytes()
        case jax.core.Tracer():
            # A value that the body uses becomes an operand.
            return _TRACED_REF if mutable.is_mutable(value) else jax.core.Tracer
        case jax.Array() | types.BuiltinFunctionType():
            return _Same(value)
        case tuple() | list() if depth < _DEPTH:
            return type(value), tuple(map(inner, value))
        case dict() if depth < _DEPTH:
            return tuple((inner(k), inner(v)) for k, v in value.items())
        case types.FunctionType() | types.MethodType() | functools.partial():
            return _Same(value), tuple(_function(value, seen))
    attributes = getattr(value, "__dict__", {})
    if depth >= _DEPTH:
        return _Same(value)
    return _Same(value), tuple(
        (name, inner(attributes[name])) for name in names if name in attributes
    )
