# SPDX-License-Identifier: Apache-2.0
"""tcgen05.cp of a left operand of tcgen05.mma."""

from __future__ import annotations

from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.emitters.tensor_cores import copy
from pallas_gpu.emitters.tensor_cores.tmem import TmemView
from pallas_gpu.layouts.smem import tcgen05_descriptor as descriptors
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS

_COLUMN_BYTES = COLUMN_BITS // 8
# Bytes of K in each row that an instruction copies.
_ROW_BYTES, _PLAIN_ROW_BYTES = 32, 16


def copy_to_tmem(smem: SmemView, tmem: TmemView, *, collective: bool) -> None:
    """Starts a copy of a left operand.

    PTX: `tcgen05.cp.cta_group::{1,2}.128x256b`, or `128x128b` without a swizzle, where
    chunks of 16 bytes are not neighbours. Since: sm_100a. The elected thread issues it,
    of a pair that of the leader. Its later tcgen05.mma read the operand; for others a
    later `commit_arrive` completes it.

    Args:
      smem: (128, K), tiled; K occupies a multiple of 32 bytes.
      tmem: (128, K), packed.
      collective: whether both CTAs of a pair copy.

    Raises:
      LayoutError: the instruction does not read the source.
    """
    operand = descriptors.plan_copy(smem.layout, smem.window)
    plain = operand.swizzle == NO_SWIZZLE
    step_bytes = _PLAIN_ROW_BYTES if plain else _ROW_BYTES
    copies = []
    for first_byte in range(0, operand.k * operand.itemsize_bits // 8, step_bytes):
        atom, within_bytes = divmod(first_byte, operand.swizzle)
        offset_bytes = atom * operand.k_atom_bytes + within_bytes
        copies.append((offset_bytes, first_byte // _COLUMN_BYTES))
    shape = "128x128b" if plain else "128x256b"
    fields = descriptors.fields(operand)
    copy.start(shape, smem, tmem, copies, fields, collective=collective)
