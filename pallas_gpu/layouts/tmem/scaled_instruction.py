# SPDX-License-Identifier: Apache-2.0
"""Block-scaled tcgen05.mma: descriptors, and the scales that an instruction reads.

PTX ISA, tcgen05 "Block scaling", "Instruction descriptor" of the kinds mxf8f6f4, mxf4
and mxf4nvf4. Four scales of a row share a column of TMEM; the scale ids of the
descriptor are the byte at which an instruction's scales start.
"""

from __future__ import annotations

import dataclasses

from pallas_gpu.errors import DTypeError, ShapeError
from pallas_gpu.layouts.tmem.mma_instruction import MAX_N, Kind, is_n

# The only M of one CTA; in each CTA of a pair it may also be half of that.
ROWS, HALF_ROWS = 128, 64
# Half of the columns of b of such a pair, whose scales lie apart, fill whole columns of
# TMEM, as upstream's kernels have it.
HALVES_STEP = 64
# Scales of a row that share a column; columns that the scales of 128 rows occupy.
SCALES_PER_COLUMN, COLUMNS_PER_TILE = 4, 4
# Scales of an instruction per row: PTX's `.scale_vec`.
_VECTORS = {1: "1X", 2: "2X", 4: "4X"}

# Element types: the kind that reads them, and their code in bits 7-9 and 10-12.
_OPERANDS: dict[str, tuple[Kind, int]] = {
    "e4m3": (Kind.MXF8F6F4, 0),
    "e5m2": (Kind.MXF8F6F4, 1),
    "e2m1": (Kind.MXF4NVF4, 1),
}
# The scales of each kind: their type, and the elements of a block along K.
_ADMITTED: dict[Kind, tuple[tuple[str, int], ...]] = {
    Kind.MXF8F6F4: (("ue8m0", 32),),
    Kind.MXF4NVF4: (("ue8m0", 32), ("ue8m0", 16), ("ue4m3", 16)),
}
_K = {Kind.MXF8F6F4: 32, Kind.MXF4NVF4: 64}
# Bit 23: the type of the scales.
_SCALES = {"ue4m3": 0, "ue8m0": 1}
# The bit of a sparse left operand.
_SPARSE = 2
# Descriptor bits of the scale ids of b and of a.
_B_ID, _A_ID = 4, 29


@dataclasses.dataclass(frozen=True)
class ScaledInstruction:
    """One tcgen05.mma with block scaling; its accumulator is float32.

    Attributes:
      n: columns of the accumulator.
      a, b: element types in PTX.
      scale: type of the scales in PTX.
      block: elements along K that share a scale.
      a_transposed, b_transposed: the operand in SMEM lies along M or N.
      ctas: 1, or 2 for a pair, which has M = 256.
      sparse: the left operand has two of each four elements; K is doubled, and so are
        the elements that share a scale, of which `block` are stored.
      rows: of the accumulator in each CTA.

    Raises:
      DTypeError, ShapeError: there is no such instruction.

      >>> hex(ScaledInstruction(256, "e4m3", "e4m3", "ue8m0", 32).descriptor)
      '0x8c00000'
    """

    n: int
    a: str
    b: str
    scale: str
    block: int
    a_transposed: bool = False
    b_transposed: bool = False
    ctas: int = 1
    sparse: bool = False
    rows: int = ROWS

    def __post_init__(self) -> None:
        require_types(self.a, self.b, self.scale, self.block)
        halved = self.rows == HALF_ROWS and self.ctas == 2 and not self.sparse
        known = is_n(self.n, self.kind, self.ctas) and self.n <= MAX_N
        if not known or not (self.rows == ROWS or halved):
            raise ShapeError(
                "there is no block-scaled tcgen05.mma of this shape",
                expected=f"M = {ROWS}; N a multiple of {8 * self.ctas}, up to {MAX_N}",
                got=f"M = {self.rows}, N = {self.n}",
            )

    @property
    def kind(self) -> Kind:
        """The kind of the operands."""
        return _OPERANDS[self.a][0]

    @property
    def k(self) -> int:
        """Stored elements of a row of `a` that the instruction reads."""
        return _K[self.kind]

    @property
    def vector(self) -> int:
        """Scales of a row that the instruction reads."""
        return self.k // self.block

    @property
    def descriptor(self) -> int:
        """The 32 bits, with scale ids of 0."""
        return (
            self.sparse << _SPARSE
            | _OPERANDS[self.a][1] << 7
            | _OPERANDS[self.b][1] << 10
            | self.a_transposed << 15
            | self.b_transposed << 16
            | self.n >> 3 << 17
            | _SCALES[self.scale] << 23
            | self.ctas * self.rows >> 7 << 27
        )

    @property
    def mnemonic(self) -> str:
        """The opcode of the instruction."""
        vector = f"block_scale.scale_vec::{_VECTORS[self.vector]}"
        group = f"{'.sp' * self.sparse}.cta_group::{self.ctas}"
        return f"tcgen05.mma{group}.kind::{self.kind.value}.{vector}"

    def scales_of(self, step: int) -> tuple[int, int]:
        """Where the scales of the instruction at a step of K start.

        Returns:
          The group of four scales along K, and the ids as bits of the descriptor.

          >>> mxf8 = ScaledInstruction(256, "e4m3", "e4m3", "ue8m0", 32)
          >>> [(group, hex(ids)) for group, ids in map(mxf8.scales_of, (0, 1, 5))]
          [(0, '0x0'), (0, '0x20000010'), (1, '0x20000010')]
        """
        group, identifier = divmod(step * self.vector, SCALES_PER_COLUMN)
        return group, identifier << _B_ID | identifier << _A_ID


def require_types(a: str, b: str, scale: str, block: int) -> None:
    """Raises DTypeError unless an instruction multiplies such operands."""
    known = a in _OPERANDS and b in _OPERANDS and _OPERANDS[a][0] is _OPERANDS[b][0]
    if not known:
        raise DTypeError(
            "tcgen05.mma does not scale blocks of these types",
            expected="two 8-bit floats, or two of e2m1",
            got=f"{a} and {b}",
        )
    admitted = _ADMITTED[_OPERANDS[a][0]]
    if (scale, block) not in admitted:
        raise DTypeError(
            f"tcgen05.mma does not scale blocks of {a} so",
            expected=" or ".join(f"{s} for each {k} elements" for s, k in admitted),
            got=f"{scale} for each {block} elements",
        )
