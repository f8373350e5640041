# SPDX-License-Identifier: Apache-2.0
"""What two streams of tcgen05 instructions must agree in, as short text.

Fields of descriptors that the tensor core does not use are left out (PTX ISA, tcgen05
"Shared memory descriptor", "Canonical layouts"): the leading dimension byte offset of
an operand along K with a swizzle, and of one along M or N that is a single row of the
swizzle; and bits 46-48, a constant, in which the packages differ.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from tests.support.differential.tensor_stream import Instruction, Mma, products

# Bytes of a row of the swizzle by its code in bits 61-63.
_ROW_BYTES = {0: 16, 2: 128, 4: 64, 6: 32}
_START = 0x3FFF


def version(descriptor: int) -> int:
    """Bits 46-48 of a shared memory descriptor."""
    return descriptor >> 46 & 7


@dataclasses.dataclass(frozen=True)
class Operand:
    """What is constant in the shared memory descriptors of an operand.

    Attributes:
      swizzle: bits 61-63.
      stride: byte offset of the stride dimension, bits 32-45, in 16 bytes.
      leading: of the leading dimension, bits 16-29; None where it is not used.
      other: all other bits but the start address and the constant.
    """

    swizzle: int
    stride: int
    leading: int | None
    other: int

    @classmethod
    def of(cls, descriptor: int, transposed: bool, size: int) -> Operand:
        """From a descriptor, and the bytes along M or N of one instruction."""
        swizzle = descriptor >> 61
        used = transposed and size > _ROW_BYTES[swizzle]
        leading = descriptor >> 16 & _START if used else None
        taken = _START | _START << 16 | _START << 32 | 7 << 46 | 7 << 61
        return cls(swizzle, descriptor >> 32 & _START, leading, descriptor & ~taken)

    def __str__(self) -> str:
        leading = "-" if self.leading is None else self.leading
        assert not self.other
        return f"sw{_ROW_BYTES[self.swizzle]} sbo{self.stride} lbo{leading}"


def describe(instructions: list[Instruction], itemsize: int) -> str:
    """The products: opcode, constants, then d, a, b and `+` of each instruction.

    Addresses are in hexadecimal, in units of their fields, from the first one.
    """
    found = products(instructions)
    heads = {_head(x, itemsize) for x in found}
    (head,) = heads
    each = [
        f"{x.d - found[0].d:x}:{_start(x, x.a, found[0].a)}:"
        f"{(x.b & _START) - (found[0].b & _START):x}{'+' if x.accumulate else ''}"
        for x in found
    ]
    return f"{head}; {' '.join(each)}"


def _start(x: Mma, a: int, first: int) -> str:
    mask = 0xFFFFFFFF if x.in_tmem else _START
    return f"{(a & mask) - (first & mask):x}"


def _head(x: Mma, itemsize: int) -> str:
    m, n = (x.idesc >> 24 & 31) << 4, (x.idesc >> 17 & 63) << 3
    if ".cta_group::2" in x.opcode:
        # SMEM of each CTA holds half of the rows of a, and of the columns of b.
        m, n = m // 2, n // 2
    left = "tmem"
    if not x.in_tmem:
        left = str(Operand.of(x.a, bool(x.idesc >> 15 & 1), m * itemsize))
    right = Operand.of(x.b, bool(x.idesc >> 16 & 1), n * itemsize)
    kind = x.opcode.removeprefix("tcgen05.mma.")
    return f"{kind} {x.idesc:#010x}; {left}; {right}"


def copies(instructions: list[Instruction]) -> str:
    """The copies to TMEM: shape, constants, then target and source of each."""
    found = [x for x in instructions if x.opcode.startswith("tcgen05.cp.")]
    each, heads = [], set()
    for x in found:
        (target,), source = x.operands
        heads.add(f"{x.opcode.split('.', 2)[2]}; {Operand.of(source, False, 0)}")
        each.append(f"{target:x}:{source & _START:x}")
    (head,) = heads
    return f"{head}; {' '.join(each)}"


def transfers(instructions: list[Instruction]) -> list[str]:
    """Loads and stores, with the lane and the column of their address."""
    found = []
    for x in instructions:
        match = re.match(r"tcgen05\.(ld|st)\.sync\.aligned\.(.*)\.b32", x.opcode)
        if match:
            group = x.operands[-1 if match[1] == "ld" else 0]
            assert isinstance(group, tuple)
            lane, column = group[0] >> 16, group[0] & 0xFFFF
            found.append(f"{match[1]} {match[2]} {lane}+{column}")
    return found


_NAMES = {
    "tcgen05.fence::before_thread_sync": "before",
    "tcgen05.fence::after_thread_sync": "after",
    "tcgen05.wait::ld": "wait ld",
    "tcgen05.wait::st": "wait st",
    "tcgen05.alloc": "alloc",
    "tcgen05.relinquish": "relinquish",
    "tcgen05.dealloc": "free",
    "tcgen05.mma": "mma",
    "tcgen05.commit": "commit",
    "tcgen05.cp": "cp",
    "tcgen05.ld": "ld",
    "tcgen05.st": "st",
    "cp.async.bulk.tensor": "tma",
    "mbarrier.arrive.expect_tx": "expect",
    "mbarrier.arrive": "arrive",
    "mbarrier.try_wait": "wait",
}


def order(instructions: list[Instruction]) -> list[str]:
    """The order of the instructions, by short names; runs of one name are one.

    The initialization of mbarriers is left out: packages place barriers differently.
    """
    names = [
        next(word for start, word in _NAMES.items() if x.opcode.startswith(start))
        for x in instructions
        if not x.opcode.startswith("mbarrier.init")
    ]
    return list(_runs(names))


def _runs(names: list[str]) -> Iterator[str]:
    for i, name in enumerate(names):
        if not i or names[i - 1] != name:
            yield name
