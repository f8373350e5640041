# SPDX-License-Identifier: Apache-2.0
"""The plan of a transfer between registers and shared memory, read by emitters."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.linear import THREAD_BITS, THREADS
from pallas_gpu.layouts.smem.address import AddressForm
from pallas_gpu.layouts.smem.stagger import Stagger

Method = Literal["vector", "matrix"]
Kind = Literal["load", "store"]

# The widest ld.shared / st.shared, and a row of an ldmatrix matrix (PTX ISA, ld).
MAX_WIDTH_BYTES = 16


@dataclasses.dataclass(frozen=True)
class AccessPlan:
    """The accesses of each thread to its registers' elements in shared memory.

    Instruction i of thread t uses the byte address
    `base + (XOR_b bit_b(t)*thread_columns[b] ^ xor[i]) + SUM_b bit_b(t)*thread_add[b]
    + add[i]`, where `base` is that of the slice. For "vector" this is the address of
    the thread's own elements; for "matrix" that of the row that lane t % 32 supplies.

    Attributes:
      method: "vector" is ld / st, "matrix" is ldmatrix / stmatrix.
      kind: "load" or "store".
      width_bytes: bytes per lane and address (16, a row, for "matrix").
      elements_per_access: elements per access of a thread.
      accesses: for each access (register, first element in it). All accesses together
        are the thread's array, in order.
      words: for each register of an instruction its accesses: one, or with .trans of
        8-bit elements two.
      instructions: for each instruction its words: one for "vector"; for "matrix" those
        of one, two or four matrices (.x1, .x2, .x4), in order.
      transpose: "matrix" with .trans.
      thread_columns: seven constants, joined by XOR.
      thread_add: seven constants, added; zero unless sizes are not powers of two.
      xor: per instruction.
      add: per instruction; fits the immediate offset of the instruction.
      staggers: exchanges of words after a load, or before a store (in any order).
      predicate_bits: the replication bits of the thread index. Only threads with all of
        them clear have to store ("matrix" stores have no such bits).
      wavefronts_per_access: of the worst instruction.
      ideal_wavefronts: without bank conflicts.
    """

    method: Method
    kind: Kind
    width_bytes: int
    elements_per_access: int
    accesses: tuple[tuple[int, int], ...]
    words: tuple[tuple[int, ...], ...]
    instructions: tuple[tuple[int, ...], ...]
    transpose: bool
    thread_columns: tuple[int, ...]
    thread_add: tuple[int, ...]
    xor: tuple[int, ...]
    add: tuple[int, ...]
    staggers: tuple[Stagger, ...]
    predicate_bits: tuple[int, ...]
    wavefronts_per_access: int
    ideal_wavefronts: int

    def addresses(self) -> np.ndarray:
        """Byte addresses relative to the base: int64 [128, instructions]."""
        return AddressForm(
            self.thread_columns, self.thread_add, self.xor, self.add, 1
        ).evaluate()

    @property
    def of_bytes(self) -> bool:
        """Whether matrices consist of 8-bit elements: words of two accesses."""
        return len(self.words[0]) > 1

    @property
    def conflict_free(self) -> bool:
        """Whether no instruction needs more than the ideal number of wavefronts."""
        return self.wavefronts_per_access <= self.ideal_wavefronts


def split_threads(offsets: np.ndarray) -> tuple[list[int], list[int]]:
    """Decomposes offsets [128, accesses] into seven columns and a static per access.

    Raises:
      LayoutError: the offsets are not such sums.
    """
    columns = [int(offsets[1 << b, 0] - offsets[0, 0]) for b in range(THREAD_BITS)]
    bits = (np.arange(THREADS)[:, None] >> np.arange(THREAD_BITS)) & 1
    sums = bits @ np.array(columns, dtype=np.int64)
    if not np.array_equal(sums[:, None] + offsets[0], offsets):
        raise not_linear_error()
    return columns, offsets[0].tolist()


def not_linear_error() -> LayoutError:
    return LayoutError(
        "addresses in shared memory are not linear in the bits of the thread index",
        expected="a tile with power-of-two sizes that matches the layout's own tiles, "
        "or an untiled, contiguous reference for a strided layout",
        hint="choose the tiling (8, swizzle bytes) or another register layout",
    )
