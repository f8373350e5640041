# SPDX-License-Identifier: Apache-2.0
"""Tensor maps: what a TMA descriptor says, and where a box lies in SMEM and GMEM.

From the PTX ISA ("Tensors") and the limits that the driver API states for
cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.not_modelled import NotModelled

# Element types as the launcher's runtime function numbers them.
_ELEMENTS: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    3: np.dtype(np.uint32),
    4: np.dtype(np.uint64),
    5: np.dtype(np.float16),
    6: np.dtype(np.float32),
    7: np.dtype(ml_dtypes.bfloat16),
    9: np.dtype(np.int32),
    10: np.dtype(np.int64),
}
# CUDA driver API, CUtensorMapDataType.
_DRIVER_ELEMENTS: dict[int, np.dtype] = {
    0: np.dtype(np.uint8),
    1: np.dtype(np.uint16),
    2: np.dtype(np.uint32),
    6: np.dtype(np.float16),
    7: np.dtype(np.float32),
    8: np.dtype(np.float64),
    9: np.dtype(ml_dtypes.bfloat16),
}
# Bits of the address that are exchanged: (first changed bit, number of bits); those
# that change them lie three bits above (PTX ISA, "Swizzling Modes").
_SWIZZLE_BITS = {16: 0, 32: 1, 64: 2, 128: 3}


def swizzled(address: np.ndarray, span_bytes: int) -> np.ndarray:
    """Where a byte lies that would lie at an address without a swizzle."""
    bits = _SWIZZLE_BITS[span_bytes]
    if not bits:
        return address
    return address ^ (address >> 7 & (1 << bits) - 1) << 4


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A descriptor; dimensions innermost first.

    Attributes:
      base: address in GMEM.
      dtype: of an element.
      sizes, box: in elements.
      strides: bytes between neighbours of each dimension.
      swizzle: span in bytes; 16 is none.
      nan_fill: whether elements outside are read as NaN.
    """

    base: int
    dtype: np.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    nan_fill: bool = False

    @classmethod
    def encoded_by_driver(cls, base, element, sizes, strides, box, modes) -> TensorMap:
        """From the arguments of cuTensorMapEncodeTiled: innermost first, in bytes.

        Raises:
          PtxError: it refuses them.
        """
        interleave, swizzle, promotion, fill = modes
        if element not in _DRIVER_ELEMENTS or interleave or promotion:
            raise NotModelled(f"a tensor map of elements {element} and modes {modes}")
        if not (0 <= swizzle <= 3 and 0 <= fill <= 1):
            raise PtxError(f"cuTensorMapEncodeTiled refuses modes {modes}")
        dtype = _DRIVER_ELEMENTS[element]
        made = cls(
            base, dtype, tuple(sizes), (dtype.itemsize, *strides), tuple(box),
            16 << swizzle, bool(fill),
        )  # fmt: skip
        made._check()
        return made

    @classmethod
    def encode(cls, base, code, sizes, strides, swizzle, box) -> TensorMap:
        """From what the host passes: dimensions outermost first, strides in elements.

        Raises:
          PtxError: cuTensorMapEncodeTiled refuses it.
        """
        if code not in _ELEMENTS or swizzle not in _SWIZZLE_BITS:
            raise PtxError(f"a tensor map of elements {code}, swizzle {swizzle}")
        dtype = _ELEMENTS[code]
        inner = [s * dtype.itemsize for s in strides[::-1]]
        made = cls(
            base, dtype, tuple(sizes[::-1]), tuple(inner), tuple(box[::-1]), swizzle
        )
        made._check()
        return made

    def _check(self) -> None:
        size, row_bytes = self.dtype.itemsize, self.box[0] * self.dtype.itemsize
        fine = 1 <= len(self.sizes) <= 5 and self.strides[0] == size
        fine &= self.base % 16 == 0 and all(1 <= n <= 1 << 32 for n in self.sizes)
        fine &= all(s % 16 == 0 and 0 <= s < 1 << 40 for s in self.strides[1:])
        fine &= all(1 <= n <= 256 for n in self.box) and row_bytes % 16 == 0
        fine &= self.swizzle == 16 or row_bytes <= self.swizzle
        if not fine:
            raise PtxError(f"cuTensorMapEncodeTiled refuses {self}")

    @property
    def rank(self) -> int:
        """Number of coordinates of a copy."""
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return int(np.prod(self.box)) * self.dtype.itemsize

    @property
    def outside(self) -> np.ndarray:
        """[bytes]: what a load reads of an element outside of the tensor."""
        fill = np.array(np.nan if self.nan_fill else 0).astype(self.dtype)
        return np.frombuffer(fill.tobytes(), np.uint8)

    def in_smem(self, address: int) -> np.ndarray:
        """[elements, bytes]: addresses of a box's bytes, innermost first."""
        if address % 128:
            raise PtxError(f"a box at {address:#x} of SMEM is not aligned to 128 bytes")
        row_bytes = self.box[0] * self.dtype.itemsize
        if self.swizzle > 16 and row_bytes != self.swizzle:
            raise NotModelled("a box whose rows are shorter than the swizzle's span")
        places = _sequence(self.bytes)
        places = swizzled(address + places, self.swizzle)
        return places.reshape(-1, self.dtype.itemsize)

    def check_start(self, start: tuple[int, ...], store: bool) -> None:
        """Raises where an H200 reports an illegal instruction (measured)."""
        if start[0] * self.dtype.itemsize % 16:
            raise PtxError(f"a copy at {start}: not a multiple of 16 bytes")
        if store and min(start) < 0:
            raise PtxError(f"a copy to GMEM at {start}, before the tensor")

    def in_gmem(self, start: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """[elements]: offsets from the base, and which lie within the tensor."""
        offset = np.zeros((), np.int64)
        inside = np.ones((), bool)
        for extent, stride, size, first in zip(
            self.box, self.strides, self.sizes, start, strict=True
        ):
            index = first + np.arange(extent, dtype=np.int64)
            offset = index.reshape(-1, *[1] * offset.ndim) * stride + offset
            within = (index >= 0) & (index < size)
            inside = within.reshape(-1, *[1] * inside.ndim) & inside
        return offset.reshape(-1), inside.reshape(-1)


class RowsMap(TensorMap):
    """A map of rows, of which a copy moves four (PTX ISA, "tile::gather4").

    Coordinates are the first column and four rows; in SMEM the rows are adjacent.
    """

    @classmethod
    def of(cls, tensor_map: TensorMap) -> RowsMap:
        """The same descriptor, in a copy of rows.

        Raises:
          PtxError: it has another rank or box than such copies need.
        """
        if len(tensor_map.sizes) != 2 or tensor_map.box[1] != 1:
            raise PtxError(f"a copy of four rows through {tensor_map}")
        fields = dataclasses.fields(tensor_map)
        return cls(**{x.name: getattr(tensor_map, x.name) for x in fields})

    @property
    def rank(self) -> int:
        return 5

    @property
    def bytes(self) -> int:
        return 4 * super().bytes

    def in_gmem(self, start: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        column, *rows = start
        found = [super(RowsMap, self).in_gmem((column, row)) for row in rows]
        offsets, inside = zip(*found, strict=True)
        return np.concatenate(offsets), np.concatenate(inside)


@dataclasses.dataclass(frozen=True)
class WindowsMap(TensorMap):
    """A map in im2col mode; its box are channels and pixels (PTX ISA, "im2col mode").

    A copy has the coordinates of its first pixel, and the offsets that it adds to those
    of all its pixels.

    Attributes:
      lower, upper: of each dimension but the channels and the images, the first pixel,
        and the distance of the last one from the end.
    """

    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()

    @classmethod
    def encoded(cls, base, element, sizes, strides, corners, box, modes) -> WindowsMap:
        """From the arguments of cuTensorMapEncodeIm2col, innermost first, in bytes.

        Raises:
          PtxError: it refuses them.
        """
        interleave, swizzle, promotion, fill = modes
        if element not in _DRIVER_ELEMENTS or interleave or promotion or fill:
            raise NotModelled(f"an im2col map of elements {element} and modes {modes}")
        dtype = _DRIVER_ELEMENTS[element]
        made = cls(
            base, dtype, tuple(sizes), (dtype.itemsize, *strides), tuple(box),
            16 << swizzle, False, *map(tuple, corners),
        )  # fmt: skip
        made._check()
        return made

    def _check(self) -> None:
        dataclasses.replace(self, box=(self.box[0], 1))._check_tiles()
        limit = 1 << 16 // (len(self.sizes) - 2) - 1
        fine = 3 <= len(self.sizes) <= 5 and 1 <= self.box[1] <= 1024
        fine &= all(-limit <= n < limit for n in (*self.lower, *self.upper))
        if not fine:
            raise PtxError(f"cuTensorMapEncodeIm2col refuses {self}")

    def _check_tiles(self) -> None:
        super()._check()

    @property
    def rank(self) -> int:
        return 2 * len(self.sizes) - 2

    def in_gmem(self, start: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        sizes, (channels, pixels) = self.sizes, self.box
        channel, *place = start[: len(sizes)]
        offsets = (*start[len(sizes) :], 0)
        last = [n - 1 + b for n, b in zip(sizes[1:-1], self.upper, strict=True)]
        c = channel + np.arange(channels)
        found = []
        for _ in range(pixels):
            at = [a + b for a, b in zip(place, offsets, strict=True)]
            pairs = list(zip(at, sizes[1:], self.strides[1:], strict=True))
            within = all(0 <= a < n for a, n, _ in pairs) & (c >= 0) & (c < sizes[0])
            first = sum(a * stride for a, _, stride in pairs)
            found.append((first + c * self.strides[0], within))
            place[0] += 1
            for axis, end in enumerate(last):
                if place[axis] > end:
                    place[axis] = self.lower[axis]
                    place[axis + 1] += 1
        offset, inside = zip(*found, strict=True)
        return np.concatenate(offset), np.concatenate(inside)


@functools.lru_cache(maxsize=32)
def _sequence(count: int) -> np.ndarray:
    return np.arange(count)
