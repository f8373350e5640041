# SPDX-License-Identifier: Apache-2.0
"""Plain loads and stores of up to 16 bytes per lane."""

from __future__ import annotations

import math

import numpy as np

from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.registers.linear import THREAD_BITS, THREADS, WARP_LANES
from pallas_gpu.layouts.smem.access_plan import (
    MAX_WIDTH_BYTES,
    AccessPlan,
    Kind,
    not_linear_error,
    split_threads,
)
from pallas_gpu.layouts.smem.address import address_form
from pallas_gpu.layouts.smem.banks import (
    BANK_BYTES,
    ideal_wavefronts,
    phase_lanes,
    wavefronts_of,
)
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.stagger import Stagger, find_staggers


class PartialBytesError(LayoutError):
    """The accesses of a layout do not consist of whole bytes."""


def plan_vector(
    bit_offsets: np.ndarray,
    smem: SmemLayout,
    kind: Kind,
    alignment: int,
    replication: tuple[int, ...],
    most_elements: int,
    *,
    stagger: bool = True,
) -> list[AccessPlan]:
    """The plan with the widest accesses, and narrower ones if there are conflicts.

    Args:
      bit_offsets: unswizzled, [128, registers, vector].
      smem: the whole array.
      kind: "load" or "store".
      alignment: a known divisor of the slice's address in bytes.
      replication: the replication bits of the thread index.
      most_elements: the most elements that one access may have.
      stagger: threads may access their registers in different orders.
    """
    bits = smem.itemsize_bits
    elements = _elements_per_access(bit_offsets, bits, alignment, most_elements)
    plans = []
    while True:
        plans.append(
            _plan_width(bit_offsets, smem, kind, elements, replication, stagger)
        )
        # Accesses narrower than a bank are not faster than those of a whole bank.
        if (
            plans[-1].conflict_free
            or elements == 1
            or elements * bits <= 8 * BANK_BYTES
        ):
            return plans
        elements //= 2


def _plan_width(
    bit_offsets: np.ndarray,
    smem: SmemLayout,
    kind: Kind,
    elements: int,
    replication: tuple[int, ...],
    stagger: bool,
) -> AccessPlan:
    width = elements * smem.itemsize_bits // 8
    starts = bit_offsets[:, :, ::elements].reshape(THREADS, -1) // 8
    columns, statics = split_threads(starts)
    form = address_form(columns, statics, smem.swizzle)
    if form is None:
        raise not_linear_error()
    phase_bits = range(phase_lanes(width).bit_length() - 1)
    staggers: tuple[Stagger, ...] = ()
    staggered = None
    if stagger:
        staggered = find_staggers(form, phase_bits, width, range(THREAD_BITS))
    if staggered is not None:
        form, staggers = staggered
    form = form.with_few_xors()
    warps = form.evaluate().T.reshape(-1, WARP_LANES)
    splits = range(0, bit_offsets.shape[2], elements)
    accesses = tuple((r, v) for r in range(bit_offsets.shape[1]) for v in splits)
    words = tuple((a,) for a in range(len(accesses)))
    return AccessPlan(
        method="vector",
        kind=kind,
        width_bytes=width,
        elements_per_access=elements,
        accesses=accesses,
        words=words,
        instructions=words,
        transpose=False,
        thread_columns=form.columns,
        thread_add=form.column_add,
        xor=form.xor,
        add=form.add,
        staggers=staggers,
        predicate_bits=replication,
        wavefronts_per_access=int(wavefronts_of(warps, width).max()),
        ideal_wavefronts=ideal_wavefronts(WARP_LANES, width),
    )


def _elements_per_access(
    offsets: np.ndarray, bits: int, alignment: int, most: int
) -> int:
    """The longest run of a register that is contiguous and aligned in memory."""
    vector = offsets.shape[2]
    count = math.gcd(vector, most) & -math.gcd(vector, most)
    while count * bits >= 8:
        runs = offsets.reshape(*offsets.shape[:2], -1, count)
        within = runs - runs[..., :1] == np.arange(count) * bits
        aligned = (runs[..., 0] % (count * bits) == 0).all()
        width = count * bits // 8
        if width <= min(MAX_WIDTH_BYTES, alignment) and within.all() and aligned:
            return count
        count //= 2
    raise PartialBytesError(
        "the elements of a register do not fill whole bytes of shared memory",
        expected="at least 8 contiguous bits per access",
        got=f"elements of {bits} bits in vectors of {vector}",
        hint="choose a layout with longer vectors along the minor dimension",
    )
