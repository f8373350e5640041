# SPDX-License-Identifier: Apache-2.0
"""How four warps divide a product by `mma.sync`, and the pieces that each one has.

PTX ISA, "Matrix Fragments for mma.m16n8k16" and its other shapes: an instruction
multiplies (16, K) by (K, 8), where K are 32 bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pallas_gpu.layouts.registers.catalogue import mma_acc, mma_lhs, mma_rhs
from pallas_gpu.layouts.registers.descriptions import TiledLayout

_ROWS, _COLUMNS, _K_BITS = 16, 8, 256
WARPS = 4


@dataclasses.dataclass(frozen=True)
class MmaShape:
    """A product of (m, k) and (k, n) by four warps.

    Attributes:
      m, n, k: its sizes.
      bits: width of an operand's element.
      m_warps: number of warps along the rows; the others are along the columns.
    """

    m: int
    n: int
    k: int
    bits: int
    m_warps: int

    @property
    def tile(self) -> tuple[int, int, int]:
        """Rows, columns and K that all warps multiply at once."""
        rows, columns = _ROWS * self.m_warps, _COLUMNS * WARPS // self.m_warps
        return rows, columns, _K_BITS // self.bits

    @property
    def padded(self) -> MmaShape:
        """The smallest shape of whole tiles that contains this one."""
        m, n, k = (
            -(-size // unit) * unit
            for size, unit in zip((self.m, self.n, self.k), self.tile, strict=True)
        )
        return dataclasses.replace(self, m=m, n=n, k=k)

    @property
    def lhs(self) -> TiledLayout:
        """The layout of the left operand."""
        return mma_lhs(self.bits, self.m_warps)

    @property
    def rhs(self) -> TiledLayout:
        """The layout of the right operand."""
        return mma_rhs(self.bits, self.m_warps)

    @property
    def acc(self) -> TiledLayout:
        """The layout of the accumulator."""
        return mma_acc(self.bits, self.m_warps)

    @property
    def _cost(self) -> tuple[int, int]:
        """Padded elements of the result, then elements of operands in a thread."""
        p = self.padded
        columns = WARPS // self.m_warps
        return p.m * p.n, p.m * p.k // self.m_warps + p.n * p.k // columns

    @classmethod
    def divisions(cls, m: int, n: int, k: int, bits: int) -> Iterator[MmaShape]:
        """The divisions of a product among the warps."""
        return (cls(m, n, k, bits, m_warps) for m_warps in (4, 2, 1))

    @classmethod
    def cheapest(cls, m: int, n: int, k: int, bits: int) -> MmaShape:
        """The division with the least padding, then with the fewest registers."""
        return min(cls.divisions(m, n, k, bits), key=lambda s: s._cost)

    @classmethod
    def best(cls, m: int, n: int, k: int, bits: int) -> MmaShape | None:
        """The division without padding and with the fewest registers, if there is."""
        whole = [s for s in cls.divisions(m, n, k, bits) if s == s.padded]
        if not whole or 0 in (m, n, k):
            return None
        return min(whole, key=lambda s: s._cost)
