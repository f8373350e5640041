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


class _Span:
    """A subspace of GF(2)^n, extended vector by vector."""

    def __init__(self) -> None:
        self._by_top_bit: dict[int, int] = {}

    def reduce(self, vector: int) -> int:
        """The remainder of `vector`; zero if it is in the subspace."""
        while vector and vector.bit_length() in self._by_top_bit:
            vector ^= self._by_top_bit[vector.bit_length()]
        return vector

    def add(self, vector: int) -> bool:
        """Adds `vector`; returns False if the subspace contains it already."""
        rest = self.reduce(vector)
        if rest:
            self._by_top_bit[rest.bit_length()] = rest
        return bool(rest)


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
    taken, words, dependent = _Span(), _Span(), []
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
            pairs = taken.reduce(bank) and _pair_up(form, delta)
            if pairs:
                taken.add(bank)
                columns[b] ^= delta
                staggers.append(Stagger(data_bit, pairs))
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


def _pair_up(form: AddressForm, delta: int) -> tuple[tuple[int, int], ...]:
    """The accesses in pairs at XOR distance `delta`; empty if one is unpaired."""
    index = {key: a for a, key in enumerate(form.keys)}
    pairs = []
    for a, (xor, add) in enumerate(form.keys):
        partner = index.get((xor ^ delta, add))
        if partner is None:
            return ()
        if a < partner:
            pairs.append((a, partner))
    return tuple(pairs)
