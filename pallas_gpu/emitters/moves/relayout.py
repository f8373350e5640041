# SPDX-License-Identifier: Apache-2.0
"""Converts arrays between register layouts: the emitter of `layouts/moves/`'s plans.

In every strategy, elements are first regrouped into the words or units to exchange, and
finally into the registers of the new layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_gpu.emitters import addressing, control, mbarrier, module, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.moves import shuffle
from pallas_gpu.emitters.moves.rearrange import rearrange
from pallas_gpu.emitters.moves.scratch import SmemScratch, require
from pallas_gpu.emitters.registers import Array, Deferred, RegisterArray, Splat, gather
from pallas_gpu.layouts import WGSplatLayout, plan_relayout
from pallas_gpu.layouts.moves.binary import Slot
from pallas_gpu.layouts.moves.exchange import Exchange, Side
from pallas_gpu.layouts.moves.least_scratch import IMAGE_BYTES
from pallas_gpu.layouts.moves.rearrange import reshape
from pallas_gpu.layouts.moves.relayout import Rename, RowMajor, filled
from pallas_gpu.layouts.moves.shuffle import OWN_LANE, Network, Shuffle
from pallas_gpu.layouts.registers.placement import (
    Placement,
    describe,
    place,
    place_registers,
)

_WORD_BITS = 32


def layout_cast(x: Array, layout, scratch: SmemScratch | None = None) -> Array:
    """Converts an array to a layout by `relayout`; materializes a deferred array in it.

    Raises:
      LayoutError: the layout does not match the shape, or is a splat layout.
      OutOfResources: data crosses warps, and the scratch is too small.
    """
    if isinstance(x, Splat) and isinstance(place(layout, x.shape), WGSplatLayout):
        return x
    target = place_registers(layout, x.shape)
    if isinstance(x, Deferred):
        return x.materialize(target)
    assert isinstance(x, RegisterArray)
    return relayout(x, target, scratch)


def relayout(
    x: RegisterArray, target: Placement, scratch: SmemScratch | None = None
) -> RegisterArray:
    """Converts an array to another layout at the lowest cost.

    PTX: none if registers are only renamed; `shfl.sync` within warps; across warps, or
    if it is cheaper, `st.shared`, `barrier.sync`, `ld.shared`. All threads of the
    warpgroup issue it.

    Args:
      x: bools are exchanged as bytes, float8 as its bits.
      target: the new layout, of the same shape.
      scratch: SMEM for data that crosses warps, 16 bytes or more; see
        `layouts/moves/relayout.py`.

    Raises:
      OutOfResources: the scratch is too small.
    """
    if x.layout == target:
        return x
    available = 0 if scratch is None else scratch.size_bytes
    bits = dtypes.bits(x.dtype)
    plan = plan_relayout(x.layout, target, bits, available)
    if isinstance(plan.method, Rename):
        values = _regroup(x.values, plan.method.sources)
        return RegisterArray(values, target, x.dtype)
    if plan.scratch_bytes:
        least = min(plan.scratch_bytes, IMAGE_BYTES)
        scratch = require(scratch, least, _conversion(x, target))
    if dtypes.is_packed(x.dtype):
        # In the scratch too each element takes a byte.
        bytes_ = relayout(x.with_values(x.values, dtypes.U8), target, scratch)
        return bytes_.with_values(bytes_.values, x.dtype)
    if plan.scratch_bytes > available:
        return rearrange(reshape(x.shape, x.shape), [x], target, scratch)
    memory = dtypes.memory_dtype(x.dtype)
    held = x.with_values(_converted(x.values, x.dtype, memory), memory)
    if isinstance(plan.method, Shuffle):
        moved = _by_shuffles(plan.method, held, target)
    else:
        assert scratch is not None
        moved = _through_smem(plan.method, held, target, scratch.pointer)
    return RegisterArray(_converted(moved, memory, x.dtype), target, x.dtype)


def _converted(
    values: Iterable[ir.Value], src: np.dtype, dst: np.dtype
) -> tuple[ir.Value, ...]:
    return tuple(convert_value(value, src, dst) for value in values)


def _conversion(x: RegisterArray, target: Placement) -> str:
    layouts = f"{describe(x.layout)} to {describe(target)}"
    return f"converting {x.dtype}{list(x.shape)} from {layouts}"


def _regroup(
    values: Sequence[ir.Value], sources: Sequence[Sequence[Slot]]
) -> tuple[ir.Value, ...]:
    """As `gather`, by words if elements stay adjacent: bytes cost a prmt each."""
    length = values[0].type.shape[0]
    width = values[0].type.element_type.width
    run = min(length, len(sources[0]), max(_WORD_BITS // width, 1))
    while not all(_in_runs(source, run) for source in sources):
        run //= 2
    if run == 1:
        return _by_bytes(values, sources) if width == 8 else gather(values, sources)
    wide = np.dtype(f"int{run * width}")
    parts = {value: dtypes.bitcast(value, wide) for value in values}
    starts = [[(r, v // run) for r, v in source[::run]] for source in sources]
    results = gather([parts[value] for value in values], starts)
    type_ = ir.VectorType.get([len(sources[0])], values[0].type.element_type)
    back = {r: r if r.type == type_ else vector.bitcast(type_, r) for r in results}
    return tuple(back[result] for result in results)


def _by_bytes(
    values: Sequence[ir.Value], sources: Sequence[Sequence[Slot]]
) -> tuple[ir.Value, ...]:
    """As `gather`, for bytes. LLVM would extract and insert each byte separately."""
    words = [_to_words(value) for value in values]

    def build(source: Sequence[Slot]) -> ir.Value:
        merged = [
            _merge([(words[r][v // 4], v % 4) for r, v in source[i : i + 4]])
            for i in range(0, len(source), 4)
        ]
        type_ = ir.VectorType.get([len(source)], values[0].type.element_type)
        return _from_words(merged, type_)

    done = {source: build(source) for source in dict.fromkeys(map(tuple, sources))}
    return tuple(done[tuple(source)] for source in sources)


def _merge(parts: Sequence[tuple[ir.Value, int]]) -> ir.Value:
    """A word of up to four bytes (word, byte in it). PTX: `prmt.b32`, of two words."""
    distinct = list(dict.fromkeys(word for word, _ in parts))
    i32 = ir.IntegerType.get_signless(_WORD_BITS)
    kernel = module.current()
    # The position of each byte: in the merged word once it is there, else in its own.
    merged, places = distinct[0], [b if w == distinct[0] else -1 for w, b in parts]
    for other in distinct[1:] or distinct:
        for i, (word, byte) in enumerate(parts):
            if word == other and places[i] < 0:
                places[i] = 4 + byte
        if places != list(range(len(places))):
            selector = sum(max(place, 0) << 4 * i for i, place in enumerate(places))
            merged = llvm.call_intrinsic(
                i32, "llvm.nvvm.prmt", [merged, other, kernel.i32(selector)], [], []
            )
        places = [i if place >= 0 else -1 for i, place in enumerate(places)]
    return merged


def _in_runs(source: Sequence[Slot], run: int) -> bool:
    """Whether the elements form aligned runs of adjacent elements."""
    return all(
        v % run == 0 and list(source[i : i + run]) == [(r, v + k) for k in range(run)]
        for i, (r, v) in ((i, source[i]) for i in range(0, len(source), run))
    )


# --- within a warp --------------------------------------------------------------------


def _by_shuffles(
    plan: Shuffle, x: RegisterArray, target: Placement
) -> tuple[ir.Value, ...]:
    packed = _regroup(x.values, plan.packs)
    type_ = packed[0].type
    # For each 32-bit part: that part of every word.
    parts = list(zip(*map(_to_words, packed), strict=True))
    placed = [_exchange_words(plan, words) for words in parts]
    filling = [_from_words(words, type_) for words in zip(*placed, strict=True)]
    return _regroup(filling, filled(plan.places, target))


def _exchange_words(plan: Shuffle, words: Sequence[ir.Value]) -> list[ir.Value]:
    sent = _rename_words(plan.send, words, plan.sources)
    received = [
        _receive(word, plan.lane_columns, shift)
        for word, shift in zip(sent, plan.shifts, strict=True)
    ]
    return _rename_words(plan.place, received, range(len(received)))


def _receive(word: ir.Value, lane_columns: tuple[int, ...], shift: int) -> ir.Value:
    if lane_columns == OWN_LANE:
        return shuffle.from_distance(word, shift) if shift else word
    lane = addressing.thread_xor(lane_columns)
    if shift:
        lane = arith.xori(lane, module.current().i32(shift))
    return shuffle.from_lane(word, lane)


def _rename_words(
    network: Network, words: Sequence[ir.Value], outputs: Iterable[int]
) -> list[ir.Value]:
    """The requested words after the stages of a network."""
    done = {(index, 0): word for index, word in enumerate(words)}
    last = len(network.stages)
    return [_renamed_word(network, index, last, done) for index in outputs]


def _renamed_word(
    network: Network, index: int, stage: int, done: dict[tuple[int, int], ir.Value]
) -> ir.Value:
    if (index, stage) not in done:
        mask, distance = network.stages[stage - 1]
        own = _renamed_word(network, index, stage - 1, done)
        other = _renamed_word(network, index ^ distance, stage - 1, done)
        odd = addressing.thread_parity(mask)
        done[index, stage] = arith.select(odd, other, own)
    return done[index, stage]


def _to_words(value: ir.Value) -> list[ir.Value]:
    """A vector as 32-bit words; a shorter one occupies the low bits of one word."""
    total_bits = _total_bits(value)
    if total_bits % _WORD_BITS == 0:
        words = dtypes.bitcast(value, dtypes.I32)
        return [dtypes.extract(words, i) for i in range(total_bits // _WORD_BITS)]
    narrow = dtypes.bitcast(value, np.dtype(f"int{total_bits}"))
    i32 = ir.IntegerType.get_signless(_WORD_BITS)
    return [arith.extui(i32, dtypes.extract(narrow, 0))]


def _from_words(words: Sequence[ir.Value], type_: ir.Type) -> ir.Value:
    """The vector of the given type that these words make up."""
    total_bits = type_.shape[0] * type_.element_type.width
    if total_bits % _WORD_BITS:
        narrow = ir.IntegerType.get_signless(total_bits)
        words = [arith.trunci(narrow, words[0])]
    packed = dtypes.pack(words)
    return packed if packed.type == type_ else vector.bitcast(type_, packed)


def _total_bits(value: ir.Value) -> int:
    return value.type.shape[0] * value.type.element_type.width


# --- through SMEM ---------------------------------------------------------------------


def _through_smem(
    plan: Exchange | RowMajor, x: RegisterArray, target: Placement, pointer: ir.Value
) -> tuple[ir.Value, ...]:
    # Threads may still be reading what an earlier use stored in the scratch.
    mbarrier.synchronize()
    if isinstance(plan, RowMajor):
        view = smem.SmemView.whole(pointer, plan.smem, x.dtype)
        smem.store(view, x, optimized=False)
        mbarrier.synchronize()
        return smem.load(view, target, optimized=False).values
    barrier = mbarrier.warp_barrier if plan.within_warps else mbarrier.synchronize
    loaded: dict[tuple[Slot, ...], ir.Value] = {}
    for parts in plan.rounds:
        if parts.start:
            barrier()
        _store_parts(plan, parts, x, pointer)
        barrier()
        _load_parts(plan, parts, x.dtype, pointer, loaded)
    return _regroup(list(loaded.values()), filled(loaded, target))


def _store_parts(
    plan: Exchange, parts: range, x: RegisterArray, pointer: ir.Value
) -> None:
    def condition(part: int) -> tuple[tuple[int, bool], ...]:
        return plan.store.conditions[part]

    for needed, alike in itertools.groupby(parts, condition):
        together = list(alike)
        units = [_regroup(x.values, plan.store.units[part]) for part in together]
        pointers = [
            _pointers(plan.store, pointer, (part - parts.start) * plan.part_bytes)
            for part in together
        ]
        first_copy = addressing.thread_bits_clear(plan.idle_bits)
        with control.predicated(_conjunction(needed, first_copy)):
            for values, places in zip(units, pointers, strict=True):
                for value, place_ in zip(values, places, strict=True):
                    llvm.store(value, place_)


def _load_parts(
    plan: Exchange,
    parts: range,
    dtype: np.dtype,
    pointer: ir.Value,
    loaded: dict[tuple[Slot, ...], ir.Value],
) -> None:
    for part in parts:
        units = plan.load.units[part]
        start_bytes = (part - parts.start) * plan.part_bytes
        own = _conjunction(plan.load.conditions[part])
        type_ = dtypes.vector_type(dtype, len(units[0]))
        places = _pointers(plan.load, pointer, start_bytes)
        for unit, place_ in zip(units, places, strict=True):
            value = llvm.load(type_, place_)
            if own is not None and unit in loaded:
                value = arith.select(own, value, loaded[unit])
            loaded[unit] = value


def _pointers(side: Side, pointer: ir.Value, start_bytes: int) -> list[ir.Value]:
    form = side.form
    add = [start_bytes + a for a in form.add]
    return addressing.thread_pointers(
        pointer, form.columns, form.column_add, form.xor, add
    )


def _conjunction(
    conditions: Sequence[tuple[int, bool]], result: ir.Value | None = None
) -> ir.Value | None:
    """i1: all conditions (mask, odd) and `result` hold; None without conditions."""
    for mask, odd in conditions:
        holds = addressing.thread_parity(mask)
        if not odd:
            holds = arith.xori(holds, dtypes.constant(True, dtypes.BOOL))
        result = holds if result is None else arith.andi(result, holds)
    return result
