# SPDX-License-Identifier: Apache-2.0
"""What the host allocates for kernels: arrays to be written, and semaphores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import expect
from pallas_gpu.types import values

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

    Issued by: the host.

    Args:
      x: pytree of arrays, references or `jax.ShapeDtypeStruct`.

    Raises:
      ArgumentTypeError: a leaf without shape and type.
    """
    return jax.tree.map(lambda leaf: jax.new_ref(empty(leaf.shape, leaf.dtype)), x)


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
