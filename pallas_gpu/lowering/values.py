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
from pallas_gpu.emitters import elementwise
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.addressing import Distance
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts import SmemLayout, TmemLayout
from pallas_gpu.layouts.window import Window


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

    @property
    def window(self) -> Window:
        """The reference in the buffer: one index on each batch axis."""
        return _behind(self.lead, self.shape)


@dataclasses.dataclass(frozen=True)
class SmemHandle:
    """An array in SMEM; internal if an operation declares it."""

    pointer: ir.Value
    layout: SmemLayout
    dtype: np.dtype
    internal: bool = False

    @property
    def window(self) -> Window:
        """The reference: all of the array."""
        return Window.whole(self.layout.shape)


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

    @property
    def ref_shape(self) -> tuple[int, ...]:
        """Shape of the array of barriers."""
        return self.barrier.shape


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


@dataclasses.dataclass(frozen=True)
class TmemHandle:
    """An array in TMEM.

    Attributes:
      ref_shape: shape of the reference.
      dtype: element type.
      first_column: in the TMEM of the block.
      layout: of its rows and columns.
    """

    ref_shape: tuple[int, ...]
    dtype: np.dtype
    first_column: int
    layout: TmemLayout


def _behind(lead: Sequence[ir.Value], shape: Sequence[int]) -> Window:
    rest = tuple(shape)[len(lead) :]
    starts, sizes = (*lead, *(0 for _ in rest)), (*(None for _ in lead), *rest)
    return Window.whole(shape).slice(starts, sizes)


def is_scalar(value: Any) -> bool:
    """True for a scalar."""
    return isinstance(value, regs.Splat) and value.shape == ()


def constant(value: Any, dtype: Any) -> regs.Splat:
    """Returns a constant scalar."""
    return elementwise.scalar(value, dtype)


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


@dataclasses.dataclass(frozen=True)
class Packed:
    """How a value that crosses a region's border is composed of SSA values."""

    dtype: np.dtype
    layout: Any = None  # of a register array; None for a scalar

    @property
    def types(self) -> list[ir.Type]:
        """Types of the SSA values."""
        if self.layout is not None:
            register = dtypes.vector_type(self.dtype, self.layout.vector_length)
            return [register] * self.layout.num_registers
        return [dtypes.mlir_type(self.dtype)]

    @property
    def count(self) -> int:
        """Number of SSA values."""
        return 1 if self.layout is None else self.layout.num_registers

    def unpack(self, ssa: Sequence[ir.Value]) -> Any:
        """Restores the value."""
        if self.layout is not None:
            return regs.RegisterArray(tuple(ssa), self.layout, self.dtype)
        return regs.Splat(ssa[0], self.dtype, ())


def pack(value: Any) -> tuple[list[ir.Value], Packed]:
    """Returns a value's SSA values and how to restore it."""
    if is_scalar(value):
        return [value.value], Packed(value.dtype)
    if isinstance(value, regs.RegisterArray):
        return list(value.values), Packed(value.dtype, layout=value.layout)
    raise errors.InternalError(f"{type(value).__name__} has no SSA values")
