# SPDX-License-Identifier: Apache-2.0
"""Shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import arch
from pallas_gpu.layouts.drawing.drawing import Drawable
from pallas_gpu.types.spaces.memory_space import (
    MemorySpace,
    ScratchType,
    declares,
    static_shape,
)
from pallas_gpu.types.spaces.resource import Storage
from pallas_gpu.types.transforms import Transform, smem_layout, transforms
from pallas_gpu.types.values import element_type


class Smem(MemorySpace):
    """Shared memory of one CTA: `SMEM(shape, dtype)` declares an array in it.

    PTX: .shared. Since: sm_90. Its contents are initially undefined.

    Args:
      shape: positive static sizes.
      dtype: element type.
      transforms: how the array is tiled and swizzled, a `TilingTransform` and a
        `SwizzleTransform`. By default they are inferred under Warpgroup semantics, and
        the array is row-major under Lane semantics.

    Returns:
      A declaration for `scratch_types` and `run_scoped`.

    Raises:
      ShapeError, DTypeError, LayoutError: SMEM cannot store such an array.
      MemorySpaceError: an argument that belongs to another space.

      >>> tile = plgpu.SMEM((64, 128), jnp.float32)
    """

    name = "SMEM"
    unit = "bytes"
    # TMA destinations need 128 bytes, a 128-byte swizzle repeats every 1024 bytes.
    # PTX ISA, "Shared memory alignment requirements" of tensor copies.
    alignment = 1024
    has_addresses = True
    has_unions = True
    declared_by = "declare it with plgpu.SMEM(shape, dtype)"

    @declares(transforms=transforms)
    def __call__(
        self, shape: Sequence[int], dtype: Any, *, transforms: Sequence[Transform] = ()
    ) -> ScratchType:
        storage = Storage(tuple(transforms))
        return ScratchType(self, static_shape(self, shape), dtype, storage)

    def size(self, aval: Any) -> int:
        return smem_layout(aval.shape, aval.dtype, aval.transforms).size_bytes

    def drawn(self, declaration: ScratchType) -> tuple[Drawable, tuple[int, ...]]:
        shape = declaration.shape
        return smem_layout(shape, declaration.dtype, declaration.transforms), shape

    def budget(self, target: arch.GpuTarget) -> int:
        return target.smem_bytes_per_block

    def check(self, shape: tuple[int, ...], dtype: Any, storage: Storage) -> None:
        element_type(dtype, "SMEM: dtype")
        smem_layout(shape, dtype, storage.transforms)
