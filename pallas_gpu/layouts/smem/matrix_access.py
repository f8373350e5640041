# SPDX-License-Identifier: Apache-2.0
"""ldmatrix and stmatrix: four 8x8 matrices of 16-bit elements per instruction.

PTX ISA, "Warp-level matrix load instruction: ldmatrix": lane i supplies the address of
row i % 8 of matrix i // 8, a row is 16 bytes, and thread t receives 32 bits: bytes
4 * (t % 4) of row t // 4; with .trans the 16-bit elements at byte 2 * (t // 4) of rows
2 * (t % 4) and 2 * (t % 4) + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.linear import THREADS, WARP_LANES
from pallas_gpu.layouts.smem.access_plan import (
    MAX_WIDTH_BYTES,
    AccessPlan,
    Kind,
    split_threads,
)
from pallas_gpu.layouts.smem.address import AddressForm, address_form
from pallas_gpu.layouts.smem.banks import ideal_wavefronts, wavefronts_of
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.stagger import find_staggers

_ROW_BYTES = 16
_WORD_BITS = 32
_MATRIX_ROWS = 8


class _Fragment(NamedTuple):
    """Registers that are fragments of 8x8 matrices."""

    transpose: bool
    elements: int
    row_columns: tuple[int, int, int]  # bytes between rows, per bit of the row number
    row_data_bits: tuple[int | None, ...]  # the thread bit of each row bit
    warp_columns: tuple[int, int]
    statics: list[int]


class _Grouping(NamedTuple):
    """Accesses joined into instructions, and the distance between their matrices."""

    groups: list[tuple[int, ...]]
    deltas: list[tuple[int, int]]


def plan_matrix(
    bit_offsets: np.ndarray, smem: SmemLayout, kind: Kind
) -> list[AccessPlan]:
    """All plans with ldmatrix or stmatrix; none if the registers are not fragments."""
    found = [
        _straight_fragment(bit_offsets, smem.itemsize_bits),
        _transposed_fragment(bit_offsets, smem.itemsize_bits),
    ]
    plans = []
    for fragment in found:
        plan = fragment and _plan_fragment(fragment, bit_offsets.shape, smem, kind)
        if plan:
            plans.append(plan)
    return plans


def _straight_fragment(bit_offsets: np.ndarray, bits: int) -> _Fragment | None:
    elements = _WORD_BITS // bits
    if elements < 1 or bit_offsets.shape[2] % elements:
        return None
    words = bit_offsets.reshape(*bit_offsets.shape[:2], -1, elements)
    if (words - words[..., :1] != np.arange(elements) * bits).any():
        return None
    split = _try_split(words[..., 0])
    if split is None:
        return None
    columns, statics = split
    if columns[:2] != [4, 8] or not _on_rows([*columns[2:], *statics]):
        return None
    rows = (columns[2], columns[3], columns[4])
    warps = (columns[5], columns[6])
    return _Fragment(False, elements, rows, (2, 3, 4), warps, statics)


def _transposed_fragment(bit_offsets: np.ndarray, bits: int) -> _Fragment | None:
    if bits != 16 or bit_offsets.shape[2] % 2:
        return None
    steps = (bit_offsets[:, :, 1::2] - bit_offsets[:, :, ::2]) // 8
    step = int(steps[0, 0, 0])
    split = _try_split(bit_offsets[:, :, ::2])
    if split is None or (steps != step).any():
        return None
    columns, statics = split
    outside = [step, *columns[:2], *columns[5:], *statics]
    if columns[2:5] != [2, 4, 8] or not _on_rows(outside):
        return None
    # The two elements of a register are in adjacent rows, so an exchange of registers
    # cannot separate these rows: their thread bit is None.
    rows = (step, columns[0], columns[1])
    warps = (columns[5], columns[6])
    return _Fragment(True, 2, rows, (None, 0, 1), warps, statics)


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
    staggered = find_staggers(form, range(3), _ROW_BYTES, data_bits)
    form, staggers = staggered or (form, ())
    grouping = _group_accesses(form)
    matrices = len(grouping.groups[0])
    form = _with_matrix_bits(form, grouping).with_few_xors()
    lanes = form.evaluate().T.reshape(-1, WARP_LANES)[:, : matrices * _MATRIX_ROWS]
    splits = range(0, shape[2], fragment.elements)
    return AccessPlan(
        method="matrix",
        kind=kind,
        width_bytes=MAX_WIDTH_BYTES,
        elements_per_access=fragment.elements,
        accesses=tuple((r, v) for r in range(shape[1]) for v in splits),
        instructions=tuple(grouping.groups),
        transpose=fragment.transpose,
        thread_columns=form.columns,
        thread_add=form.column_add,
        xor=form.xor,
        add=form.add,
        staggers=staggers,
        predicate_bits=(),
        wavefronts_per_access=int(wavefronts_of(lanes, _ROW_BYTES).max()),
        ideal_wavefronts=ideal_wavefronts(matrices * _MATRIX_ROWS, _ROW_BYTES),
    )


def _with_matrix_bits(form: AddressForm, grouping: _Grouping) -> AddressForm:
    """Lane bits 3 and 4 select the matrix; one address per instruction remains."""
    deltas = grouping.deltas + [(0, 0)] * (2 - len(grouping.deltas))
    xors, adds = (list(x) for x in zip(*deltas, strict=True))
    first = [group[0] for group in grouping.groups]
    return form.replace(
        columns=(*form.columns[:3], *xors, *form.columns[3:]),
        column_add=(*form.column_add[:3], *adds, *form.column_add[3:]),
        xor=tuple(form.xor[a] for a in first),
        add=tuple(form.add[a] for a in first),
    )


def _group_accesses(form: AddressForm) -> _Grouping:
    """Joins as many accesses as possible at a constant distance: 4, 2 or 1."""
    keys = form.keys
    groups: list[tuple[int, ...]] = [(a,) for a in range(len(keys))]
    deltas: list[tuple[int, int]] = []
    while len(deltas) < 2 and len(groups) > 1:
        pairing = _pair_up([keys[group[0]] for group in groups])
        if pairing is None:
            break
        delta, pairs = pairing
        groups = [groups[a] + groups[b] for a, b in pairs]
        deltas.append(delta)
    return _Grouping(groups, deltas)


def _pair_up(
    keys: list[tuple[int, int]],
) -> tuple[tuple[int, int], list[tuple[int, int]]] | None:
    """Splits the keys into pairs at one distance (XOR part, sum part)."""
    index = {key: a for a, key in enumerate(keys)}
    for xor, add in keys[1:]:
        delta = (xor ^ keys[0][0], add - keys[0][1])
        free = set(range(len(keys)))
        pairs = []
        for a, key in enumerate(keys):
            partner = index.get((key[0] ^ delta[0], key[1] + delta[1]))
            if a not in free or partner is None or partner not in free:
                continue
            free -= {a, partner}
            pairs.append((a, partner))
        if not free:
            return delta, pairs
    return None
