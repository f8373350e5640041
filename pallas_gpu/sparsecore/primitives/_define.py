# SPDX-License-Identifier: Apache-2.0
"""`define` for operations of SparseCores, and what their public functions check."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.sparsecore.types import MACHINE
from pallas_gpu.types import values

define = functools.partial(registry.define, machine=MACHINE)

# The element types of registers whose lanes operations compare, sort or scan.
WORDS = (jnp.int32, jnp.uint32, jnp.float32)


def vector(x: Any, who: str, what: str, dtypes: Any = None) -> jax.Array:
    """Returns a value as a vector; raises unless it has one dimension and a dtype."""
    x = values.array(x, f"{who}: {what}")
    if x.ndim != 1 or x.size == 1:
        raise errors.ShapeError(
            f"{who}: {what} is not a vector",
            expected="one dimension of several elements",
            got=f"{x.dtype.name}{list(x.shape)}",
            hint="vectors are registers: plsc.get_sparse_core_info().num_lanes words",
        )
    if dtypes is not None and x.dtype not in [jnp.dtype(t) for t in dtypes]:
        raise errors.DTypeError(
            f"{who}: {what} has another element type",
            expected=" or ".join(jnp.dtype(t).name for t in dtypes),
            got=f"{x.dtype.name}{list(x.shape)}",
            hint="convert it with .astype",
        )
    return x


def mask_of(mask: Any, shape: tuple[int, ...], who: str) -> jax.Array | None:
    """Returns a mask as a value, or None; raises unless it is bools of a shape."""
    if mask is None:
        return None
    mask = vector(mask, who, "the mask", (jnp.bool_,))
    if mask.shape != shape:
        raise errors.ShapeError(
            f"{who}: the mask has another shape",
            expected=f"bool{list(shape)}",
            got=f"bool{list(mask.shape)}",
            hint="a mask has an element for each lane",
        )
    return mask


def same_shape(x: Any, shape: tuple[int, ...], who: str, what: str) -> None:
    """Raises ShapeError unless a value has the shape."""
    if tuple(x.shape) != tuple(shape):
        raise errors.ShapeError(
            f"{who}: {what} has another shape",
            expected=str(list(shape)),
            got=str(list(x.shape)),
            hint="the operands are vectors of one size",
        )


def array_type(shape: Any, dtype: Any) -> jax.core.ShapedArray:
    """Returns the type of a result."""
    return _jax.ShapedArray(tuple(shape), jnp.dtype(dtype))
