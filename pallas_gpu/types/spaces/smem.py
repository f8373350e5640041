# SPDX-License-Identifier: Apache-2.0
"""Shared memory."""

from __future__ import annotations

from typing import Any

from pallas_gpu import arch
from pallas_gpu.types.spaces.memory_space import MemorySpace
from pallas_gpu.types.spaces.resource import Storage
from pallas_gpu.types.transforms import smem_layout


class Smem(MemorySpace):
    """Shared memory of one CTA; arrays are tiled and swizzled by their transforms."""

    name = "SMEM"
    unit = "bytes"
    # TMA destinations need 128 bytes, a 128-byte swizzle repeats every 1024 bytes.
    # PTX ISA, "Shared memory alignment requirements" of tensor copies.
    alignment = 1024
    declared_by = "declare it with plgpu.SMEM(shape, dtype)"
    options = ("transforms",)

    def size(self, aval: Any) -> int:
        return smem_layout(aval.shape, aval.dtype, aval.transforms).size_bytes

    def budget(self, target: arch.GpuTarget) -> int:
        return target.smem_bytes_per_block

    def check(self, shape: tuple[int, ...], dtype: Any, storage: Storage) -> None:
        smem_layout(shape, dtype, storage.transforms)
