# SPDX-License-Identifier: Apache-2.0
"""Global memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import arch, errors, expect
from pallas_gpu.types.spaces.memory_space import (
    MemorySpace,
    ScratchType,
    declares,
    static_shape,
)
from pallas_gpu.types.spaces.resource import GmemArray, Sharing, Storage
from pallas_gpu.types.transforms import itemsize_bits
from pallas_gpu.types.values import element_type


@dataclasses.dataclass(frozen=True, kw_only=True)
class GmemStorage(Storage):
    """A scratch array in GMEM with initial contents.

    Attributes:
      initial: what all elements are at first.
      kept: whether it outlives a launch.
    """

    initial: bool | int | float
    kept: bool = False

    def __str__(self) -> str:
        return f"init={self.initial}" + ", kept=True" * self.kept


class Gmem(MemorySpace):
    """Global memory: arguments and results of a kernel, row-major, and scratch.

    `GMEM(shape, dtype)` declares an array that exists during one launch. Wherever it is
    declared, all CTAs of the launch have the same one; with `jax.vmap`, all of one
    instance. Its contents are undefined at first, unless `init` is given, and it keeps
    them when a scope that declares it ends: CTAs have to order their accesses as those
    to a result. A hidden result of the launch provides the memory.

    PTX: .global. Since: sm_90. As `memory_space` of a `BlockSpec` it leaves the array
    where it is.

    Args:
      shape: positive static sizes.
      dtype: element type.
      init: a number that all elements are when the launch starts; None: undefined.
      kept: elements may also be what the last launch of the kernel has left. Other
        devices may access the array before this one has started the kernel.

    Raises:
      ShapeError, DTypeError: no array can have this shape or type.
      ArgumentError, ArgumentTypeError: `init` is no number of this type, or is missing
        where an array is kept.
      MemorySpaceError: an argument that belongs to another space.

      >>> totals = plgpu.GMEM((128,), jnp.float32, init=0)
    """

    name = "GMEM"
    unit = "bytes"
    has_addresses = True
    undrawn = "GMEM is row-major; an accumulator has Layout.WGMMA"
    declared_by = "pass an argument or a result, or declare plgpu.GMEM(shape, dtype)"

    @declares(init=expect.anything, kept=expect.boolean)
    def __call__(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        init: float | None = None,
        kept: bool = False,
    ) -> ScratchType:
        sizes = static_shape(self, shape)
        if init is None and not kept:
            return ScratchType(self, sizes, dtype)
        element_type(dtype, "GMEM: dtype")
        storage = GmemStorage(initial=_number(init, jnp.dtype(dtype)), kept=kept)
        return ScratchType(self, sizes, dtype, storage)

    def size(self, aval: Any) -> int:
        return -(-math.prod(aval.shape) * itemsize_bits(aval.dtype) // 8)

    def budget(self, target: arch.GpuTarget) -> int:
        return target.memory_bytes

    def check(self, shape: tuple[int, ...], dtype: Any, storage: Storage) -> None:
        element_type(dtype, "GMEM: dtype")

    def gmem_array(self, aval: Any) -> GmemArray:
        shape, dtype = tuple(aval.shape), jnp.dtype(aval.dtype)
        initial = getattr(aval.storage, "initial", None)
        kept = getattr(aval.storage, "kept", False)
        return GmemArray(shape, dtype, initial, Sharing.INSTANCE, kept)


def _number(value: Any, dtype: np.dtype) -> bool | int | float:
    """Returns the initial value of elements, a number that their type has."""
    if not isinstance(value, (bool, int, float, np.number, np.bool_)):
        raise expect.wrong_type(
            "GMEM: init", "a number", "a Python number", value,
            "store other contents in the kernel, or pass them as an argument",
        )  # fmt: skip
    number = value.item() if isinstance(value, np.generic) else value
    if not jnp.issubdtype(dtype, jnp.floating):
        with np.errstate(all="ignore"):
            held = np.asarray(number).astype(dtype).astype(np.float64)
        if held != number:
            raise errors.ArgumentError(
                "GMEM: the element type does not have the number init",
                expected=f"a number of type {dtype.name}",
                got=number,
                hint="init=0 is a number of every type",
            )
    return number
