# SPDX-License-Identifier: Apache-2.0
"""Reductions: the emitter of the plans of `layouts/moves/reductions.py`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_gpu.emitters import addressing, control, mbarrier, module, padding
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.elements import dtypes, table
from pallas_gpu.emitters.elements.convert import before_extension, convert_value
from pallas_gpu.emitters.elements.identities import identity
from pallas_gpu.emitters.moves import image, redux, shuffle
from pallas_gpu.emitters.moves.scratch import SmemScratch, require
from pallas_gpu.emitters.registers import RegisterArray, Splat
from pallas_gpu.emitters.tensor_cores import load_reduce
from pallas_gpu.layouts.moves.reductions import Reduction, plan_reduction
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREAD_BITS, WARPS

Kind = Literal["add", "mul", "max", "min", "and", "or", "xor"]

# Products in a sum of their own: longer ones round more often.
_CHAIN = 4
# A copy of an element changes nothing. A `redux` takes as long as two shuffles.
_IDEMPOTENT, _LEAST_LANES = ("max", "min", "and", "or"), 3
_BOOL_KINDS = {"max": "or", "min": "and", "add": "or", "mul": "and"}


def reduce(
    kind: Kind,
    x: RegisterArray,
    axes: Sequence[int],
    scratch: SmemScratch | None = None,
    chains: int | None = None,
) -> RegisterArray | Splat:
    """Reduces an array over axes; the result has the reduced layout.

    PTX: `shfl.sync.bfly`, or `redux.sync` of all lanes of a warp; across warps
    `st.shared`, `barrier.sync`, `ld.shared`, or `barrier.red` of bools. All threads of
    the warpgroup issue it. All copies of an element are bitwise equal.

    Args:
      kind: `max` and `min` propagate NaN; `and`, `or`, `xor` are for integers, bools.
      x: in a linear layout; in any layout if all axes are reduced. Padding along the
        reduced axes does not count.
      axes: the axes to reduce.
      scratch: required if warps hold different parts, see `Reduction`.
      chains: a thread combines its registers in this many chains; None is a tree.

    Returns:
      An array in `x.layout.reduce(axes)`, or a splat of shape () if no axis remains.

    Raises:
      LayoutError: a thread bit moves along reduced and along remaining axes.
      OutOfResources: the scratch is smaller than a register of a lane of each warp.
    """
    axes = tuple(sorted(a % len(x.shape) for a in axes))
    steps, wanted = plan_reduction(x.layout, axes), x.dtype
    if kind in ("max", "min"):
        x = _before_extension(x) or x
    if padding.is_padded(x.layout):
        meaning = _BOOL_KINDS.get(kind, kind) if x.dtype == dtypes.BOOL else kind
        x = padding.filled(x, identity(meaning, x.dtype), axes)
    own, values, name = x.dtype, list(x.values), str(kind)
    if own == dtypes.BOOL:
        # Shuffles and memory have no single-bit elements.
        own, name = dtypes.U8, _BOOL_KINDS.get(name, name)
        values = [convert_value(v, dtypes.BOOL, own) for v in values]
    row = table.lookup(name)
    first = row.emitter(own)
    groups = [[values[r] for r in group] for group in steps.groups]
    if steps.vector_reduced or x.layout.vector_length == 1:
        groups = [_of_loads(kind, group, own) or group for group in groups]
    if kind == "add":
        groups = [_with_products_added(first, group) for group in groups]
    partial = [_fold(first, _chained(first, group, chains)) for group in groups]
    dtype = own if wanted == dtypes.BOOL else wanted
    if own != dtype and steps.vector_reduced:
        partial = [_fold_halves(first, value) for value in partial]
    partial = [convert_value(v, own, dtype) for v in partial]
    combine = row.emitter(dtype)
    if steps.vector_reduced:
        partial = [_fold_lanes(combine, value) for value in partial]
    if wanted == dtypes.BOOL and name in redux.VOTES and steps.is_of_warpgroup:
        return Splat(_of_all_threads(name, partial[0], dtype), wanted, ())
    if _is_of_warp(name, steps) and redux.combines(name, dtype, steps.length):
        # More bools than one share a word, and a `redux`.
        is_vote = wanted == dtypes.BOOL and name in redux.VOTES and steps.length == 1
        whole = redux.voted if is_vote else redux.combined
        partial = [whole(name, v, dtype) for v in partial]
    else:
        for bit in steps.lanes:
            partial = [
                combine(v, shuffle.exchange(v, dtype, 1 << bit)) for v in partial
            ]
    if steps.warps:
        partial = _across_warps(combine, partial, dtype, steps, scratch)
    partial = [convert_value(v, dtype, wanted) for v in partial]
    if steps.result is None:
        return Splat(dtypes.extract(partial[0], 0), wanted, ())
    return RegisterArray(tuple(partial), steps.result, wanted)


# --- within a thread and a warp -------------------------------------------------------


def _before_extension(x: RegisterArray) -> RegisterArray | None:
    """The array of bfloat16 or float16 of whose conversion to float32 x is the result.

    Their largest elements are equal, and an instruction on pairs of 16-bit elements
    combines two or four of them.
    """
    if x.dtype != dtypes.F32:
        return None
    for dtype in (dtypes.BF16, dtypes.F16):
        values = [before_extension(v, dtype) for v in x.values]
        narrow = tuple(v for v in values if v is not None)
        if len(narrow) == len(values):
            return RegisterArray(narrow, x.layout, dtype)
    return None


def _of_loads(
    kind: Kind, values: list[ir.Value], dtype: np.dtype
) -> list[ir.Value] | None:
    found = load_reduce.extrema(kind, values, dtype)
    return None if found is None else [dtypes.splat(x, 1) for x in found]


def _fold(combine: Callable, values: Sequence[ir.Value]) -> ir.Value:
    """Folds in a balanced tree: the depth bounds latency and rounding errors."""
    values = list(values)
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        rest = values[-1:] if len(values) % 2 else []
        values = [combine(a, b) for a, b in pairs] + rest
    return values[0]


def _with_products_added(combine: Callable, values: list[ir.Value]) -> list[ir.Value]:
    """Adds products one after the other, up to four: each addition is part of an fma.

    In a tree of pairs only every other product is contracted with its addition.
    """
    if not all(map(_is_product, values)):
        return values
    parts = [values[i : i + _CHAIN] for i in range(0, len(values), _CHAIN)]
    return [functools.reduce(combine, part) for part in parts]


def _is_product(value: ir.Value) -> bool:
    owner = value.owner
    return isinstance(owner, ir.Operation | ir.OpView) and owner.name == "arith.mulf"


def _chained(
    combine: Callable, values: list[ir.Value], chains: int | None
) -> list[ir.Value]:
    """Combines every n-th value, one after the other."""
    if chains is None:
        return values
    parts = [values[i::chains] for i in range(min(chains, len(values)))]
    return [functools.reduce(combine, part) for part in parts]


def _fold_halves(combine: Callable, value: ir.Value) -> ir.Value:
    """Combines the halves of a vector until a pair remains."""
    while (lanes := dtypes.length(value) or 1) > 2 and lanes % 2 == 0:
        half = range(lanes // 2)
        low, high = (
            vector.shuffle(value, value, [first + i for i in half])
            for first in (0, lanes // 2)
        )
        value = combine(low, high)
    return value


def _fold_lanes(combine: Callable, value: ir.Value) -> ir.Value:
    lanes = dtypes.length(value) or 1
    return dtypes.splat(
        _fold(combine, [dtypes.extract(value, i) for i in range(lanes)]), 1
    )


def _is_of_warp(kind: str, steps: Reduction) -> bool:
    """Whether a result is that of all lanes: other lanes may hold copies, for some."""
    if kind in _IDEMPOTENT and not steps.slots:
        return len(steps.lanes) >= _LEAST_LANES
    return len(steps.lanes) == LANE_BITS


# --- across warps ---------------------------------------------------------------------


def _of_all_threads(kind: str, value: ir.Value, dtype: np.dtype) -> ir.Value:
    """A bool of all threads, which needs no memory: `barrier.red`."""
    holds = dtypes.extract(convert_value(value, dtype, dtypes.BOOL), 0)
    true = dtypes.constant(True, dtypes.BOOL)
    if kind == "and":
        return mbarrier.agree(holds)
    return arith.xori(mbarrier.agree(arith.xori(holds, true)), true)


def _across_warps(
    combine: Callable,
    partial: list[ir.Value],
    dtype: np.dtype,
    steps: Reduction,
    scratch: SmemScratch | None,
) -> list[ir.Value]:
    """Each warp stores its part; each thread loads what it combines, in a fixed order.

    If the scratch does not hold all registers, this takes several rounds; where it does
    not hold one register of all lanes, they take turns.
    """
    slot_bytes = steps.slot_bytes(dtypes.bits(dtype))
    scratch = require(scratch, WARPS * slot_bytes, "a reduction across warps")
    pointer, slots = scratch.pointer, scratch.size_bytes // (WARPS * slot_bytes)
    together = min(slots.bit_length() - 1, len(steps.slots))
    waiting = steps.slots[together:]
    steps = dataclasses.replace(steps, slots=steps.slots[:together])
    per_round = slots >> together

    def turn(span: image.Span | None, values: Sequence[ir.Value]) -> list[ir.Value]:
        own = None if span is None else _are_bits(waiting, span.low)
        result: list[ir.Value] = []
        for first in range(0, len(partial), per_round):
            chunk = partial[first : first + per_round]
            result += _one_round(combine, chunk, dtype, steps, pointer, waiting, own)
        if own is None:
            return result
        pairs = zip(result, values, strict=True)
        return [arith.select(own, new, old) for new, old in pairs]

    return image.in_rounds(1 << len(waiting), 1, partial, turn)


def _are_bits(bits: Sequence[int], number: int | ir.Value) -> ir.Value:
    """i1: these bits of the thread's index form a number."""
    columns = [0] * THREAD_BITS
    for i, bit in enumerate(bits):
        columns[bit] = 1 << i
    value = module.current().i32(number)
    found = addressing.thread_sum(columns)
    return arith.cmpi(arith.CmpIPredicate.eq, found, value)


def _one_round(
    combine: Callable,
    partial: list[ir.Value],
    dtype: np.dtype,
    steps: Reduction,
    pointer: ir.Value,
    waiting: Sequence[int],
    turn: ir.Value | None,
) -> list[ir.Value]:
    slot_bytes = steps.slot_bytes(dtypes.bits(dtype))
    register_bytes = slot_bytes << len(steps.slots)
    warp_bytes = register_bytes * len(partial)
    columns = [0] * THREAD_BITS
    for i, bit in enumerate(steps.slots):
        columns[bit] = slot_bytes << i
    for i, bit in enumerate(range(LANE_BITS, THREAD_BITS)):
        columns[bit] = warp_bytes << i
    own = addressing.offset_pointer(pointer, addressing.thread_sum(columns))
    idle = [b for b in range(LANE_BITS) if b not in (*steps.slots, *waiting)]
    # Threads may still be reading what an earlier round stored here.
    mbarrier.warpgroup_barrier()
    with predicated(control.both(addressing.thread_bits_clear(idle), turn)):
        for r, value in enumerate(partial):
            llvm.store(value, addressing.offset_pointer(own, r * register_bytes))
    mbarrier.warpgroup_barrier()
    for bit in steps.warps:
        columns[bit] = 0
    base = addressing.offset_pointer(pointer, addressing.thread_sum(columns))
    warps = [0]
    for bit in steps.warps:
        warps += [w + (warp_bytes << (bit - LANE_BITS)) for w in warps]
    result = []
    for r, value in enumerate(partial):
        parts = [
            llvm.load(
                value.type, addressing.offset_pointer(base, w + r * register_bytes)
            )
            for w in warps
        ]
        result.append(_fold(combine, parts))
    return result
