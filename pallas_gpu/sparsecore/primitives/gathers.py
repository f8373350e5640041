# SPDX-License-Identifier: Apache-2.0
"""Loads and stores in VMEM whose lanes have positions, masks or sums of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.sparsecore.primitives._define import (
    array_type,
    define,
    mask_of,
    same_shape,
    vector,
)
from pallas_gpu.sparsecore.types import VMEM
from pallas_gpu.types import values

__all__ = [
    "addupdate",
    "addupdate_compressed",
    "addupdate_scatter",
    "load_expanded",
    "load_gather",
    "store_compressed",
    "store_scatter",
]

_REF = ("ref",)
_OPERANDS = dict.fromkeys(("ref", "indices", "x", "mask"), expect.anything)


def _at_indices(operands: Any) -> Any:
    return array_type(operands["indices"][0].shape, operands["ref"].dtype)


def _at_mask(operands: Any) -> Any:
    return array_type(operands["mask"].shape, operands["ref"].dtype)


load_gather_p = define("load_gather", "gathers", result=_at_indices, reads=_REF)
store_scatter_p = define("store_scatter", "gathers", reads=_REF, writes=_REF)
load_expanded_p = define("load_expanded", "gathers", result=_at_mask, reads=_REF)
store_compressed_p = define("store_compressed", "gathers", reads=_REF, writes=_REF)


@expect.arguments(ref=expect.anything, indices=expect.anything, mask=expect.anything)
def load_gather(
    ref: Any, indices: Sequence[jax.Array], *, mask: jax.Array | None = None
) -> jax.Array:
    """Loads an element for each lane, from a position of its own.

    Issued by: a vector subcore.

    Args:
      ref: a reference in VMEM to f32 or i32.
      indices: for each dimension of `ref` a vector of int32, all of one size.
      mask: bools: other lanes load nothing, and their elements are undefined.

    Returns:
      A vector of the size of the indices.

    Raises:
      MemorySpaceError: `ref` is not in VMEM.
      ShapeError, DTypeError: another count, size or type of indices, mask, elements.

    Example:
      >>> x = plsc.load_gather(table_vmem, [rows, columns])
    """
    ref, indices = _gathered(ref, indices, "load_gather")
    mask = mask_of(mask, indices[0].shape, "load_gather")
    return ops.bind(load_gather_p, {"ref": ref, "indices": indices, "mask": mask})


@expect.arguments(**_OPERANDS)
def store_scatter(
    ref: Any,
    indices: Sequence[jax.Array],
    x: jax.Array,
    *,
    mask: jax.Array | None = None,
) -> None:
    """Stores an element of each lane, at a position of its own.

    Where lanes have one position, the element of the highest lane remains.

    Issued by: a vector subcore.

    Args:
      ref: a reference in VMEM to f32 or i32.
      indices: for each dimension of `ref` a vector of int32, all of one size.
      x: a vector of the size of the indices and the type of `ref`.
      mask: bools: other lanes store nothing.

    Raises:
      As `load_gather`, also for `x`.
    """
    _scatter(ref, indices, x, mask, "store_scatter", add=False)


@expect.arguments(**_OPERANDS)
def addupdate_scatter(
    ref: Any,
    indices: Sequence[jax.Array],
    x: jax.Array,
    *,
    mask: jax.Array | None = None,
) -> None:
    """Adds an element of each lane to that at a position of its own.

    Where lanes have one position, all are added, the lowest lane first.

    Issued by: a vector subcore.

    Args:
      ref, indices, x, mask: as of `store_scatter`.

    Raises:
      As `store_scatter`.
    """
    _scatter(ref, indices, x, mask, "addupdate_scatter", add=True)


def _scatter(ref: Any, indices: Any, x: Any, mask: Any, who: str, *, add: bool) -> None:
    ref, indices = _gathered(ref, indices, who)
    shape = indices[0].shape
    x = vector(x, who, "the value", (ref.dtype,))
    same_shape(x, shape, who, "the value")
    mask = mask_of(mask, shape, who)
    operands = {"ref": ref, "indices": indices, "value": x, "mask": mask}
    ops.bind(store_scatter_p, operands, add=add)


def _gathered(ref: Any, indices: Any, who: str) -> tuple[Any, tuple[Any, ...]]:
    """Returns the reference and the indices of a gather or scatter, after checks."""
    ref = _in_vmem(ref, who)
    if jnp.dtype(ref.dtype) not in (jnp.float32, jnp.int32):
        raise errors.DTypeError(
            f"{who}: the reference has elements of another type",
            expected="float32 or int32",
            got=types.describe(ref),
            hint="keep the array as int32 and use plsc.bitcast, plsc.unpack",
        )
    if not expect.is_sequence(indices) or len(indices) != len(ref.shape):
        count = len(indices) if expect.is_sequence(indices) else 1
        raise errors.ShapeError(
            f"{who}: not an index for each dimension",
            expected=f"a list of {len(ref.shape)} vectors of int32",
            got=f"{count} for {types.describe(ref)}",
            hint=f"plsc.{who}(ref, [rows, columns])",
        )
    found = tuple(vector(i, who, "an index", (jnp.int32,)) for i in indices)
    for index in found[1:]:
        same_shape(index, found[0].shape, who, "an index")
    return ref, found


def _in_vmem(ref: Any, who: str) -> types.RefView:
    aval = ops.require_ref(ref, who, "the operand")
    if aval.memory_space is not VMEM:
        raise errors.MemorySpaceError(
            f"{who}: the operand is in the wrong memory",
            expected="a reference in VMEM",
            got=types.describe(ref),
            hint=getattr(aval.memory_space, "copy_first", "") or VMEM.declared_by,
        )
    return types.as_view(ref)


@expect.arguments(ref=expect.anything, mask=expect.anything)
def load_expanded(ref: Any, *, mask: jax.Array) -> jax.Array:
    """Loads consecutive elements to the lanes of a mask.

    The i-th true lane gets `ref[i]`; the other lanes are undefined.

    Issued by: a vector subcore.

    Args:
      ref: a vector in VMEM, of as many elements as the mask.
      mask: bools.

    Returns:
      A vector of the size of the mask.

    Raises:
      MemorySpaceError: `ref` is not in VMEM.
      ShapeError, DTypeError: `ref` is not a vector of that size, the mask is not bools.
    """
    ref, mask = _expanded(ref, mask, "load_expanded")
    return ops.bind(load_expanded_p, {"ref": ref, "mask": mask})


@expect.arguments(ref=expect.anything, x=expect.anything, mask=expect.anything)
def store_compressed(ref: Any, x: jax.Array, *, mask: jax.Array) -> None:
    """Stores the lanes of a mask to consecutive elements.

    The i-th true lane is stored to `ref[i]`; elements behind the last one remain.

    Issued by: a vector subcore.

    Args:
      ref: a vector in VMEM, of as many elements as the mask.
      x: a vector of that size and type.
      mask: bools.

    Raises:
      As `load_expanded`, also for `x`.
    """
    _compressed(ref, x, mask, "store_compressed", add=False)


@expect.arguments(ref=expect.anything, x=expect.anything, mask=expect.anything)
def addupdate_compressed(ref: Any, x: jax.Array, *, mask: jax.Array) -> None:
    """Adds the lanes of a mask to consecutive elements.

    The i-th true lane is added to `ref[i]`; elements behind the last one remain.

    Issued by: a vector subcore.

    Args:
      ref, x, mask: as of `store_compressed`.

    Raises:
      As `store_compressed`.
    """
    _compressed(ref, x, mask, "addupdate_compressed", add=True)


def _compressed(ref: Any, x: Any, mask: Any, who: str, *, add: bool) -> None:
    ref, mask = _expanded(ref, mask, who)
    x = vector(x, who, "the value", (ref.dtype,))
    same_shape(x, mask.shape, who, "the value")
    operands = {"ref": ref, "value": x, "mask": mask}
    ops.bind(store_compressed_p, operands, add=add)


def _expanded(ref: Any, mask: Any, who: str) -> tuple[Any, jax.Array]:
    ref = _in_vmem(ref, who)
    mask = vector(mask, who, "the mask", (jnp.bool_,))
    same_shape(ref, mask.shape, who, "the reference")
    return ref, mask


@expect.arguments(ref=expect.anything)
def addupdate(ref: Any, x: values.Array) -> None:
    """Adds a vector to one in VMEM: one store, which adds.

    Issued by: a vector subcore.

    Args:
      ref: a reference in VMEM, or a part of one, of the shape of a register.
      x: a value of that shape and type.

    Raises:
      MemorySpaceError: `ref` is not in VMEM.
      ShapeError, DTypeError: the value has another shape or type.
    """
    _in_vmem(ref, "addupdate").addupdate(x)
