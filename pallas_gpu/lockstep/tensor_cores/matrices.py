# SPDX-License-Identifier: Apache-2.0
"""Matrices of wgmma: where descriptors say that they lie in SMEM, and who has what.

From the PTX ISA ("Asynchronous Warpgroup Level Matrix Shared Memory Layout") and, for
what it has only as figures, CUTLASS's traits (mma_sm90_desc.hpp,
mma_traits_sm90_gmma.hpp). Each warp has 16 of the 64 rows of A and D.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np

from pallas_gpu.lockstep import accesses
from pallas_gpu.lockstep.copies.tensor_map import swizzled
from pallas_gpu.lockstep.engine import LANES
from pallas_gpu.lockstep.not_modelled import NotModelled

# Elements of matrices in registers, those of mma.sync too.
DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "tf32": np.dtype(np.float32),
    "f32": np.dtype(np.float32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "s4": np.dtype(ml_dtypes.int4),
    "u4": np.dtype(ml_dtypes.uint4),
    "s32": np.dtype(np.int32),
}
WARP_ROWS = 16  # rows of D that a warp has
_SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}  # the descriptor's code: span in bytes


def bits(kind: np.dtype) -> int:
    """The width of an element in a register."""
    return 4 if kind in (DTYPES["s4"], DTYPES["u4"]) else 8 * kind.itemsize


def exact(x: np.ndarray, kind: str) -> np.ndarray:
    """What the tensor core reads: of tf32 the low 13 bits are cut."""
    if kind != "tf32":
        return x
    cut = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)
    return cut.view(np.float32)


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A matrix descriptor (PTX ISA, "Matrix Descriptor Format"); sizes in bytes."""

    start: int
    leading: int
    stride: int
    span: int

    @classmethod
    def decode(cls, word: int) -> Descriptor:
        """From its 64 bits."""
        if word >> 49 & 7:
            raise NotModelled("a matrix descriptor with a base offset")
        leading, stride = ((word >> at & 0x3FFF) << 4 for at in (16, 32))
        return cls((word & 0x3FFF) << 4, leading, stride, _SWIZZLES[word >> 62 & 3])


def _offsets(
    rows: tuple[int, int], k: int, itemsize: int, d: Descriptor, transposed: bool
) -> np.ndarray:
    """[rows, k]: bytes from the start of the elements, before the swizzle.

    Units are 8 rows of 16 bytes without a swizzle, 8 rows of the span with one.
    """
    row = np.arange(*rows)[:, None]
    column = np.arange(k)[None]
    if not transposed:
        byte = column * itemsize
        if d.span == 16:
            inner = row % 8 * 16 + row // 8 * d.stride
            return inner + byte % 16 + byte // 16 * d.leading
        return row % 8 * d.span + row // 8 * d.stride + byte
    byte = row * itemsize
    if d.span == 16:
        inner = column % 8 * 16 + column // 8 * d.leading
        return inner + byte % 16 + byte // 16 * d.stride
    inner = column % 8 * d.span + column // 8 * d.stride
    return inner + byte % d.span + byte // d.span * d.leading


@functools.lru_cache(maxsize=512)
def smem_places(
    rows: tuple[int, int], k: int, itemsize: int, word: int, transposed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """[rows, k, bytes]: places of a matrix in the dynamic SMEM, and each place once."""
    d = Descriptor.decode(word)
    address = swizzled(d.start + _offsets(rows, k, itemsize, d, transposed), d.span)
    places = address[..., None] - accesses.SMEM_BASE + np.arange(itemsize)
    return places, np.unique(places)


# --- fragments ------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def d_places(warps: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """[lanes, n / 2] rows and columns of D that each thread has."""
    warp, lane = np.divmod(np.arange(LANES * warps), LANES)
    i = np.arange(n // 2)
    row = (WARP_ROWS * warp + lane // 4)[:, None] + 8 * (i // 2 % 2)
    return row, 8 * (i // 4) + (2 * (lane % 4))[:, None] + i % 2


@functools.lru_cache(maxsize=64)
def a_places(warps: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """[lanes, 4 e] rows and columns of A, e elements in each of four registers."""
    warp, lane = np.divmod(np.arange(LANES * warps), LANES)
    each = k // 8
    register, x = np.divmod(np.arange(4 * each), each)
    row = (WARP_ROWS * warp + lane // 4)[:, None] + 8 * (register % 2)
    column = (each * (lane % 4))[:, None] + 4 * each * (register // 2) + x
    return row, column
