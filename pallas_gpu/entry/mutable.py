# SPDX-License-Identifier: Apache-2.0
"""Mutable arrays of JAX, `jax.Ref`, that kernels update in place.

The kernel primitive takes and returns arrays. A reference is read before the launch and
written after it, by JAX's own operations: these are effects that JAX orders and keeps
under every transformation. Under `jax.jit` XLA lets contents and result share memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import scope


def is_mutable(x: Any) -> bool:
    """True for a `jax.Ref`, also a traced one, and for a view of one."""
    return type(types.values.abstract(_base(x))) is _jax.AbstractRef


def is_view(x: Any) -> bool:
    """True for a part of a reference, which JAX otherwise takes for a pytree."""
    return isinstance(x, _jax.TransformedRef)


def contents(ref: Any) -> jax.core.ShapedArray:
    """Returns the type of what a reference or a view contains."""
    return jax.core.ShapedArray(tuple(ref.shape), ref.dtype)


def initial(x: Any, name: str) -> Any:
    """Returns what a launch reads: the contents of a reference, or an array itself.

    Raises:
      UnsupportedError: a reference of a kernel that is being traced.
    """
    if is_mutable(x):
        return x[...]
    if types.base_aval(x) is None:
        return x
    raise errors.UnsupportedError(
        f"kernel {name}: an argument is a reference of another kernel",
        expected="arrays, or what jax.new_ref returns",
        got=types.describe(x),
        hint="call the function with the reference instead of the kernel",
        where=scope.called_at(),
    )


def update(ref: Any, value: jax.Array, name: str) -> None:
    """Writes a reference after the launch.

    Raises:
      UnsupportedError: the instances of a `jax.vmap` share the reference.
    """
    try:
        ref[...] = value
    except Exception as error:
        if "vmapped value" not in str(error):
            raise
        raise errors.UnsupportedError(
            f"kernel {name}: under jax.vmap all instances write the same jax.Ref",
            expected="a reference with an axis for the instances",
            got=f"{expect.shown(ref)}, which is not batched",
            hint="pass the reference to the function that is vmapped, or return the "
            "new value as a result",
            where=scope.called_at(),
        ) from None


def require_no_overlap(args: Sequence[Any], written: Iterable[Any], name: str) -> None:
    """Raises for two views of one array if a kernel writes one of them.

    Each view is read before the launch and written after it: what the kernel stores
    through one of them would be lost to the other.
    """
    for ref in written:
        if any(x is not ref and _base(x) is _base(ref) for x in args):
            raise errors.UnsupportedError(
                f"kernel {name}: two arguments are parts of one jax.Ref, and one of "
                "them is written",
                expected="the reference itself, once or more often; or one part of it",
                got=expect.shown(ref),
                hint="pass the reference itself, and take the parts in the body",
                where=scope.called_at(),
            )


def _base(ref: Any) -> Any:
    while isinstance(ref, _jax.TransformedRef):
        ref = ref.ref
    return ref
