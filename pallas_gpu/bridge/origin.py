# SPDX-License-Identifier: Apache-2.0
"""Where the author defined the function that a jaxpr stems from."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import _jax


def located[**P, T](function: Callable[P, T], jaxpr: Any) -> Callable[P, T]:
    """Gives a function the line, for messages, of the one that was traced to a jaxpr.

    A default of JAX's, such as an index map that the author left out, gives none.
    """
    name, _, line = _jax.source_of(jaxpr).rpartition(" at ")
    if not is_default(jaxpr):
        path, _, number = line.rpartition(":")
        where = f"{_jax.short_path(path)}:{number} ({name})"
        function.defined_at = where  # type: ignore[attr-defined]
    return function


def is_default(jaxpr: Any) -> bool:
    """Whether the author did not write the function that was traced to a jaxpr."""
    _, at, line = _jax.source_of(jaxpr).rpartition(" at ")
    return not at or line.startswith(os.path.dirname(jax.__file__))


def with_names(function: Callable[..., Any], names: Any) -> Callable[..., Any]:
    """Gives a function of positional arguments the parameters' names of the author's.

    Arguments in a pytree have names such as `refs[0]`, which are no identifiers.
    """
    given = [str(name) for name in names]
    words = [n if n.isidentifier() else f"ref_{i}" for i, n in enumerate(given)]
    if len(set(words)) == len(words):
        kind = inspect.Parameter.POSITIONAL_ONLY
        parameters = [inspect.Parameter(word, kind) for word in words]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function
