# SPDX-License-Identifier: Apache-2.0
"""Relayouts across warps: a round trip through scratch in SMEM.

Elements that one thread holds both before and after are exchanged in units of up to 16
bytes. The span of the threads and a unit is a piece: a part of the array that consists
of whole slots in both layouts. As many pieces as fit the scratch form a round. A piece
that does not fit is split into parts to which only some of the threads store, or from
which only some of them load.

An address is linear over GF(2) in the element's vector. It is chosen such that there
are no bank conflicts: the lanes that one wavefront serves, together with their units,
span a space of one line of the 32 banks, one for the stores and one for the loads. Two
spaces of equal dimension have a common complement, spanned by sums of a vector of each;
the position in the line is the component along the spaces, the line's index that along
the complement. So both kinds of access use every bank once.
"""

from __future__ import annotations

import dataclasses

from pallas_gpu.layouts.moves.binary import (
    BinaryLayout,
    Slot,
    common_slots,
    within_warps,
)
from pallas_gpu.layouts.moves.gf2 import Basis, intersection, span
from pallas_gpu.layouts.moves.least_scratch import MOST_ROUNDS
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREAD_BITS, WARP_LANES
from pallas_gpu.layouts.smem.address import AddressForm
from pallas_gpu.layouts.smem.banks import phase_lanes, wavefronts_of

# The widest ld.shared and st.shared (PTX ISA, ld: .v4 of 32 bits).
_MAX_UNIT_BITS = 128
_WORD_BITS = 32


@dataclasses.dataclass(frozen=True)
class Side:
    """The accesses of all threads to a part: stores, or loads.

    Attributes:
      form: byte addresses relative to the part, one for each access.
      units: for each part and access the slots that the access transfers.
      conditions: for each part the threads that access it: for each pair (mask, odd),
        an odd, or else an even, number of the mask's bits are set.
      wavefronts: per access of a warp.
    """

    form: AddressForm
    units: tuple[tuple[tuple[Slot, ...], ...], ...]
    conditions: tuple[tuple[tuple[int, bool], ...], ...]
    wavefronts: int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A relayout through SMEM.

    Attributes:
      store: from the source's registers.
      load: to the destination's registers.
      part_bytes: SMEM per part.
      parts_per_round: number of parts in the scratch at once.
      idle_bits: the source's replication bits of the thread: only threads with all of
        them clear store.
      within_warps: each warp loads only what it stored itself.
    """

    store: Side
    load: Side
    part_bytes: int
    parts_per_round: int
    idle_bits: tuple[int, ...]
    within_warps: bool

    @property
    def rounds(self) -> list[range]:
        """The parts of each round."""
        count, step = len(self.store.units), self.parts_per_round
        return [range(i, min(i + step, count)) for i in range(0, count, step)]

    @property
    def scratch_bytes(self) -> int:
        """SMEM per round."""
        return self.part_bytes * self.parts_per_round


def plan_exchanges(
    src: BinaryLayout, dst: BinaryLayout, bits: int, available_bytes: int
) -> list[Exchange]:
    """A plan for each unit size whose parts fit the available scratch.

    If none fits, the plan with the smallest parts, which needs more. Empty if the
    pieces of the two layouts differ.
    """
    common = common_slots(src, dst)
    most = min(len(common), (_MAX_UNIT_BITS // bits).bit_length() - 1)
    # Units narrower than a word would waste bandwidth of the banks.
    least = min(most, _word_elements_log2(bits))
    plans: list[Exchange] = []
    for count in range(most, -1, -1):
        if count < least and plans:
            break
        plan = _plan(src, dst, bits, common[:count], available_bytes)
        if plan is not None:
            plans.append(plan)
    fitting = [plan for plan in plans if plan.scratch_bytes <= available_bytes]
    return fitting or plans[-1:]


def _word_elements_log2(bits: int) -> int:
    return max(_WORD_BITS // bits, 1).bit_length() - 1


def _plan(
    src: BinaryLayout, dst: BinaryLayout, bits: int, unit: list[int], available: int
) -> Exchange | None:
    address = _address_basis(src, dst, bits, unit)
    piece_bits = len(address)
    # The rest enumerates the pieces; both layouts have it in slots.
    for vector in (*common_slots(src, dst), *src.slot_space):
        address.add(vector)
    sides = [_Threads(layout, address, unit, piece_bits) for layout in (src, dst)]
    # As few splits as the scratch permits; at least a unit remains. More splits are
    # never possible where fewer are not.
    least = min(piece_bits, len(unit) + 1)
    wanted = max((available * 8 // bits).bit_length() - 1, least)
    # Smaller parts would only be more of them in each round.
    wanted = max(wanted, len(address) - MOST_ROUNDS.bit_length() + 1)
    for part_bits in range(min(wanted, piece_bits), piece_bits + 1):
        if not all(threads.permit(part_bits) for threads in sides):
            continue
        store, load = (_side(threads, bits, part_bits) for threads in sides)
        if store is not None and load is not None:
            break
    else:
        return None
    idle = tuple(src.copies(0, THREAD_BITS))
    part_bytes = (bits << part_bits) // 8
    return Exchange(
        store=store,
        load=load,
        part_bytes=part_bytes,
        parts_per_round=_parts_per_round(len(store.units), part_bytes, available),
        idle_bits=idle,
        # Of replicated elements only one warp's are stored, for all warps.
        within_warps=max(idle, default=0) < LANE_BITS and within_warps(src, dst),
    )


def _parts_per_round(parts: int, part_bytes: int, available: int) -> int:
    """Returns what fits in the scratch, or more where rounds would be too many."""
    fewest = -(-parts // MOST_ROUNDS)
    return min(max(available // part_bytes, fewest), parts)


def _phase(layout: BinaryLayout, bits: int, unit: list[int]) -> Basis:
    """The span of the lanes that one wavefront serves, and their units."""
    lanes = phase_lanes((bits << len(unit)) // 8).bit_length() - 1
    return Basis((*unit, *layout.thread_columns[:lanes]))


def _address_basis(
    src: BinaryLayout, dst: BinaryLayout, bits: int, unit: list[int]
) -> Basis:
    """Basis of a piece: vector i is the element at position 2**i."""
    stored, loaded = _phase(src, bits, unit), _phase(dst, bits, unit)
    both = Basis(unit)
    common = intersection(stored.vectors, loaded.vectors, src.bits).vectors
    # Columns of threads come first: their addresses are then multiples of a unit.
    for vector in (*stored.vectors, *loaded.vectors, *common):
        if vector in stored and vector in loaded:
            both.add(vector)
    only_stored = _added(both, stored.vectors)
    only_loaded = _added(both, loaded.vectors)
    paired = min(len(only_stored), len(only_loaded))
    lines = [
        a ^ b for a, b in zip(only_stored[:paired], only_loaded[:paired], strict=True)
    ]
    line = (*both.vectors[len(unit) :], *only_stored, *only_loaded[paired:])
    # Pieces are split at the top, preferably along bits of the storing threads.
    slots = Basis(dst.slot_space)
    threads = sorted(
        (*src.thread_columns, *dst.thread_columns), key=lambda column: column in slots
    )
    # Elements narrower than a bank share it with elements of other wavefronts.
    others = _added(Basis((*unit, *line, *lines)), threads)
    fillers = others[: max(_word_elements_log2(bits) - len(unit), 0)]
    return Basis((*unit, *fillers, *line, *lines, *threads))


def _added(basis: Basis, vectors: tuple[int, ...] | list[int]) -> list[int]:
    """The vectors that extend a copy of the basis."""
    grown = basis.copy()
    return [vector for vector in vectors if grown.add(vector)]


class _Threads:
    """What the threads of a layout hold, by position in the address.

    Args:
      layout: the source or the destination.
      address: basis of the positions: the unit's, then those of a piece, then others.
      unit: of elements that one access transfers.
      piece_bits: of the position, those inside a piece.
    """

    def __init__(
        self, layout: BinaryLayout, address: Basis, unit: list[int], piece_bits: int
    ):
        self.layout, self.unit, self.total_bits = layout, unit, len(address)
        self.columns = [address.coordinates(c) for c in layout.thread_columns]
        self.inside = (1 << len(unit)) - 1
        # The slot of the element at the start of each unit, by the unit's position.
        self.starts: dict[int, int] = {}
        self._varied = 0
        units = span(unit)
        for first in span(_added(Basis(unit), list(layout.slot_space))):
            place = address.coordinates(first)
            self._varied |= place
            self.starts[place & ~self.inside] = first ^ units[place & self.inside]
        self._cut = any(c & self.inside or c >> piece_bits for c in self.columns)

    def above(self, part_bits: int) -> int:
        """The bits of a part's number that select threads."""
        selected = 0
        for column in self.columns:
            selected |= column >> part_bits
        return selected

    def permit(self, part_bits: int) -> bool:
        """Whether parts cut no unit, and select either slots or threads by a bit."""
        return not (self._cut or self.above(part_bits) << part_bits & self._varied)


def _side(threads: _Threads, bits: int, part_bits: int) -> Side | None:
    """The accesses of one side; None if its parts differ."""
    layout, columns, unit = threads.layout, threads.columns, threads.unit
    part, above = (1 << part_bits) - 1, threads.above(part_bits)
    found: list[dict[int, int]] = [
        {} for _ in range(1 << threads.total_bits - part_bits)
    ]
    for place, own in threads.starts.items():
        found[place >> part_bits][place & part] = own
    numbers = range(len(found))
    held = [found[n & ~above] for n in numbers]
    starts = sorted(held[0])
    if any(sorted(places) != starts for places in held):
        return None
    form = AddressForm(
        columns=tuple((column & part) * bits // 8 for column in columns),
        column_add=(0,) * THREAD_BITS,
        xor=tuple(start * bits // 8 for start in starts),
        add=(0,) * len(starts),
        region_bytes=(bits << part_bits) // 8,
    ).with_few_xors()
    warps = form.evaluate().T.reshape(-1, WARP_LANES)
    # By bit of a part's number, the threads' bits that it selects.
    masks = {
        bit: sum(bool(c >> part_bits & bit) << b for b, c in enumerate(columns))
        for bit in (1 << i for i in range(above.bit_length()))
        if above & bit
    }
    conditions = tuple(
        tuple((mask, bool(n & bit)) for bit, mask in masks.items()) for n in numbers
    )
    tiles, elements = layout.slots, span(unit)
    return Side(
        form=form,
        units=tuple(
            tuple(tuple(slots[places[s] ^ e] for e in elements) for s in starts)
            for slots in tiles
            for places in held
        ),
        conditions=conditions * len(tiles),
        wavefronts=int(wavefronts_of(warps, (bits << len(unit)) // 8).max()),
    )
