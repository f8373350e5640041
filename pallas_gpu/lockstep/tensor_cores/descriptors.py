# SPDX-License-Identifier: Apache-2.0
"""Descriptors of tcgen05: of an instruction, and of an operand in SMEM.

From the PTX ISA, "Instruction descriptor" and "Shared memory descriptor".
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import accesses
from pallas_gpu.lockstep.copies.tensor_map import swizzled
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.tensor_cores import tensor_copies
from pallas_gpu.lockstep.tensor_cores.sparse_rows import SparseRows
from pallas_gpu.lockstep.tensor_cores.tensor_copies import Scaling

K_BYTES = 32
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_F32, _F16 = np.dtype(np.float32), np.dtype(np.float16)
# kind -> element types by their code in the descriptor; accumulators by theirs.
_OPERANDS: dict[str, dict[int, np.dtype]] = {
    "f16": {0: _F16, 1: np.dtype(ml_dtypes.bfloat16)},
    "tf32": {2: _F32},
    "f8f6f4": {
        0: np.dtype(ml_dtypes.float8_e4m3fn),
        1: np.dtype(ml_dtypes.float8_e5m2),
    },
    "i8": {0: np.dtype(np.uint8), 1: np.dtype(np.int8)},
    "mxf4": {1: E2M1},
    "mxf4nvf4": {1: E2M1},
}
_OPERANDS["mxf8f6f4"] = _OPERANDS["f8f6f4"]
_ACCUMULATORS: dict[str, dict[int, np.dtype]] = {
    "f16": {0: _F16, 1: _F32},
    "tf32": {1: _F32},
    "f8f6f4": {0: _F16, 1: _F32},
    "i8": {2: np.dtype(np.int32)},
    **{kind: {1: _F32} for kind in tensor_copies.SCALED},
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What an instruction descriptor says (PTX ISA, "Instruction descriptor").

    Attributes:
      m, n: of a pair of CTAs those of both together.
      ctas: 1, or 2 for a pair.
    """

    kind: str
    m: int
    n: int
    d: np.dtype
    a: np.dtype
    b: np.dtype
    transposed: tuple[bool, bool]
    scaling: Scaling | None
    ctas: int = 1
    selector: int | None = None

    @classmethod
    def decode(
        cls, word: int, kind: str, vector: int | None, ctas: int, *, sparse: bool
    ) -> Instruction:
        """From its 32 bits, for a kind, its `.scale_vec`, a cta_group, and `.sp`."""
        scaling, selector = None, word & 3 if sparse else None
        if bool(word >> 2 & 1) != sparse or (word & 3 and not sparse):
            raise PtxError(f"sparsity of an instruction descriptor {word:#x}")
        if kind in tensor_copies.SCALED:
            scaling = Scaling.decode(word, kind, vector or 0)
            word = Scaling.plain(word)
        if word >> 3 & 1 or word >> 13 & 3:
            raise NotModelled("tcgen05.mma that saturates or negates")
        if word >> 6 & 1 or word >> 23 & 1 or word >> 29:
            raise PtxError(f"reserved bits of an instruction descriptor {word:#x}")
        codes = word >> 4 & 3, word >> 7 & 7, word >> 10 & 7
        tables = _ACCUMULATORS[kind], _OPERANDS[kind], _OPERANDS[kind]
        types = [t.get(code) for t, code in zip(tables, codes, strict=True)]
        if None in types:
            raise PtxError(f"kind::{kind} has no types of the codes {codes}")
        d, a, b = types
        if d == _F16 and kind == "f16" and {a, b} != {_F16}:
            raise PtxError("a float16 accumulator of operands that are not float16")
        n, m = (word >> 17 & 63) << 3, (word >> 24 & 31) << 4
        transposed = bool(word >> 15 & 1), bool(word >> 16 & 1)
        made = cls(kind, m, n, d, a, b, transposed, scaling, ctas, selector)  # type: ignore[arg-type]
        made._check()
        return made

    def _check(self) -> None:
        integer, ctas = self.kind == "i8", self.ctas
        fine = self.m in (64 * ctas, 128 * ctas)
        fine &= 8 * ctas <= self.n <= 256 and self.n % (8 * ctas) == 0
        few = ctas == 1 and self.n in (8, 16, 24, 32)
        fine &= not integer or few or self.n % (16 * ctas) == 0
        fine &= not any(self.transposed) or self.kind != "tf32"
        narrow = self.transposed[1] and self.b.itemsize == 1
        fine &= not narrow or self.n % (16 * ctas) == 0
        # The table of shapes: of a pair dense products have M = 128, too.
        halved = ctas == 2 and self.m == 128 and self.selector is None
        fine &= self.scaling is None or self.m == 128 * ctas or halved
        if self.selector is not None:
            SparseRows.check(self.selector, self.kind, self.m, ctas)
        fine &= not any(self.transposed) or E2M1 not in (self.a, self.b)
        if not fine:
            raise PtxError(f"no tcgen05.mma is {self}")

    @property
    def k(self) -> int:
        """K of the instruction."""
        return self.a_k * (1 if self.selector is None else 2)

    @property
    def a_k(self) -> int:
        """Elements of A in a row."""
        return K_BYTES * 8 // bits(self.a)


def bits(dtype: np.dtype) -> int:
    return 4 if dtype == E2M1 else dtype.itemsize * 8


def elements(held: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """[rows, k] elements of [rows, k, bytes]; of 4-bit ones the low half is first."""
    if dtype != E2M1:
        return held.view(dtype)[..., 0]
    halves = np.stack([held[..., 0] & 15, held[..., 0] >> 4], axis=-1)
    return halves.reshape(len(held), -1).view(dtype)


_SPANS = {0: 16, 2: 128, 4: 64, 6: 32}


def smem_places(
    word: int, rows: int, k: int, itemsize: int, transposed: bool
) -> np.ndarray:
    """[rows, k, bytes]: places in the dynamic SMEM that a descriptor describes.

    PTX ISA, "Shared memory descriptor" and "Canonical layouts".
    """
    if word >> 46 & 7 != 0b001:
        raise PtxError("bits 46-48 of a shared memory descriptor are not 0b001")
    if word >> 49 & 7 or word >> 52 & 0x1FF or word >> 14 & 3 or word >> 30 & 3:
        raise NotModelled(f"a shared memory descriptor {word:#x}")
    if word >> 61 not in _SPANS:
        raise PtxError(f"swizzle {word >> 61} of a shared memory descriptor")
    span = _SPANS[word >> 61]
    start, leading, stride = ((word >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    row, column = np.arange(rows)[:, None], np.arange(k)[None]
    if not transposed:
        byte = column * itemsize
        if span == 16:
            offset = row // 8 * stride + row % 8 * 16 + byte // 16 * leading + byte % 16
        else:
            offset = row // 8 * stride + row % 8 * span + byte
    else:
        byte = row * itemsize
        if span == 16:
            offset = byte // 16 * stride + byte % 16 + column % 8 * 16
            offset = offset + column // 8 * leading
        else:
            offset = byte // span * leading + byte % span + column % 8 * span
            offset = offset + column // 8 * stride
    address = swizzled(start + offset, span)
    return address[..., None] - accesses.SMEM_BASE + np.arange(itemsize)
