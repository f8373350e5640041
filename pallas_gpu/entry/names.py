# SPDX-License-Identifier: Apache-2.0
"""The names by which an author's function knows its references."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax


def parameter_names(
    f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[str]:
    """Returns a name for each leaf of `(args, kwargs)` in a call `f(*args, **kwargs)`.

    A leaf in a pytree has the parameter's name and its path: `buffers[0]`. The name is
    empty for an argument that the signature does not admit; the call reports that.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        (tuple(args), kwargs), is_leaf=lambda x: hasattr(x, "to_ref")
    )
    positional, rest = _positional(f)
    names = []
    for (kind, key, *path), _ in leaves:
        if kind.idx == 1:
            name = str(key.key)
        elif key.idx < len(positional):
            name = positional[key.idx]
        else:
            name = f"{rest}[{key.idx - len(positional)}]" if rest else ""
        names.append(name + jax.tree_util.keystr(tuple(path)) if name else "")
    return names


def _positional(f: Callable[..., Any]) -> tuple[list[str], str]:
    """Returns the positional parameters, and the name of `*args` or an empty one."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return [], ""
    kinds = inspect.Parameter
    named = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    rest = [p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL]
    return [p.name for p in parameters if p.kind in named], "".join(rest)
