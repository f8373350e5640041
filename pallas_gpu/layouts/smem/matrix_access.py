# SPDX-License-Identifier: Apache-2.0
"""ldmatrix and stmatrix: matrices of 16-byte rows, up to four per instruction.

PTX ISA, "Warp-level matrix load instruction: ldmatrix" and "... stmatrix": each lane
supplies the address of a row, those of the first matrix first. For g = lane / 4 and
t = lane % 4 a thread has of each matrix

- m8n8 of 16-bit elements: bytes 4 t to 4 t + 3 of row g; with .trans the elements at
  byte 2 g of rows 2 t and 2 t + 1.
- ldmatrix, m16n16.trans of 8-bit elements: byte g of rows 4 t to 4 t + 3, and in a
  second register byte g + 8 of these rows.
- stmatrix, m16n8.trans of 8-bit elements, with 8 rows in memory: byte g of rows 2 t and
  2 t + 1, and byte g + 8 of these rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.linear import LANE_BITS, THREADS, WARP_LANES
from pallas_gpu.layouts.smem.access_plan import (
    MAX_WIDTH_BYTES,
    AccessPlan,
    Kind,
    split_threads,
)
from pallas_gpu.layouts.smem.address import AddressForm, address_form
from pallas_gpu.layouts.smem.banks import ideal_wavefronts, wavefronts_of
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.stagger import Stagger, find_staggers, pairs_at

_ROW_BYTES = 16
_WORD_BITS = 32
# Shared memory serves eight rows at once.
_PHASE_BITS = 3

# The XOR part and the sum part of an address.
_Key = tuple[int, int]


class _Fragment(NamedTuple):
    """Registers that are fragments of matrices."""

    transpose: bool
    elements: int  # of an access
    row_columns: tuple[int, ...]  # bytes between rows, per bit of the row number
    row_data_bits: tuple[int | None, ...]  # the thread bit of each row bit
    warp_columns: tuple[int, int]
    statics: list[int]  # of matrices
    words: Sequence[tuple[int, ...]]  # the accesses of each register, matrix by matrix


class _Grouping(NamedTuple):
    """Matrices joined into instructions, and the distance between them."""

    groups: list[tuple[int, ...]]
    deltas: list[_Key]


def plan_matrix(
    bit_offsets: np.ndarray, smem: SmemLayout, kind: Kind, byte_matrices: bool
) -> list[AccessPlan]:
    """All plans with ldmatrix or stmatrix; none if the registers are not fragments."""
    bits = smem.itemsize_bits
    fragments = [
        *_straight_fragments(bit_offsets, bits),
        *_transposed_fragments(bit_offsets, bits, kind, byte_matrices),
    ]
    plans = [_plan_fragment(x, bit_offsets.shape, smem, kind) for x in fragments]
    return [plan for plan in plans if plan is not None]


def _straight_fragments(bit_offsets: np.ndarray, bits: int) -> Iterator[_Fragment]:
    elements = _WORD_BITS // bits
    if elements < 1 or bit_offsets.shape[2] % elements:
        return
    words = bit_offsets.reshape(*bit_offsets.shape[:2], -1, elements)
    if (words - words[..., :1] != np.arange(elements) * bits).any():
        return
    split = _try_split(words[..., 0])
    if split is None:
        return
    columns, statics = split
    if columns[:2] == [4, 8] and _on_rows([*columns[2:], *statics]):
        rows, warps = tuple(columns[2:5]), (columns[5], columns[6])
        single = [(a,) for a in range(len(statics))]
        yield _Fragment(False, elements, rows, (2, 3, 4), warps, statics, single)


def _transposed_fragments(
    bit_offsets: np.ndarray, bits: int, kind: Kind, byte_matrices: bool
) -> Iterator[_Fragment]:
    if bits not in (8, 16) or bit_offsets.shape[2] % 2:
        return
    steps = (bit_offsets[:, :, 1::2] - bit_offsets[:, :, ::2]) // 8
    step, unit = int(steps[0, 0, 0]), bits // 8
    split = _try_split(bit_offsets[:, :, ::2])
    if split is None or (steps != step).any():
        return
    columns, statics = split
    if columns[2:5] != [unit, 2 * unit, 4 * unit]:
        return
    if not _on_rows([step, *columns[:2], *columns[5:]]):
        return
    # The two elements of an access are in two rows, so an exchange of registers cannot
    # separate these rows: their thread bit is None.
    rows, bits_of_rows = (step, columns[0], columns[1]), (None, 0, 1)
    warps = (columns[5], columns[6])
    if bits == 16:
        if _on_rows(statics):
            single = [(a,) for a in range(len(statics))]
            yield _Fragment(True, 2, rows, bits_of_rows, warps, statics, single)
        return
    halves = pairs_at([(0, x) for x in statics], (0, _ROW_BYTES // 2))
    if not byte_matrices or halves is None:
        return
    starts = [statics[a] for a, _ in halves]
    if not _on_rows(starts):
        return
    if kind == "store":
        yield _Fragment(True, 2, rows, bits_of_rows, warps, starts, halves)
        return
    # A register of the load has four rows: of two accesses, at any distance.
    for other in (1 << i for i in range(len(starts).bit_length() - 1)):
        distance = starts[other] - starts[0]
        pairs = pairs_at([(0, x) for x in starts], (0, distance))
        if pairs is not None:
            yield _Fragment(
                True,
                2,
                (step, distance, *columns[:2]),
                (None, *bits_of_rows),
                warps,
                [starts[a] for a, _ in pairs],
                [(halves[a][i], halves[b][i]) for a, b in pairs for i in (0, 1)],
            )


def _try_split(bit_offsets: np.ndarray) -> tuple[list[int], list[int]] | None:
    try:
        return split_threads(bit_offsets.reshape(THREADS, -1) // 8)
    except LayoutError:
        return None


def _on_rows(offsets: list[int]) -> bool:
    return all(offset % _ROW_BYTES == 0 for offset in offsets)


def _plan_fragment(
    fragment: _Fragment, shape: tuple[int, ...], smem: SmemLayout, kind: Kind
) -> AccessPlan | None:
    columns = [*fragment.row_columns, *fragment.warp_columns]
    form = address_form(columns, fragment.statics, smem.swizzle)
    if form is None:
        return None
    data_bits = (*fragment.row_data_bits, None, None)
    staggered = find_staggers(form, range(_PHASE_BITS), _ROW_BYTES, data_bits)
    form, exchanges = staggered or (form, ())
    row_bits = len(fragment.row_columns)
    grouping = _group_matrices(form, LANE_BITS - row_bits)
    rows = len(grouping.groups[0]) << row_bits
    form = _with_matrix_bits(form, grouping, row_bits).with_few_xors()
    lanes = form.evaluate().T.reshape(-1, WARP_LANES)[:, :rows]
    splits = range(0, shape[2], fragment.elements)
    each = len(fragment.words) // len(fragment.statics)

    staggers = [
        [(each * a + i, each * b + i) for a, b in x.pairs for i in range(each)]
        for x in exchanges
    ]
    return AccessPlan(
        method="matrix",
        kind=kind,
        width_bytes=MAX_WIDTH_BYTES,
        elements_per_access=fragment.elements,
        accesses=tuple((r, v) for r in range(shape[1]) for v in splits),
        words=tuple(fragment.words),
        instructions=tuple(
            tuple(each * m + i for m in group for i in range(each))
            for group in grouping.groups
        ),
        transpose=fragment.transpose,
        thread_columns=form.columns,
        thread_add=form.column_add,
        xor=form.xor,
        add=form.add,
        staggers=tuple(
            Stagger(x.thread_bit, tuple(pairs))
            for x, pairs in zip(exchanges, staggers, strict=True)
        ),
        predicate_bits=(),
        wavefronts_per_access=int(wavefronts_of(lanes, _ROW_BYTES).max()),
        ideal_wavefronts=ideal_wavefronts(rows, _ROW_BYTES),
    )


def _with_matrix_bits(
    form: AddressForm, grouping: _Grouping, row_bits: int
) -> AddressForm:
    """Lane bits after those of the row select the matrix; an instruction has a key."""
    deltas = grouping.deltas + [(0, 0)] * (LANE_BITS - row_bits - len(grouping.deltas))
    xors, adds = zip(*deltas, strict=True)
    first = [group[0] for group in grouping.groups]
    columns, column_add = form.columns, form.column_add
    return form.replace(
        columns=(*columns[:row_bits], *xors, *columns[row_bits:]),
        column_add=(*column_add[:row_bits], *adds, *column_add[row_bits:]),
        xor=tuple(form.xor[a] for a in first),
        add=tuple(form.add[a] for a in first),
    )


def _group_matrices(form: AddressForm, most_bits: int) -> _Grouping:
    """Joins as many matrices as possible at a constant distance."""
    keys = form.keys
    groups: list[tuple[int, ...]] = [(a,) for a in range(len(keys))]
    deltas: list[_Key] = []
    while len(deltas) < most_bits and len(groups) > 1:
        pairing = _pair_up([keys[group[0]] for group in groups])
        if pairing is None:
            break
        delta, pairs = pairing
        groups = [groups[a] + groups[b] for a, b in pairs]
        deltas.append(delta)
    return _Grouping(groups, deltas)


def _pair_up(keys: list[_Key]) -> tuple[_Key, list[tuple[int, int]]] | None:
    """Splits the keys into pairs at one distance (XOR part, sum part)."""
    for xor, add in keys[1:]:
        delta = (xor ^ keys[0][0], add - keys[0][1])
        pairs = pairs_at(keys, delta)
        if pairs is not None:
            return delta, pairs
    return None
