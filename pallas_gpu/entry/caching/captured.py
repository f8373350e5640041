# SPDX-License-Identifier: Apache-2.0
"""What a kernel's body captures: the Python values that its trace depends on.

A call traces its body again if a global variable or a variable of an enclosing function
has changed since, as it would if nothing was kept.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
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
_MISSING = object()


@dataclasses.dataclass(eq=False, slots=True)
class _Same:
    """An object that is compared by identity, and kept so that its id is not reused."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Watched:
    """Where a key of `captured` was read. As long as this holds, the key does.

    It takes a tenth of the time of another key.

    Attributes:
      variables: mappings with a name, and what it was bound to.
      cells: variables of enclosing functions, and what they were bound to.
      functions: with their code and the defaults of their arguments.
      sizes: dicts with their lengths.
      is_complete: False if the key has the contents of what changes in place.
      visited: the ids of functions and objects whose contents the key has.
    """

    def __init__(self, is_complete: bool = True):
        self.variables: list[tuple[Mapping[Any, Any], Any, Any]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.functions: list[tuple[types.FunctionType, Any, Any]] = []
        self.sizes: list[tuple[dict[Any, Any], int]] = []
        self.is_complete = is_complete
        self.visited: set[int] = set()

    def holds(self) -> bool:
        """Whether everything is the same object as before, as far as that says it."""
        if not self.is_complete:
            return False
        for mapping, name, value in self.variables:
            if mapping.get(name, _MISSING) is not value:
                return False
        for cell, value in self.cells:
            if _content(cell) is not value:
                return False
        for f, code, defaults in self.functions:
            if f.__code__ is not code or f.__defaults__ is not defaults:
                return False
        return all(len(mapping) == size for mapping, size in self.sizes)

    def read(self, mapping: Mapping[Any, Any], name: Any) -> Any:
        """Returns what a name is bound to, `_MISSING` if to nothing."""
        value = mapping.get(name, _MISSING)
        self.variables.append((mapping, name, value))
        return value


def captured(
    functions: tuple[Callable[..., Any], ...], watched: Watched | None = None
) -> tuple[Any, ...]:
    """Returns a key that differs if what the functions capture differs.

    It contains the values of global variables, of variables of enclosing functions and
    of default arguments, of these functions and of those that they refer to by such a
    variable. Of modules and other objects it contains the attributes that a function
    names. An object that changes in another way is the same object.

    Args:
      functions: of the author.
      watched: gets what the key was read from.
    """
    watched = watched or Watched()
    return tuple(key for f in functions for key in _function(f, watched))


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


def _function(function: Any, watched: Watched) -> Iterator[Any]:
    while isinstance(function, functools.partial):
        yield _value((function.args, function.keywords), (), watched)
        function = function.func
    if not isinstance(function, _FUNCTIONS):
        yield from _wrapped(function, watched)
        watched.is_complete = False  # its class may get another `__call__`
        function = getattr(function, "__call__", None)  # noqa: B004 - to look into it
    if isinstance(function, types.MethodType):
        code = getattr(function.__func__, "__code__", None)
        names = {} if code is None else _names_of(code)
        # An object may refer to its own methods.
        if id(function.__self__) not in watched.visited:
            watched.visited.add(id(function.__self__))
            yield _value(function.__self__, names, watched)
        function = function.__func__
    if not isinstance(function, types.FunctionType) or id(function) in watched.visited:
        return
    watched.visited.add(id(function))
    yield from _wrapped(function, watched)
    if str(function.__module__).partition(".")[0] in _FIXED:
        return
    code, defaults = function.__code__, function.__defaults__
    watched.functions.append((function, code, defaults))
    names = _names_of(code)
    yield _Same(code)
    yield _value(defaults, names, watched)
    yield _value(function.__kwdefaults__, names, watched)
    for cell in function.__closure__ or ():
        content = _content(cell)
        watched.cells.append((cell, content))
        yield None if content is _MISSING else _value(content, names, watched)
    for name in names:
        value = watched.read(function.__globals__, name)
        if value is not _MISSING:
            yield name, _value(value, names, watched)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _wrapped(function: Any, watched: Watched) -> Iterator[Any]:
    """Yields the keys of the function that a decorator has wrapped."""
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        yield from _function(inner, watched)


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


def _value(value: Any, names: Any, watched: Watched, depth: int = 0) -> Any:
    """Returns a hashable key of a captured value."""
    # What most calls see, before the tests that are slower.
    if value is None:
        return types.NoneType
    if type(value) is types.ModuleType and value.__name__.partition(".")[0] in _FIXED:
        return _Same(value)
    inner = functools.partial(_value, names=names, watched=watched, depth=depth + 1)
    match value:
        case bool() | int() | float() | complex() | str() | bytes():
            # 1, 1.0 and True are equal, 0.0 and -0.0 as well.
            return type(value), repr(value)
        case np.ndarray() | np.generic() if value.nbytes <= _BYTES:
            watched.is_complete &= isinstance(value, np.generic)
            return str(value.dtype), value.shape, value.tobytes()
        case jax.core.Tracer():
            # A value that the body uses becomes an operand.
            return _TRACED_REF if mutable.is_mutable(value) else jax.core.Tracer
        case jax.Array() | types.BuiltinFunctionType():
            return _Same(value)
        case tuple() | list() if depth < _DEPTH:
            watched.is_complete &= isinstance(value, tuple)
            return type(value), tuple(map(inner, value))
        case dict() if depth < _DEPTH:
            watched.sizes.append((value, len(value)))
            return tuple((inner(k), inner(watched.read(value, k))) for k in value)
        case types.FunctionType() | types.MethodType() | functools.partial():
            return _Same(value), tuple(_function(value, watched))
    attributes = getattr(value, "__dict__", None)
    if depth >= _DEPTH or attributes is None:
        return _Same(value)
    read = ((name, watched.read(attributes, name)) for name in names)
    return _Same(value), tuple((n, inner(x)) for n, x in read if x is not _MISSING)
