# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: a tile of scores becomes one of probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.backward.config import ROWS
from pallas_gpu.ops.flash.backward.problem import BackwardProblem
from pallas_gpu.ops.flash.masks import Lengths
from pallas_gpu.ops.flash.problem import Tile
from pallas_gpu.ops.folded import minus, plus, times
from pallas_gpu.ops.memory import Memory

LAYOUT = plgpu.Layout.WGMMA
# Rows that are stored without TMA at a time: those of a tile of the swizzle.
_STORED = 8


@dataclasses.dataclass(frozen=True)
class Scored:
    """A consumer warpgroup: its number, and the block's tile.

    Attributes:
      transposed: whether the rows of its scores are those of K and V, and not of Q.
    """

    p: BackwardProblem
    mem: Memory
    wg: Any
    place: Tile
    transposed: ClassVar[bool] = False

    @property
    def first_row(self) -> Any:
        """The first of its rows, in the block."""
        return times(self.wg, ROWS)

    @property
    def own(self) -> Any:
        return plgpu.ds(self.first_row, ROWS)

    @property
    def row(self) -> Any:
        """The first of its rows, counted in the sequence."""
        return plus(self.place.start, self.first_row)

    def probabilities(
        self,
        scores: Any,
        head: Any,
        column: Any,
        masked: bool,
        lse: Callable[[], Any],
        bias: Callable[[], Any],
    ) -> tuple[Any, Any]:
        """Returns those of a tile, and tanh of scores with a soft cap, or None.

        Args:
          head: of Q.
          column: the first one, counted in the sequence.
          lse, bias: return what is subtracted from the scores, and what is added.
        """
        p, mem, row, capped = self.p, self.mem, self.row, None
        mask, lengths, ids = p.mask, self.place.lengths, ("q_ids", "kv_ids")
        if self.transposed:
            # Loaded again: with fewer values around the loop, registers suffice.
            lengths = Lengths(*reversed(p.lengths(mem, self.place.sequence)))
            mask, ids = mask.transposed, ("kv_ids", "q_ids")
        if p.scores.modifies:
            distance = plus(minus(row, column), mask.shift(lengths))
            scores, capped = p.scores.modified(
                *(scores, distance, bias(), p.slope(mem, self.place, head)),
                keeps_capped=True,
            )
        if masked:
            found: Any = None
            if mask.segments:
                found = [
                    self.loaded(mem.get(x).at[self.place.batch, plgpu.ds(first, n)], i)
                    for i, x, first, n in zip(
                        (1, 0), ids, (row, column), scores.shape, strict=True
                    )
                ]
            scores = mask.hide(
                *(scores, p.scores.hidden, lengths, row, column, found),
                hides_rows=self.transposed and p.has_tail,
            )
        # Loaded before the scores are scaled: after it ptxas runs out of registers.
        subtracted = lse()
        return jnp.exp2(scores * p.scores.factor - subtracted), capped

    def loaded(self, part: Any, axis: int) -> Any:
        """Returns a number for each row (1) or each column (0) of a tile."""
        return plgpu.load(part, layout=LAYOUT.reduce(axis), optimized=False)


def store(
    p: BackwardProblem, result: Any, buffer: Any, rows: Any, left: Any, some: Any
) -> None:
    """Starts the copy of a tile, through SMEM, to rows of GMEM, if there are some.

    Of packed sequences only the first `left` rows are stored: TMA would also write the
    first rows of the next sequence.
    """
    buffer[...] = result
    plgpu.commit_smem()
    if not p.packed:
        plgpu.copy_smem_to_gmem(buffer, rows, some)
        return
    whole = left >= ROWS

    @plgpu.when(whole)
    def _():
        plgpu.copy_smem_to_gmem(buffer, rows)

    @plgpu.when(jnp.logical_not(whole))
    def _():
        # Few rows at a time, for few registers.
        @plgpu.loop(0, ROWS // _STORED)
        def _(i):
            start = times(i, _STORED)
            part = plgpu.ds(start, _STORED)
            values = buffer[part]
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0)
            plgpu.store(rows, part, values, mask=row < left - start)
