# SPDX-License-Identifier: Apache-2.0
"""Memory spaces, and the declarations of scratch memory that they build."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors
from pallas_gpu.types import refs
from pallas_gpu.types.transforms import Transform, smem_layout


class MemorySpace(enum.Enum):
    """Where a reference lives.

    A member is callable: `SMEM((64, 128), jnp.float16, transforms=(...))` declares a
    scratch array.

    * `GMEM`: global memory, row-major; arguments and results of a kernel.
    * `SMEM`: shared memory of one CTA.
    * `TMEM`: tensor memory of one SM (Blackwell).
    * `REGS`: registers; only as the space of accumulators.
    """

    GMEM = "gmem"
    SMEM = "smem"
    TMEM = "tmem"
    REGS = "regs"

    def __str__(self) -> str:
        return self.value

    def __call__(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        transforms: Sequence[Transform] = (),
        packed: bool | None = None,
        collective: bool | None = None,
        layout: Any = None,
    ) -> ScratchType:
        """Declares a scratch array in this space.

        Args:
          shape: static shape.
          dtype: element type.
          transforms: SMEM only: TilingTransform and SwizzleTransform.
          packed: TMEM only.
          collective: TMEM only.
          layout: TMEM only.

        Raises:
          MemorySpaceError: an argument does not belong to this space.
          LayoutError: the transforms do not fit the shape.
        """
        if self is not MemorySpace.SMEM and transforms:
            raise errors.MemorySpaceError(
                f"{self.name} takes no transforms",
                expected="transforms on SMEM alone",
                got=list(transforms),
                hint="drop the argument, or declare the array in SMEM",
                where=_jax.where_now(),
            )
        if self is not MemorySpace.TMEM and (packed, collective, layout) != (None,) * 3:
            raise errors.MemorySpaceError(
                f"{self.name} takes no packed, collective or layout",
                expected="these arguments on TMEM alone",
                got=f"packed={packed}, collective={collective}, layout={layout}",
                hint="drop the argument",
                where=_jax.where_now(),
            )
        try:
            return ScratchType(self, tuple(shape), jnp.dtype(dtype), tuple(transforms))
        except errors.PallasGpuError as error:
            raise error.with_location(_jax.where_now()) from None


@dataclasses.dataclass(frozen=True)
class ScratchType:
    """A declaration of scratch memory: space, shape, dtype, transforms."""

    memory_space: MemorySpace
    shape: tuple[int, ...]
    dtype: Any
    transforms: tuple[Transform, ...] = ()

    def __post_init__(self):
        if any(not isinstance(s, int) or s < 1 for s in self.shape):
            raise errors.ShapeError(
                f"{self.memory_space.name}: a shape needs positive static sizes",
                expected="positive Python integers",
                got=self.shape,
                hint="sizes have to be known when the kernel is traced",
            )
        if self.memory_space is MemorySpace.SMEM:
            smem_layout(self.shape, self.dtype, self.transforms)

    def to_ref(self) -> refs.KernelRef:
        """Returns a fresh abstract reference of this declaration."""
        return refs.KernelRef(
            jax.core.ShapedArray(self.shape, self.dtype),
            self.memory_space,
            transforms=self.transforms,
        )


GMEM = MemorySpace.GMEM
SMEM = MemorySpace.SMEM
TMEM = MemorySpace.TMEM
REGS = MemorySpace.REGS
