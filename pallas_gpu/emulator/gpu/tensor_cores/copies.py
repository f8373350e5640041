# SPDX-License-Identifier: Apache-2.0
"""Copies from SMEM to TMEM: work of a tcgen05 stream.

Products that read what a copy writes, before it or after it, are in order with it
(`order`). For all others a commit completes a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.tensor_cores.order import Operation
from pallas_gpu.emulator.gpu.tensor_cores.tcgen05 import TensorStream, Work, ctas_of
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import scales, sparsity

# Lanes of scales of b of a pair of CTAs with 64 rows each.
_HALVES = 64
_EMULATE = registry.RuleKind.EMULATE
_WAIT = (
    "wait first for a barrier on which a tcgen05_commit_arrive, or the tcgen05_mma, "
    "after the copy arrives"
)


class Copy(Work):
    """A copy that has been issued.

    Args:
      stream: of its issuer.
      source, target: what it reads and writes.
      arrange: the elements of the source as those of the target.
    """

    def __init__(
        self,
        stream: TensorStream,
        source: Region,
        target: Region,
        arrange: Callable[[np.ndarray], np.ndarray],
    ):
        super().__init__(stream)
        self._source, self._target, self._arrange = source, target, arrange

    def perform(self) -> None:
        """Copies the elements."""
        self._target.peek()[...] = self._arrange(self._source.peek())


@registry.register(scales.async_copy_scales_to_tmem_p, _EMULATE)
def _copy_scales(
    wg: Warpgroup, operands: dict[str, Any], collective_axis: str | None, **_: Any
) -> None:
    what = "async_copy_scales_to_tmem"
    start_in_each(wg, operands, collective_axis, what, _rows_of_scales)


def start_in_each(
    wg: Warpgroup,
    operands: dict[str, Any],
    collective_axis: str | None,
    what: str,
    arrange: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Starts the copy of one CTA, or, in the leader, those of a pair."""
    ctas = ctas_of(wg, collective_axis)
    if wg.cta is not ctas[0]:
        return
    stream = TensorStream.of(wg)
    issue = stream.issue(wg)
    for cta in ctas:
        source, target = (
            cluster.counterpart_of(wg, operands[name], cta) for name in ("smem", "tmem")
        )
        source.require_inside(f"read by {what}")
        target.require_inside(f"written by {what}")
        for operand in (source, target):
            stream.access(
                wg, issue, operand, Operation.COPY, what=f"the {what}", hint=_WAIT
            )
            if operand is source:
                source.require_written()
        target.memory.mark_written(target.key())
        Copy(stream, source, target, arrange).submit(wg)


def _rows_of_scales(tiles: np.ndarray) -> np.ndarray:
    """(rows / 128, scales / 4, 32, 16) as (rows, scales).

    Also (1, scales / 4, 64, 16), in halves, as (256, scales).
    """
    if tiles.shape[2] == _HALVES:
        tiles = np.concatenate([tiles[:, :, :32], tiles[:, :, 32:]])
    across, along, rows, _ = tiles.shape
    split = tiles.reshape(across, along, rows, 4, 4)
    return split.transpose(0, 3, 2, 1, 4).reshape(across * 4 * rows, along * 4)


@registry.register(sparsity.async_copy_sparse_metadata_to_tmem_p, _EMULATE)
def _copy_metadata(
    wg: Warpgroup, operands: dict[str, Any], collective_axis: str | None, **_: Any
) -> None:
    what = "async_copy_sparse_metadata_to_tmem"
    start_in_each(wg, operands, collective_axis, what, _rows_of_indices)


def _rows_of_indices(tiles: np.ndarray) -> np.ndarray:
    """(1, indices / 64, 128, 64) as (128, indices)."""
    return tiles[0].swapaxes(0, 1).reshape(tiles.shape[2], -1)
