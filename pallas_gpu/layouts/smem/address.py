# SPDX-License-Identifier: Apache-2.0
"""Splits shared-memory addresses into the contributions of threads and registers.

Before swizzling an address is a sum: a constant for each bit of the thread index that
is set and a constant for the register. A swizzle is linear over XOR but not over sums,
so the low part, where no carries occur, consists of XOR terms that are swizzled one by
one; the high part is added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE, atom_bytes, swizzle_bytes

# Shared memory never exceeds 2**18 bytes.
_MAX_REGION_BITS = 18


@dataclasses.dataclass(frozen=True)
class AddressForm:
    """`(XOR of columns[b] ^ xor[a]) + sum of column_add[b] + add[a]`, in bytes.

    Both `columns` sums run over the set bits of an index. Every entry of `column_add`
    and `add` is a multiple of `region_bytes`, every XOR term is below it.
    """

    columns: tuple[int, ...]
    column_add: tuple[int, ...]
    xor: tuple[int, ...]
    add: tuple[int, ...]
    region_bytes: int

    @property
    def keys(self) -> list[tuple[int, int]]:
        """The register part of each access; distinct accesses have distinct keys."""
        return list(zip(self.xor, self.add, strict=True))

    def replace(self, **changes: object) -> AddressForm:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def with_few_xors(self) -> AddressForm:
        """Replaces XOR by addition where the thread's part has no set bits.

        The address of a load has an immediate offset; an XOR costs an instruction.
        """
        mask = 0
        for column in self.columns:
            mask |= column
        return self.replace(
            xor=tuple(x & mask for x in self.xor),
            add=tuple(a + (x & ~mask) for x, a in self.keys),
        )

    def evaluate(self) -> np.ndarray:
        """All addresses: int64 [2 ** len(columns), accesses]."""
        count = len(self.columns)
        index = np.arange(1 << count)
        xor_part = np.zeros(1 << count, dtype=np.int64)
        add_part = np.zeros(1 << count, dtype=np.int64)
        for b in range(count):
            bit = (index >> b) & 1
            xor_part ^= bit * self.columns[b]
            add_part += bit * self.column_add[b]
        xor = np.array(self.xor, dtype=np.int64)
        add = np.array(self.add, dtype=np.int64)
        return (xor_part[:, None] ^ xor) + add_part[:, None] + add


def address_form(
    columns: Sequence[int], statics: Sequence[int], swizzle: int
) -> AddressForm | None:
    """The swizzled form of the addresses `statics[a] + sum of columns[b]`.

    Args:
      columns: unswizzled bytes for each bit of an index.
      statics: unswizzled bytes for each access.
      swizzle: the swizzle mode.

    Returns:
      None if carries propagate into the bits that the swizzle permutes.
    """
    smallest = 0 if swizzle == NO_SWIZZLE else atom_bytes(swizzle).bit_length() - 1
    static_bits = 0
    for static in statics:
        static_bits |= int(static)
    for bits in range(_MAX_REGION_BITS, smallest - 1, -1):
        region = 1 << bits
        low = [c & (region - 1) for c in columns]
        if not _disjoint([*low, static_bits & (region - 1)]):
            continue
        return AddressForm(
            columns=tuple(swizzle_bytes(x, swizzle) for x in low),
            column_add=tuple(c & -region for c in columns),
            xor=tuple(swizzle_bytes(int(s) & (region - 1), swizzle) for s in statics),
            add=tuple(int(s) & -region for s in statics),
            region_bytes=region,
        )
    return None


def _disjoint(values: Sequence[int]) -> bool:
    seen = 0
    for value in values:
        if seen & value:
            return False
        seen |= value
    return True
