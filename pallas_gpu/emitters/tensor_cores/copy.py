# SPDX-License-Identifier: Apache-2.0
"""tcgen05.cp: asynchronous copies from SMEM to TMEM.

One thread issues them; its later tcgen05.mma are ordered after them, and its next
commit completes them for others.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir.dialects import llvm

from pallas_gpu.emitters import smem
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.smem import SmemView
from pallas_gpu.emitters.tensor_cores import pairs
from pallas_gpu.emitters.tensor_cores.tmem import TmemView
from pallas_gpu.layouts.smem import tcgen05_descriptor as descriptors
from pallas_gpu.layouts.smem.wgmma_descriptor import ADDRESS_SHIFT


def start(
    shape: str,
    source: SmemView,
    target: TmemView,
    copies: Sequence[tuple[int, int]],
    fields: int = descriptors.ROWS_OF_16_BYTES,
    *,
    collective: bool = False,
) -> None:
    """Starts copies.

    PTX: `tcgen05.cp.cta_group::{1,2}`. Since: sm_100a. The elected thread issues it, of
    a pair that of the leader.

    Args:
      shape: of the instruction, with its multicast.
      source, target: where the copies begin.
      copies: of each instruction the bytes and the columns from there.
      fields: the shared memory descriptor without its start address; the default is for
        contiguous rows of 16 bytes.
      collective: whether both CTAs of a pair copy, each from its SMEM to its TMEM.
    """
    lines = [
        f"add.u64 s, $1, {offset_bytes >> ADDRESS_SHIFT}; add.u32 d, $0, {column}; "
        f"tcgen05.cp.cta_group::{2 if collective else 1}.{shape} [d], s;"
        for offset_bytes, column in copies
    ]
    text = "{ .reg .b32 d; .reg .b64 s;\n" + "\n".join(lines) + "\n}"
    operands = [
        target.address(target.allocation.address),
        smem.descriptor(source, fields),
    ]
    with predicated(pairs.issuer(collective)):
        llvm.inline_asm(None, operands, text, "r,l,~{memory}", has_side_effects=True)
