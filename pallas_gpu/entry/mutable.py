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
    """Returns what a launch reads: the contents of a reference, or an array itself."""
    if is_mutable(x):
        return x[...]
    if types.base_aval(x) is None:
        return x
    raise errors.UnsupportedError(
        f"kernel {name}: an argument is a reference of another kernel",
        expected="arrays, or what jax.new_ref returns",
        got=types.describe(x),
        hint="call the function with the reference instead of the kernel",
    )


def update(refs: Sequence[tuple[Any, jax.Array]], name: str) -> None:
    """Writes references after the launch: pairs (reference, new contents).

    All results are batched alike. A reference that has fewer axes of `jax.vmap` is
    refused when it is written: it comes first, so that either all are written or none.
    """
    for ref, value in sorted(refs, key=lambda pair: _jax.unmapped(_base(pair[0]))[1]):
        _update(ref, _placed_like(ref, value), name)


def _update(ref: Any, value: jax.Array, name: str) -> None:
    try:
        ref[...] = value
    except Exception as error:
        if "vmapped value" not in str(error):
            raise
        raise errors.UnsupportedError(
            f"kernel {name}: under jax.vmap all instances write the same jax.Ref",
            expected="a reference with an axis for the instances",
            got=f"{expect.shown(ref)}, which is not batched",
            hint="give the reference an axis for the instances and pass it to the "
            "function that is vmapped, or return the new value as a result",
        ) from None


def _placed_like(ref: Any, value: Any) -> Any:
    """Puts an array where the contents of a reference are.

    The result of an eager call may be on one device, and JAX does not write it to a
    reference on several. Under `jax.jit` XLA places both.
    """
    array, _ = _jax.unmapped(_base(ref))
    if _jax.is_tracer(array) or _jax.is_tracer(_jax.unmapped(value)[0]):
        return value
    sharding = array.sharding
    if ref is not array and isinstance(sharding, jax.NamedSharding):
        # An instance or a part has other dimensions.
        sharding = jax.NamedSharding(sharding.mesh, jax.P())
    return jax.device_put(value, sharding)


def require_no_overlap(args: Sequence[Any], written: Iterable[Any], name: str) -> None:
    """Raises for two views of one array if a kernel writes one of them.

    Each view is read before the launch and written after it: what the kernel stores
    through one of them would be lost to the other. What `jax.vmap` passes to its
    instances is a view, too.
    """
    for ref in written:
        for x in args:
            if x is ref or _array(x) is not _array(ref):
                continue
            hint = "pass the reference itself, and take the parts in the body"
            if _base(x) is not _base(ref):
                hint = (
                    "an instance of jax.vmap has a part of the reference: pass what "
                    "the body reads of the others as an array, ref[...]"
                )
            raise errors.UnsupportedError(
                f"kernel {name}: two arguments are parts of one jax.Ref, and one of "
                "them is written",
                expected="the reference itself, once or more often; or one part of it",
                got=expect.shown(ref),
                hint=hint,
            )


def _base(ref: Any) -> Any:
    """Returns the reference of a view."""
    while isinstance(ref, _jax.TransformedRef):
        ref = ref.ref
    return ref


def _array(ref: Any) -> Any:
    """Returns the reference that the instances of `jax.vmap` have parts of."""
    return _jax.unmapped(_base(ref))[0]
