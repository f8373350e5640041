# SPDX-License-Identifier: Apache-2.0
"""What the host allocates for kernels: arrays to be written, and semaphores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import errors, expect
from pallas_gpu.entry import scope
from pallas_gpu.types import base_aval, values
from pallas_gpu.types.spaces.resource import Declaration, Resource

# The largest dimension that kernels can index.
_MAX_SIZE = 2**31 - 1


_SHARDING = expect.instance(
    jax.NamedSharding, jax.P, written='jax.NamedSharding(mesh, jax.P("x"))'
)


@expect.arguments(
    shape=expect.integers(0, _MAX_SIZE), out_sharding=expect.optional(_SHARDING)
)
def empty(
    shape: Sequence[int], dtype: values.ElementType, *, out_sharding: Any = None
) -> jax.Array:
    """Returns an array with undefined contents.

    Issued by: the host.

    Args:
      shape: sizes of the dimensions.
      dtype: element type.
      out_sharding: where it lies, as in `jax.lax.empty`: a `jax.sharding.NamedSharding`
        or `jax.P`; None leaves it to JAX.

    Raises:
      ArgumentError, ArgumentTypeError, DTypeError: an invalid shape or type.
    """
    return lax.empty(tuple(shape), dtype, out_sharding=out_sharding)


def _types(value: Any, what: str) -> Any:
    """Accepts pytrees of what has a shape and an element type."""
    for leaf in jax.tree.leaves(value):
        expect.arrays(leaf, what)
    return value


@expect.arguments(x=_types)
def empty_like(x: Any) -> Any:
    """Returns arrays with undefined contents, of the given shapes and types.

    Issued by: the host.

    Args:
      x: pytree of arrays, references or `jax.ShapeDtypeStruct`.

    Raises:
      ArgumentTypeError: a leaf without shape and type.
    """
    return jax.tree.map(lambda leaf: empty(leaf.shape, leaf.dtype), x)


@expect.arguments(x=_types)
def empty_ref_like(x: Any) -> Any:
    """Returns mutable references to arrays with undefined contents.

    Issued by: the host; in a kernel for SparseCores a subcore, of which it is memory as
    of `jax.empty_ref`.

    Args:
      x: pytree of arrays, references or `jax.ShapeDtypeStruct`; in a kernel of
        references of the kernel, or declarations such as `plsc.VMEM(shape, dtype)`.

    Raises:
      ArgumentTypeError: a leaf without shape and type.
      UnsupportedError: an array with a tiling or transforms of its own.
    """
    return jax.tree.map(_ref_like, x)


def _ref_like(leaf: Any) -> Any:
    ref = leaf.to_ref() if isinstance(leaf, Declaration) else base_aval(leaf)
    shaped = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    space = getattr(ref, "memory_space", None)
    if not scope.in_kernel() or not isinstance(space, Resource):
        return jax.new_ref(empty_like(shaped))
    if str(getattr(ref, "storage", "")):
        raise errors.UnsupportedError(
            "empty_ref_like of an array that is not stored row by row",
            expected="a declaration without tiling or transforms",
            got=ref.str_short(),
            hint="declare the array in scratch_types, or for run_scoped",
        )
    return jax.empty_ref(shaped, memory_space=space)


@expect.arguments(shape=expect.integers(1, _MAX_SIZE))
def alloc_semaphore(shape: int | Sequence[int] = ()) -> jax.Ref:
    """Returns semaphores that are zero and outlive a kernel, which is passed them.

    Issued by: the host.

    In a body they are semaphores in GMEM, and nothing else accesses them: signals that
    one kernel does not wait for are there for the next one. They need not be zero when
    a kernel ends. Those of one kernel are declared: `SemaphoreType.REGULAR`.

    Args:
      shape: positive sizes; `()` (default) is a single semaphore.

    Returns:
      A `jax.Ref` of int32, an argument of kernels.

    Raises:
      ArgumentError, ArgumentTypeError: an invalid shape.

    Example:
      >>> ready = plgpu.alloc_semaphore()
      >>> producer(x, ready)
    """
    return jax.new_ref(jnp.zeros(shape, jnp.int32))
