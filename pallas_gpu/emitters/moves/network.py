# SPDX-License-Identifier: Apache-2.0
"""A bitonic network of compare and exchange, whose steps across threads are loops.

K. Batcher, Sorting networks and their applications (1968). A thread has consecutive
elements of a row, and the threads of a row follow each other: the bits of an element's
index are those of the register, below those of the lane, below those of the warp. The
steps of a thread's own elements are unrolled; those of lanes, whose distance may be in
a register (`shfl.sync.bfly`), are one body, and so are those of warps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, scf

from pallas_gpu.emitters import addressing, mbarrier, module
from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.moves import shuffle
from pallas_gpu.emitters.moves.scratch import SmemScratch, require
from pallas_gpu.emitters.registers import RegisterArray
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREADS

_WORD_BYTES = 4
# Elements of a thread whose steps are emitted together: enough of them are independent.
# The other rows follow in a loop. Estimate.
_TOGETHER = 32
# Words of a thread up to which a loop over its halves does not spill on sm_90a.
_MOST_TURNED = 128
# Words of a thread that warps exchange between two barriers: they are held twice.
MOST_WORDS = 16
# What a comparison compares (PTX ISA, setp).
_WIDEST_BITS = 64
# The least scratch: four words (a granule of it).
LEAST_BYTES = 16
_ULT, _EQ, _NE = (
    arith.CmpIPredicate.ult,
    arith.CmpIPredicate.eq,
    arith.CmpIPredicate.ne,
)
# Registers of each array.
_Values = list[list[ir.Value]]


def sort(
    arrays: Sequence[RegisterArray],
    axis: int,
    n_keys: int,
    elements: int,
    scratch: SmemScratch | None,
) -> list[RegisterArray]:
    """Sorts arrays of unsigned integers along an axis.

    PTX: comparisons in a thread, `shfl.sync.bfly` across lanes; across warps
    `st.shared`, `barrier.sync`, `ld.shared`. All threads of the issuer execute it.

    Args:
      arrays: in `divided_layout(shape, axis, elements)`, the keys first.
      axis, n_keys: see `primitives.moves.sorting`.
      elements: of a row that a thread has.
      scratch: SMEM for what warps exchange.
    """
    layout = arrays[0].layout
    threads = layout.shape[axis] // elements
    rows: dict[object, list[int]] = {}
    for i, origin in enumerate(layout.origins):  # type: ignore[union-attr]
        rows.setdefault((*origin[:axis], *origin[axis + 1 :]), []).append(i)
    values = [list(x.values) for x in arrays]
    types = [x.dtype for x in arrays]
    last, both = slice(n_keys - 2, n_keys), types[n_keys - 2 : n_keys]
    joins = len(both) == 2 and sum(map(dtypes.bits, both)) <= _WIDEST_BITS
    if joins:
        values[last], types[last] = [_joined(values[last], both)], [_wide(both)]
    order = [i for row in rows.values() for i in row]
    together = math.gcd(len(rows), max(1, _TOGETHER // elements))
    network = _Network(
        tuple(types),
        together,
        n_keys - joins,
        elements,
        threads.bit_length() - 1,
        scratch,
    )
    found = network.sorted([[v[i] for i in order] for v in values], len(rows))
    values = [[x for _, x in sorted(zip(order, v, strict=True))] for v in found]
    if joins:
        values[n_keys - 2 : n_keys - 1] = _parted(values[n_keys - 2], both)
    return [x.with_values(v) for x, v in zip(arrays, values, strict=True)]


def _wide(types: Sequence[np.dtype]) -> np.dtype:
    return np.dtype(np.uint32 if sum(map(dtypes.bits, types)) <= 32 else np.uint64)


def _joined(values: _Values, types: Sequence[np.dtype]) -> list[ir.Value]:
    """Two keys as one: a comparison instead of three."""
    wide = _wide(types)
    high, low = (
        [convert_value(x, dtype, wide) for x in v]
        for v, dtype in zip(values, types, strict=True)
    )
    shift = dtypes.constant(dtypes.bits(types[1]), wide, low[0])
    return [arith.ori(arith.shli(a, shift), b) for a, b in zip(high, low, strict=True)]


def _parted(values: list[ir.Value], types: Sequence[np.dtype]) -> _Values:
    wide = _wide(types)
    shift = dtypes.constant(dtypes.bits(types[1]), wide, values[0])
    high = [arith.shrui(x, shift) for x in values]
    return [
        [convert_value(x, wide, dtype) for x in v]
        for v, dtype in zip((high, values), types, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _Network:
    """What all steps have in common.

    Attributes:
      dtypes: of the arrays.
      rows: how many are sorted at once.
      n_keys: how many arrays are compared.
      elements: of a row that a thread has, a power of two.
      bits: of the index of a thread in its row.
      scratch: SMEM for what warps exchange.
    """

    dtypes: tuple[np.dtype, ...]
    rows: int
    n_keys: int
    elements: int
    bits: int
    scratch: SmemScratch | None

    def sorted(self, values: _Values, rows: int) -> _Values:
        """Sorts rows, whose elements follow each other, `self.rows` at a time."""
        return _in_turn(rows // self.rows, values, lambda _, v: self._sorted(v))

    def _sorted(self, values: _Values) -> _Values:
        """Sorts the elements of each thread, then those of more and more threads."""
        kernel, values = module.current(), self._halves(values)
        if not self.bits:
            return self._merged(values, self.elements // 2, 0)

        def stage(of: ir.Value, values: _Values) -> _Values:
            """Sorts what 2**of threads have."""
            # In the last stage no index has this bit: all ascend.
            within = kernel.i32((1 << self.bits) - 1)
            index = arith.andi(self._thread, within)
            down = self._bit(of, index)
            if self.bits > LANE_BITS:
                lanes = kernel.i32(LANE_BITS)
                first = arith.minui(of, lanes)
                values = _loop(
                    kernel.i32(0),
                    arith.subi(of, first),
                    values,
                    lambda i, v: self._across(v, _below(of, i), down, self._of_warps),
                )
                of = first
            values = _loop(
                kernel.i32(0),
                of,
                values,
                lambda i, v: self._across(v, _below(of, i), down, self._of_lanes),
            )
            return self._merged(values, self.elements // 2, down)

        return _loop(kernel.i32(0), kernel.i32(self.bits + 1), values, stage)

    # --- steps ------------------------------------------------------------------------

    def _halves(self, values: _Values) -> _Values:
        """Sorts halves of a thread's elements, the second ones down."""
        half, block = self.elements // 2, 2
        if half >= _TOGETHER and self.elements * self._words <= _MOST_TURNED:
            part = dataclasses.replace(self, elements=half)

            def one(i: ir.Value, values: _Values) -> _Values:
                second = arith.cmpi(_NE, i, module.current().i32(0))
                return part._merged(part._halves(values), half // 2, second)

            return _in_turn(2, values, one)
        while block < self.elements:
            values = self._merged(values, block // 2, block)
            block *= 2
        return values

    def _merged(self, values: _Values, distance: int, down: ir.Value | int) -> _Values:
        """Steps of a thread's own elements, from a distance down to 1.

        They descend if an i1 is true, or those whose index has a bit.
        """
        values = [list(v) for v in values]
        while distance:
            for i in range(self.rows * self.elements):
                if i & distance:
                    continue
                j = i | distance
                first, second = ([v[k] for v in values] for k in (i, j))
                swaps = self._less(second, first)
                if not isinstance(down, int):
                    swaps = arith.xori(swaps, dtypes.splat(down, 1))
                elif i % self.elements & down:
                    swaps = self._less(first, second)
                for v, a, b in zip(values, first, second, strict=True):
                    v[i], v[j] = arith.select(swaps, b, a), arith.select(swaps, a, b)
            distance //= 2
        return values

    def _across(
        self,
        values: _Values,
        bit: ir.Value,
        descends: ir.Value,
        exchanged: Callable[[list[ir.Value], ir.Value], list[ir.Value]],
    ) -> _Values:
        """A step of threads whose indices differ in a bit, of few words at once."""
        mask = arith.shli(module.current().i32(1), bit)
        is_second = dtypes.splat(arith.xori(self._bit(bit), descends), 1)
        most = MOST_WORDS if exchanged == self._of_warps else 1
        result: _Values = [[] for _ in values]
        for few in itertools.batched(
            zip(*values, strict=True), max(1, most // self._words)
        ):
            others = self._others(few, mask, exchanged)
            for mine, theirs in zip(few, others, strict=True):
                takes = arith.xori(self._less(theirs, mine), is_second)
                for new, own, other in zip(result, mine, theirs, strict=True):
                    new.append(arith.select(takes, other, own))
        return result

    def _less(self, a: Sequence[ir.Value], b: Sequence[ir.Value]) -> ir.Value:
        """Whether keys are less than others, in lexicographic order."""
        keys = list(zip(a, b, strict=True))[: self.n_keys]
        result = arith.cmpi(_ULT, *keys[-1])
        for x, y in keys[-2::-1]:
            same = arith.andi(arith.cmpi(_EQ, x, y), result)
            result = arith.ori(arith.cmpi(_ULT, x, y), same)
        return result

    # --- exchange ---------------------------------------------------------------------

    def _others(
        self,
        elements: Sequence[Sequence[ir.Value]],
        mask: ir.Value,
        exchanged: Callable[[list[ir.Value], ir.Value], list[ir.Value]],
    ) -> list[list[ir.Value]]:
        """What the threads have whose indices differ in a bit, element by element."""
        words: list[ir.Value] = []

        def collected(word: ir.Value) -> ir.Value:
            words.append(word)
            return word

        def by_words(emit: Callable[[ir.Value], ir.Value]) -> list[list[ir.Value]]:
            return [
                [
                    shuffle.by_words(x, dtype, emit)
                    for x, dtype in zip(element, self.dtypes, strict=True)
                ]
                for element in elements
            ]

        by_words(collected)
        received = iter(exchanged(words, mask))
        return by_words(lambda _: next(received))

    def _of_lanes(self, words: list[ir.Value], mask: ir.Value) -> list[ir.Value]:
        return [shuffle.from_other(word, mask) for word in words]

    def _of_warps(self, words: list[ir.Value], mask: ir.Value) -> list[ir.Value]:
        """Through scratch: as many words at once as it holds of all threads."""
        scratch = require(self.scratch, LEAST_BYTES, "a sort across warps")
        held = scratch.size_bytes // _WORD_BYTES
        if held < THREADS * len(words):
            return [self._in_parts(word, mask, scratch, held) for word in words]
        other = arith.xori(self._thread, mask)
        own, theirs = (_pointer(scratch, place) for place in (self._thread, other))
        offsets = [i * THREADS * _WORD_BYTES for i in range(len(words))]
        # Threads may still be reading what an earlier use stored in the scratch.
        mbarrier.warpgroup_barrier()
        for word, offset in zip(words, offsets, strict=True):
            llvm.store(word, addressing.offset_pointer(own, offset))
        mbarrier.warpgroup_barrier()
        return [
            llvm.load(word.type, addressing.offset_pointer(theirs, offset))
            for word, offset in zip(words, offsets, strict=True)
        ]

    def _in_parts(
        self, word: ir.Value, mask: ir.Value, scratch: SmemScratch, held: int
    ) -> ir.Value:
        """A word of each thread, of a few threads at a time."""
        kernel = module.current()
        each = min(THREADS, 1 << (held.bit_length() - 1))
        shift, last = kernel.i32(each.bit_length() - 1), kernel.i32(each - 1)
        other = arith.xori(self._thread, mask)
        own, theirs = (
            (arith.shrui(t, shift), _pointer(scratch, arith.andi(t, last)))
            for t in (self._thread, other)
        )

        def part(i: ir.Value, values: _Values) -> _Values:
            mbarrier.warpgroup_barrier()
            stores = scf.IfOp(arith.cmpi(_EQ, own[0], i))
            with ir.InsertionPoint(stores.then_block):
                llvm.store(word, own[1])
                scf.yield_([])
            mbarrier.warpgroup_barrier()
            read = llvm.load(word.type, theirs[1])
            is_mine = arith.cmpi(_EQ, theirs[0], i)
            return [[arith.select(is_mine, read, values[0][0])]]

        rounds = kernel.i32(THREADS // each)
        return _loop(kernel.i32(0), rounds, [[word]], part)[0][0]

    @property
    def _words(self) -> int:
        """Of an element."""
        return sum(max(1, dtypes.bits(x) // 32) for x in self.dtypes)

    # --- threads ----------------------------------------------------------------------

    @property
    def _thread(self) -> ir.Value:
        return module.current().threads.warpgroup_thread

    def _bit(self, bit: ir.Value, index: ir.Value | None = None) -> ir.Value:
        """i1: a bit of the index of the thread."""
        kernel = module.current()
        index = self._thread if index is None else index
        masked = arith.andi(arith.shrui(index, bit), kernel.i32(1))
        return arith.cmpi(_NE, masked, kernel.i32(0))


def _below(of: ir.Value, i: ir.Value) -> ir.Value:
    """The bit of the i-th step of a stage, from the highest one down."""
    return arith.subi(arith.subi(of, i), module.current().i32(1))


def _pointer(scratch: SmemScratch, place: ir.Value) -> ir.Value:
    offset = arith.muli(place, module.current().i32(_WORD_BYTES))
    return addressing.offset_pointer(scratch.pointer, offset)


def _in_turn(
    count: int, values: _Values, body: Callable[[ir.Value, _Values], _Values]
) -> _Values:
    """Passes one part after the other to a function, in a loop of one body.

    It is always that of the first registers, which then follow the others.
    """
    kernel, step = module.current(), len(values[0]) // count

    def first_part(i: ir.Value, values: _Values) -> _Values:
        found = body(i, [v[:step] for v in values])
        return [v[step:] + x for v, x in zip(values, found, strict=True)]

    if count == 1:
        return body(kernel.i32(0), values)
    return _loop(kernel.i32(0), kernel.i32(count), values, first_part)


def _loop(
    low: ir.Value,
    high: ir.Value,
    values: _Values,
    body: Callable[[ir.Value, _Values], _Values],
) -> _Values:
    flat = [x for v in values for x in v]
    loop = scf.ForOp(low, high, module.current().i32(1), flat)

    def arrays(found: Sequence[ir.Value]) -> _Values:
        rest = iter(found)
        return [[next(rest) for _ in v] for v in values]

    with ir.InsertionPoint(loop.body):
        results = body(loop.induction_variable, arrays(list(loop.inner_iter_args)))
        scf.yield_([x for v in results for x in v])
    return arrays(list(loop.results))
