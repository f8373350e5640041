# SPDX-License-Identifier: Apache-2.0
"""Sums of rows by an index: each core adds in its shared memory, by streams."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from pallas_gpu.sparsecore.ops._rows import (
    ALIGNMENT,
    CORE,
    SUBCORE,
    ArrayLike,
    Launch,
    padded,
    require_matrix,
    require_rows,
    rounded,
)

# What streams add.
TYPES = (jnp.float32, jnp.int32)
# Rows that belong to another part of the sums are not transferred.
_ELSEWHERE = -1
# Rows of the zeros that are copied to clear the sums.
_ZEROS = 128


def segment_sum(
    data: ArrayLike,
    segments: ArrayLike,
    num_segments: int,
    *,
    target: str | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Returns sums of rows: `zeros((num_segments, width)).at[segments].add(data)`.

    Each core has a part of the sums in VMEM_SHARED, to which its subcores add rows by
    indirect streams, and copies it to HBM; if they do not fit, part after part. Each
    core reads all rows for each of its parts. The order of additions is not defined.

    Args:
      data: (m, width) of float32 or int32.
      segments: int32 of shape (m,); rows whose segment is outside of 0 to
        num_segments - 1 are left out.
      num_segments: rows of the result, static.
      target, interpret: the chip, and as of `plsc.kernel`.

    Returns:
      (num_segments, width), of the type of the data.

    Raises:
      ShapeError: other shapes or types.
      UnsupportedError: 16 rows (8 on v5p and v6e) do not fit VMEM.
    """
    data = require_matrix(data, "segment_sum", "the data", TYPES)
    segments = require_rows(segments, "segment_sum", "segments")
    if data.shape[0] != segments.size or num_segments < 1:
        raise errors.ShapeError(
            "segment_sum: a row does not have one segment, or there is none",
            expected=f"{data.shape[0]} segments, and num_segments of 1 or more",
            got=f"{segments.size} segments, num_segments={num_segments}",
            hint="pass the segment of each row of the data",
        )
    return summed(data, None, segments, num_segments, Launch(target, interpret))


def summed(
    source: jax.Array, rows: Any, segments: jax.Array, count: int, launch: Launch
) -> jax.Array:
    """Returns sums of rows of an array by segment.

    Args:
      source: an array of rows.
      rows: which of them, one for each segment; None: all in order.
      segments: the segment of each row.
      count: number of segments.
      launch: how to launch it.
    """
    width, dtype = source.shape[1], source.dtype
    if segments.size == 0:
        return jnp.zeros((count, width), dtype)
    plan = _Plan.of(segments.size, width, dtype, count, launch)
    given = [source] if rows is not None else [padded(source, plan.size, 0)]
    given += [] if rows is None else [padded(rows, plan.size, 0)]
    given.append(padded(segments, plan.size, _ELSEWHERE))
    zeros = jnp.zeros((plan.zeros, width), dtype)
    out = jax.ShapeDtypeStruct((plan.parts * plan.rows, width), dtype)
    sums = plan.launch.kernel(plan.body(rows is not None), out, plan.scratch(dtype))(
        *given, zeros
    )
    return sums[:count]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How rows and sums are divided.

    Attributes:
      launch: how the kernel is launched.
      width: of a row.
      block: rows of a block.
      size: rows that are added, whole blocks for each subcore.
      zeros: rows that a copy of zeros clears.
      rows: sums of a part, which the subcores of a core clear, and copy to HBM.
      parts: parts of the sums, as many for each core.
    """

    launch: Launch
    width: int
    block: int
    size: int
    zeros: int
    rows: int
    parts: int

    @classmethod
    def of(cls, size: int, width: int, dtype: Any, count: int, launch: Launch) -> _Plan:
        launch = launch.of_rows(width, dtype, shared=True)
        chip, row = launch.chip, launch.row_words(width, dtype)
        block = launch.rows_of_block(width, dtype, 8, -(-size // chip.subcores))
        size = rounded(size, block * chip.subcores)
        own = size // chip.subcores
        used = rounded(2 * block * row + 2 * own, 1024) + 1024
        free = chip.pool_words - chip.subcores * used
        fit = free // row // chip.subcores // ALIGNMENT * ALIGNMENT
        if used > chip.vmem_words or fit < ALIGNMENT:
            raise errors.UnsupportedError(
                "too many rows for the memory of a SparseCore",
                expected=f"indices of {own} rows and 2 blocks in VMEM, and sums in "
                "VMEM_SHARED",
                got=f"{size} rows of {width} elements",
                hint="add the rows in several calls, and the results",
            )
        if fit > _ZEROS:
            fit = fit // _ZEROS * _ZEROS
        everywhere = chip.cores * chip.subcores
        parts = chip.cores * -(-count // (everywhere * fit))
        each = -(-count // (parts * chip.subcores))
        zeros = min(_ZEROS, rounded(each, ALIGNMENT))
        each = rounded(each, zeros)
        return cls(launch, width, block, size, zeros, each * chip.subcores, parts)

    @property
    def own(self) -> int:
        """The rows that a subcore adds."""
        return self.size // self.launch.chip.subcores

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Returns the declarations of scratch."""
        return {
            "sums": plsc.VMEM_SHARED((self.rows, self.width), dtype),
            "index": plsc.VMEM((self.own,), jnp.int32),
            "segment": plsc.VMEM((self.own,), jnp.int32),
        }

    def body(self, gathers: bool) -> Any:
        """Returns the body, of rows that indices name or of all in order."""
        chip, block, own = self.launch.chip, self.block, self.own
        each = self.rows // chip.subcores

        def body(source: Any, *refs: Any, sums: Any, index: Any, segment: Any) -> None:
            *rows, segments, zeros, out = refs
            core, subcore = lax.axis_index(CORE), lax.axis_index(SUBCORE)
            mine = plsc.ds(subcore * own, own)

            @plsc.loop(0, self.parts // chip.cores)
            def _(turn: Any) -> None:
                first = (turn * chip.cores + core) * self.rows

                @plsc.loop(0, each, step=self.zeros)
                def _(row: Any) -> None:
                    place = plsc.ds(subcore * each + row, self.zeros)
                    plsc.sync_copy(zeros, sums.at[place])

                plsc.sync_copy(segments.at[mine], segment)
                for named in rows:
                    plsc.sync_copy(named.at[mine], index)
                self._choose(first, segment, index if gathers else None)
                plsc.subcore_barrier()

                def add(part: Any) -> None:
                    i = plsc.program_id(0)
                    named = segment.at[plsc.ds(i * block, block)]
                    to = plsc.Indices(named, _ELSEWHERE)
                    plsc.sync_copy(part, sums.at[to], add=True)

                plsc.emit_pipeline(
                    add,
                    grid=(own // block,),
                    in_specs=[self._blocks(index if gathers else None, subcore)],
                )(source)
                plsc.subcore_barrier()
                done = plsc.ds(subcore * each, each)
                to = plsc.ds(first + subcore * each, each)
                # The next zeros go to these rows too, and nobody adds before a barrier.
                plsc.sync_copy(sums.at[done], out.at[to])

        return body

    def _choose(self, first: Any, segment: Any, index: Any) -> None:
        """Makes segments positions in the part, and leaves others out."""
        lanes = self.launch.chip.lanes

        @plsc.parallel_loop(0, self.own, step=lanes, unroll=8)
        def _(i: Any) -> None:
            part = plsc.ds(i, lanes)
            at = segment[part] - first
            inside = (at >= 0) & (at < self.rows)
            segment[part] = jnp.where(inside, at, _ELSEWHERE)
            if index is not None:
                index[part] = jnp.where(inside, index[part], _ELSEWHERE)

    def _blocks(self, index: Any, subcore: Any) -> plsc.BlockSpec:
        block = self.block
        if index is None:
            before = subcore * (self.own // block)
            return plsc.BlockSpec((block, self.width), lambda i: (before + i, 0))

        def named(i: Any) -> Any:
            rows = index.at[plsc.ds(i * block, block)]
            return plsc.Indices(rows, _ELSEWHERE), 0

        return plsc.BlockSpec((plsc.Indirect(block), self.width), named)
