# SPDX-License-Identifier: Apache-2.0
"""The values in the environment of the equation loop.

Arrays are `RegisterArray`s or `Deferred`s; a scalar is a `Splat` of shape (). The
handles below represent references.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors, types
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.addressing import Distance


@dataclasses.dataclass(frozen=True)
class GmemHandle:
    """An operand or result of the kernel.

    Attributes:
      buffer_index: position among the kernel's buffers.
      shape: shape of the whole buffer, batch axes first.
      lead: index for each batch axis.
      listed: the buffer has the addresses of the array on all devices.
    """

    buffer_index: int
    shape: tuple[int, ...]
    dtype: np.dtype
    lead: tuple[ir.Value, ...]
    listed: bool = False


@dataclasses.dataclass(frozen=True)
class BarrierHandle:
    """One barrier declaration.

    Attributes:
      offset_bytes: of its first barrier in the block's SMEM.
      slot: index of its first barrier in the block.
      distance: from the barriers of a warp to those of the next one; None for
        barriers of the block.
    """

    offset_bytes: int
    barrier: types.Barrier
    slot: int
    distance: Distance | None = None

    @property
    def keys(self) -> tuple[int, ...]:
        """Names the words of its parity bits in the register state."""
        return self.barrier.parity_keys(self.slot)


@dataclasses.dataclass(frozen=True)
class AccumulatorHandle:
    """An accumulator; its values are register state.

    Attributes:
      key: names it in the register state.
      zeros: its state before anything is stored or multiplied.
    """

    key: Any
    ref_shape: tuple[int, ...]
    dtype: np.dtype
    zeros: Any = dataclasses.field(default=None, compare=False)

    @property
    def keys(self) -> tuple[Any, ...]:
        """Its one key."""
        return (self.key,)


def is_scalar(value: Any) -> bool:
    """True for a scalar."""
    return isinstance(value, regs.Splat) and value.shape == ()


def scalar_value(value: Any) -> ir.Value:
    """Returns the SSA value of a scalar."""
    if not is_scalar(value):
        raise errors.InternalError(f"{type(value).__name__} is not a scalar")
    return value.value


def as_shape(value: Any, shape: Sequence[int]) -> Any:
    """Returns a value broadcast to a shape, along axes of size one or from a scalar."""
    shape = tuple(shape)
    if value.shape == shape:
        return value
    dims = range(len(shape) - len(value.shape), len(shape))
    return regs.broadcast_in_dim(value, shape, tuple(dims))


def numpy_dtype(aval: Any) -> np.dtype:
    """Returns an abstract value's dtype as numpy's."""
    return np.dtype(jnp.dtype(aval.dtype))
