# SPDX-License-Identifier: Apache-2.0
"""Semaphores: declarations, and references to them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import arch, expect
from pallas_gpu.types.completion import shows
from pallas_gpu.types.refs import IndexableRef
from pallas_gpu.types.spaces.resource import Counters, Declaration, GmemArray, Sharing

# An i32 in GMEM, which red, atom and ld access.
SEMAPHORE_BYTES = 4


class Semaphores(Counters):
    """The semaphores of a launch, in GMEM that it adds to the kernel's arrays."""

    name = "SEMAPHORE"
    unit = "semaphores"
    word = "semaphore"
    declared_by = "declare it with plgpu.SemaphoreType.REGULAR"
    accessed_by = "semaphore_signal, semaphore_wait or semaphore_read"

    def budget(self, target: arch.GpuTarget) -> int:
        return target.memory_bytes // SEMAPHORE_BYTES

    def gmem_array(self, aval: Any) -> GmemArray:
        kept = aval.declaration.kind is SemaphoreType.BARRIER
        return GmemArray(tuple(aval.shape), jnp.dtype(jnp.int32), 0, Sharing.CTA, kept)


SEMAPHORES = Semaphores()


class SemaphoreRef(IndexableRef):
    """A reference to one semaphore or an array of them in GMEM."""

    __slots__ = ()

    @property
    def declaration(self) -> Semaphore:
        """Its kind and shape."""
        return self.details

    def str_short(self, short_dtypes=False, mesh_axis_types=False) -> str:
        return f"Semaphore{list(self.shape)}"


class _OfALaunch(Declaration):
    memory_space = SEMAPHORES


@shows("shape", "size")
@dataclasses.dataclass(frozen=True)
class Semaphore(_OfALaunch):
    """Declares one semaphore or an array of them: what a `SemaphoreType` returns.

    Attributes:
      shape: of the array; `()` is a single semaphore.
    """

    kind: SemaphoreType
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of semaphores."""
        return math.prod(self.shape)

    def to_ref(self) -> SemaphoreRef:
        aval = jax.core.ShapedArray(self.shape, jnp.int32)
        return SemaphoreRef(aval, SEMAPHORES, details=self)


class SemaphoreType(_OfALaunch, enum.Enum):
    """The types of semaphores: 32-bit counters in GMEM, zero when a kernel starts.

    A member declares one semaphore; called with a shape it declares an array of them.
    In `scratch_types` and `run_scoped` each CTA has its own; `get_global` returns one
    that all CTAs of a launch share. A semaphore has to be zero again when its scope or
    the kernel ends: the emulator reports one that is not.

    PTX: red, atom and ld with release and acquire semantics. Since: sm_90.

    * `REGULAR`: a semaphore, of a launch.
    * `BARRIER`: one that outlives a launch. Other devices may signal it before the
      kernel has started on this one: with it devices meet in a kernel with
      `CompilerParams(skip_device_barrier=True)`.

      >>> ready = plgpu.get_global(plgpu.SemaphoreType.REGULAR((4,)))
    """

    REGULAR = "regular"
    BARRIER = "barrier"

    @expect.arguments(
        lambda self, *_, **__: f"SemaphoreType.{self.name}",
        shape=expect.integers(1, hint="a semaphore array has one element or more"),
    )
    def __call__(self, shape: int | Sequence[int]) -> Semaphore:
        """Declares an array of semaphores.

        Args:
          shape: positive static sizes; `()` is a single semaphore.

        Raises:
          ArgumentError, ArgumentTypeError: sizes that are not positive integers.
        """
        return Semaphore(self, tuple(shape))  # type: ignore[arg-type]

    def to_ref(self) -> SemaphoreRef:
        return Semaphore(self).to_ref()
