# SPDX-License-Identifier: Apache-2.0
"""Finds an exchange of registers that eliminates the bank conflicts of an access.

Addresses are linear over XOR in the bits of the lane, so an access is free of conflicts
if the bank numbers of the lane bits that participate in one phase are linearly
independent over GF(2). If a bit depends on the others, its lanes can access the
registers in another order: register r ^ d when the others access r. That adds the
address of d to the bit's column. It costs a select per register.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pallas_gpu.layouts.moves.gf2 import Basis
from pallas_gpu.layouts.smem.address import AddressForm
from pallas_gpu.layouts.smem.banks import BANK_BYTES, BANKS

_LINE_BYTES = BANKS * BANK_BYTES


@dataclasses.dataclass(frozen=True)
class Stagger:
    """Threads with `thread_bit` set exchange paired words.

    After a load, before a store. The addresses already include the exchange.

    Attributes:
      thread_bit: bit of the thread index.
      pairs: indices into the plan's words; every word occurs once.
    """

    thread_bit: int
    pairs: tuple[tuple[int, int], ...]


def find_staggers(
    form: AddressForm,
    phase_bits: Sequence[int],
    width_bytes: int,
    data_bits: Sequence[int | None],
) -> tuple[AddressForm, tuple[Stagger, ...]] | None:
    """Makes the banks of `phase_bits` independent.

    Args:
      form: the addresses.
      phase_bits: the columns of `form` whose lanes are served together.
      width_bytes: bytes per lane.
      data_bits: for each column of `form` the thread bit that distinguishes the threads
        that receive the data, or None if one thread receives both.

    Returns:
      The changed addresses and the exchanges (none if the banks are independent), or
      None if no exchange makes them independent.
    """
    active = [b for b in phase_bits if form.columns[b] or form.column_add[b]]
    if any(form.column_add[b] % _LINE_BYTES for b in active):
        return None
    taken, words, dependent = Basis(), Basis(), []
    # Bits that cannot be staggered must keep their own banks, so they come first.
    for b in sorted(active, key=lambda b: data_bits[b] is not None):
        word = (form.columns[b] + form.column_add[b]) // BANK_BYTES
        if words.add(word) and not taken.add(_bank(form.columns[b], width_bytes)):
            dependent.append(b)
    columns = list(form.columns)
    staggers = []
    for b in dependent:
        data_bit = data_bits[b]
        if data_bit is None:
            return None
        for delta in _distances(form):
            bank = _bank(columns[b] ^ delta, width_bytes)
            if bank in taken:
                continue
            pairs = pairs_at(form.keys, (delta, 0))
            if pairs is not None:
                taken.add(bank)
                columns[b] ^= delta
                staggers.append(Stagger(data_bit, tuple(pairs)))
                break
        else:
            return None
    return form.replace(columns=tuple(columns)), tuple(staggers)


def _bank(address: int, width_bytes: int) -> int:
    """The banks an aligned access of this width starts at, as a vector over GF(2)."""
    return address % _LINE_BYTES // max(BANK_BYTES, width_bytes)


def _distances(form: AddressForm) -> list[int]:
    """XOR distances from the first access, of accesses with the same sum part."""
    base_xor, base_add = form.keys[0]
    return [xor ^ base_xor for xor, add in form.keys[1:] if add == base_add]


def pairs_at(
    keys: Sequence[tuple[int, int]], delta: tuple[int, int]
) -> list[tuple[int, int]] | None:
    """Keys (XOR part, sum part), all in pairs at a distance; None if one is left."""
    index = {key: a for a, key in enumerate(keys)}
    free = set(range(len(keys)))
    pairs = []
    for a, key in enumerate(keys):
        partner = index.get((key[0] ^ delta[0], key[1] + delta[1]))
        if a in free and partner in free and partner != a:
            free -= {a, partner}
            pairs.append((a, partner))
    return None if free else pairs
