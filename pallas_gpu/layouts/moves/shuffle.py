# SPDX-License-Identifier: Apache-2.0
"""Relayouts by exchanging words between the lanes of a warp.

Elements that one thread holds both before and after are exchanged in words of 32 bits.
In each step every lane sends one word and receives one (PTX ISA, shfl.sync). The word
that a lane sends, the lane it receives from and the position of the received word are
linear over GF(2) in the bits of the thread, so stages of selects implement them:

  sent word i of thread t      = word `i ^ send(t)`
  step q, word that t receives = sent word `sources[q]` of lane `lanes(t) ^ shift[q]`
  placed word q of thread t    = received word `q ^ place(t)`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from pallas_gpu.layouts.moves.binary import (
    BinaryLayout,
    Slot,
    common_slots,
    within_warps,
)
from pallas_gpu.layouts.moves.gf2 import Basis, combine, span
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREAD_BITS

_WORD_BITS = 32
_LANES = (1 << LANE_BITS) - 1
# lanes(t) = t: every lane receives from itself, or from the lane at a fixed distance.
OWN_LANE = tuple(1 << b if b < LANE_BITS else 0 for b in range(THREAD_BITS))


@dataclasses.dataclass(frozen=True)
class Network:
    """Renames words differently in each thread: out[i] = in[i ^ f(t)], f linear.

    Attributes:
      stages: (mask, distance): threads in which an odd number of the mask's bits are
        set select the word at that XOR distance.
    """

    stages: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, columns: Sequence[int]) -> Network:
        """The network with f(t) = the sum of columns[b] over the bits set in t."""
        basis = Basis(columns)
        masks = [0] * len(basis)
        for bit, column in enumerate(columns):
            used = basis.coordinates(column)
            for i in range(len(basis)):
                masks[i] |= (used >> i & 1) << bit
        return cls(tuple(zip(masks, basis.vectors, strict=True)))

    def selects(self, outputs: Iterable[int]) -> int:
        """The number of selects that produce the given words."""
        needed, count = set(outputs), 0
        for _, distance in reversed(self.stages):
            count += len(needed)
            needed |= {i ^ distance for i in needed}
        return count


@dataclasses.dataclass(frozen=True)
class Shuffle:
    """A relayout within warps; see the module's docstring for the formulas.

    Attributes:
      packs: for each word of a thread the slots it consists of.
      send: applied to the words before the steps.
      sources: the word that is sent, per step.
      shifts: the XOR distance of lanes, per step.
      lane_columns: for each bit of the thread its contribution to the source lane.
      place: applied to the received words.
      places: for each placed word the slots it holds.
    """

    packs: tuple[tuple[Slot, ...], ...]
    send: Network
    sources: tuple[int, ...]
    shifts: tuple[int, ...]
    lane_columns: tuple[int, ...]
    place: Network
    places: tuple[tuple[Slot, ...], ...]

    @property
    def moves(self) -> int:
        """The number of words that are exchanged between lanes."""
        if self.lane_columns != OWN_LANE:
            return len(self.sources)
        return sum(1 for shift in self.shifts if shift)

    @property
    def selects(self) -> int:
        """The number of selects per thread."""
        after = self.place.selects(range(len(self.places)))
        return after + self.send.selects(self.sources)


def plan_shuffles(src: BinaryLayout, dst: BinaryLayout, bits: int) -> list[Shuffle]:
    """All plans; none if warps must exchange data."""
    if not within_warps(src, dst):
        return []
    common = common_slots(src, dst)
    most = max(_WORD_BITS // bits, 1).bit_length() - 1
    plans = []
    for count in range(min(most, len(common)), -1, -1):
        for stay in (True, False):
            plan = _Planner(src, dst, common[:count]).plan(stay)
            if plan is not None and plan not in plans:
                plans.append(plan)
    return plans


class _Receivers:
    """For each bit of the lane: the lane it receives from, and the order.

    The word that a lane sends must be a function of its own index. So bits that receive
    from the same lane must receive the same word.
    """

    def __init__(self) -> None:
        self.lanes = Basis()
        self.sent: list[int] = []  # the word of each lane in the basis
        self.lane_columns: dict[int, int] = {}
        self.orders: dict[int, int] = {}

    def add(self, bit: int, lane: int, word: int, order: int) -> bool:
        """Lets a bit receive a word; returns False if the lane would send two."""
        if self.lanes.add(lane):
            self.sent.append(word)
        elif combine(self.sent, self.lanes.coordinates(lane)) != word:
            return False
        self.lane_columns[bit], self.orders[bit] = lane, order
        return True


class _Planner:
    """The two layouts with threads and words as coordinates.

    A vector decomposes over the source's thread columns and its words. The first part,
    a mask of thread bits, is the thread that holds an element, the second is the word.
    """

    def __init__(self, src: BinaryLayout, dst: BinaryLayout, word: list[int]) -> None:
        self.src, self.dst, self.word = src, dst, word
        self.owned = [b for b in range(THREAD_BITS) if src.thread_columns[b]]
        self.src_words = _complement(src.slot_space, word)
        self.dst_words = _complement(dst.slot_space, word)
        basis = Basis(src.thread_columns[b] for b in self.owned)
        for vector in (*self.src_words, *word):
            basis.add(vector)
        self.basis = basis
        # A word of the destination may start at any of its elements: use the source's.
        self.dst_words = [v ^ combine(word, self._locate(v)[2]) for v in self.dst_words]
        # Per bit of the destination's thread and word: the source's thread and word.
        self.threads = [self._locate(v) for v in dst.thread_columns]
        self.words = [self._locate(v) for v in self.dst_words]

    def _locate(self, vector: int) -> tuple[int, int, int]:
        """(thread bits, word, position in the word) of a vector."""
        used = self.basis.coordinates(vector)
        count = len(self.owned)
        thread = sum(1 << b for i, b in enumerate(self.owned) if used >> i & 1)
        word = used >> count & ((1 << len(self.src_words)) - 1)
        return thread, word, used >> (count + len(self.src_words))

    def plan(self, stay: bool) -> Shuffle | None:
        """A plan, None if there is none with this choice.

        Args:
          stay: lanes keep as many words as possible, at the cost of more selects.
        """
        if any(rest for _, _, rest in (*self.threads, *self.words)):
            return None
        receivers = _Receivers()
        later = [
            b for b in range(LANE_BITS) if not self._first_choice(receivers, b, stay)
        ]
        for bit in later:
            if not self._any_choice(receivers, bit):
                return None
        return self._build(receivers)

    def _receive(self, to: _Receivers, bit: int, order: int, copy: int) -> bool:
        thread, word, _ = self.threads[bit]
        lane = (thread & _LANES) ^ self._lane_of(order) ^ copy
        return to.add(bit, lane, word ^ self._word_of(order), order)

    def _first_choice(self, to: _Receivers, bit: int, stay: bool) -> bool:
        lane = self.threads[bit][0] & _LANES
        if not stay:
            return lane not in to.lanes and self._receive(to, bit, 0, 0)
        held = sum(1 << b for b in self.src.copies(0, LANE_BITS))
        away = (lane ^ 1 << bit) & ~held
        if not self.dst.thread_columns[bit] or away not in self._shifts():
            return False
        return self._receive(to, bit, self._order(away), (lane ^ 1 << bit) & held)

    def _any_choice(self, to: _Receivers, bit: int) -> bool:
        """Receives from another copy, or the words in another order."""
        copies = self.src.copies(0, LANE_BITS)
        orders = [0, *map(self._order, self._shifts().vectors)]
        if bit in copies:
            others = [1 << bit, *(1 << b for b in copies), 0]
        elif self.dst.thread_columns[bit]:
            others = [*(1 << b for b in copies), 0]
        else:
            others = [0]
        return any(self._receive(to, bit, o, c) for c in others for o in orders)

    def _shifts(self) -> Basis:
        """The distances of the lanes from which one thread receives words."""
        return Basis(thread & _LANES for thread, _, _ in self.words)

    def _order(self, shift: int) -> int:
        """A word of the destination, as a mask, that is `shift` lanes away."""
        pivots, basis = [], Basis()
        for i, (thread, _, _) in enumerate(self.words):
            if basis.add(thread & _LANES):
                pivots.append(1 << i)
        return combine(pivots, basis.coordinates(shift))

    def _lane_of(self, order: int) -> int:
        return combine([thread & _LANES for thread, _, _ in self.words], order)

    def _word_of(self, order: int) -> int:
        return combine([word for _, word, _ in self.words], order)

    def _build(self, receivers: _Receivers) -> Shuffle:
        lanes, orders = (
            [column[b] for b in range(LANE_BITS)]
            for column in (receivers.lane_columns, receivers.orders)
        )
        # The words sent by lanes from which no lane receives are arbitrary.
        senders, known = receivers.lanes.copy(), list(receivers.sent)
        for bit in range(LANE_BITS):
            if senders.add(1 << bit):
                known.append(0)

        def by_lane(lane: int) -> int:
            return combine(known, senders.coordinates(lane))

        send = [by_lane(1 << b) for b in range(LANE_BITS)]
        lane_columns = list(lanes)
        for bit in range(LANE_BITS, THREAD_BITS):
            lane, word, _ = self.threads[bit]
            send.append(word ^ by_lane(lane & _LANES))
            lane_columns.append(lane & _LANES)
        count = 1 << len(self.dst_words)
        shifts = [self._lane_of(q) for q in range(count)]
        sources = [self._word_of(q) ^ by_lane(shifts[q]) for q in range(count)]
        tiles = range(len(self.src.slots))
        in_tile = 1 << len(self.src_words)
        return Shuffle(
            packs=_words(self.src, self.src_words, self.word),
            send=Network.of(send),
            sources=tuple(t * in_tile + s for t in tiles for s in sources),
            shifts=tuple(shifts) * len(tiles),
            lane_columns=tuple(lane_columns),
            place=Network.of([*orders, 0, 0]),
            places=_words(self.dst, self.dst_words, self.word),
        )


def _complement(space: Sequence[int], part: Sequence[int]) -> list[int]:
    basis = Basis(part)
    return [vector for vector in space if basis.add(vector)]


def _words(
    layout: BinaryLayout, words: Sequence[int], word: Sequence[int]
) -> tuple[tuple[Slot, ...], ...]:
    """The slots of every word of every tile."""
    return tuple(
        tuple(slots[first ^ place] for place in span(word))
        for slots in layout.slots
        for first in span(words)
    )
