# SPDX-License-Identifier: Apache-2.0
"""tcgen05.cp, and the scales of blocks that tcgen05.mma reads from TMEM.

From the PTX ISA, "tcgen05.cp", "Block scaling" and "Scale factors": where copies lie,
and where an instruction finds the scales that its descriptor names.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.tensor_cores import tmem

COPY = re.compile(r"tcgen05\.cp\.cta_group::([12])\.(\w+(?:\.warpx4|\.warpx2::\w+)?)")
# Of each shape the rows, their bytes, and the lanes to which row 0 goes.
_FORMS = {
    "32x128b.warpx4": (32, 16, (0, 32, 64, 96)),
    "128x128b": (128, 16, (0,)),
    "128x256b": (128, 32, (0,)),
    "64x128b.warpx2::01_23": (64, 16, (0, 32)),
}
# Rows that a pair of warps receives, the first 32 or the others, lie in the lanes of
# both: what CUTLASS's copies of scales rely on.
_PAIRS_OF_WARPS = "64x128b.warpx2::01_23"


def size_of(shape: str) -> tuple[int, int]:
    """The rows in SMEM of a copy, and the bytes of each."""
    if shape not in _FORMS:
        raise NotModelled(f"tcgen05.cp.{shape}")
    rows, row_bytes, _ = _FORMS[shape]
    return rows, row_bytes


def lanes_of(shape: str) -> np.ndarray:
    """The lanes to which each row of a copy goes: [copies, rows]."""
    rows, _, first = _FORMS[shape]
    lanes = np.array(first)[:, None] + np.arange(rows)
    return lanes + np.arange(rows) // 32 * 32 * (shape == _PAIRS_OF_WARPS)


class Copy:
    """One tcgen05.cp in flight: the part of one CTA.

    Attributes:
      d: the lanes and columns that it writes: [copies, rows, columns].
    """

    def __init__(
        self,
        cta: Any,
        row: int,
        thread: Any,
        shape: str,
        address: int,
        places: np.ndarray,
    ) -> None:
        rows, row_bytes = size_of(shape)
        base, column = address >> 16, address & 0xFFFF
        if base:
            raise PtxError(f"tcgen05.cp to lane {base}")
        self._smem, self._tmem = cta.smem, tmem.of_cta(cta)
        self._places = places.reshape(rows, row_bytes)
        self.d = np.broadcast_arrays(
            lanes_of(shape)[..., None], column + np.arange(row_bytes // 4)[None, None]
        )
        self._smem.begin_read(np.array([row]), np.unique(places), "tcgen05.cp")
        self._tmem.begin(
            row,
            thread.agent,
            self.d,
            writes=True,
            what="tcgen05.cp",
            pipelined=not follows_product(thread, self.d),
        )

    def complete(self, agent: int, epoch: int) -> None:
        """Copies what SMEM holds now."""
        rows = np.ascontiguousarray(self._smem.data[self._places])
        self._tmem.data[self.d] = rows.view(np.uint32)[None]
        self._smem.end_read(np.unique(self._places), agent, epoch)
        self._tmem.end(agent, epoch, self.d, writes=True)


def follows_product(thread: Any, cells: Any) -> bool:
    """Whether a product in flight writes some of the cells: it is not in order."""
    return any(
        in_common(keys(cells), keys(other.d))
        for _, other in thread.queue
        if not isinstance(other, Copy)
    )


def in_common(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether cells, by their keys, are in both."""
    # By a table of the cells: sorting them took a third of a run of attention.
    return bool(np.isin(one, other, kind="table").any())


def keys(cells: Any) -> np.ndarray:
    """One number for each cell."""
    return (cells[0] * tmem.COLUMNS + cells[1]).reshape(-1)


# --- scales of blocks -----------------------------------------------------------------

_E8M0, _E4M3 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float8_e4m3fn)
# kind -> scales of a row in an instruction, and the type of bit 23.
_VECTORS = {
    ("mxf8f6f4", 1): {1: _E8M0},
    ("mxf4", 2): {1: _E8M0},
    ("mxf4nvf4", 2): {1: _E8M0},
    ("mxf4nvf4", 4): {0: _E4M3, 1: _E8M0},
}
SCALED = {kind for kind, _ in _VECTORS}


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The scales that an instruction descriptor names.

    Attributes:
      dtype: of the scales.
      vector: how many of a row it reads.
      ids: the bytes at which those of a and of b start.
    """

    dtype: np.dtype
    vector: int
    ids: tuple[int, int]

    @classmethod
    def decode(cls, word: int, kind: str, vector: int) -> Scaling:
        """From the 32 bits, for a kind and its `.scale_vec`."""
        types = _VECTORS.get((kind, vector))
        if types is None or word >> 23 & 1 not in types:
            raise PtxError(f"kind::{kind} has no such scale_vec::{vector}X scales")
        if word >> 24 & 7 or word >> 31:
            raise PtxError(f"reserved bits of an instruction descriptor {word:#x}")
        ids = word >> 29 & 3, word >> 4 & 3
        if any(i % vector for i in ids):
            raise PtxError(f"scale ids {ids} of scale_vec::{vector}X")
        return cls(types[word >> 23 & 1], vector, ids)

    @staticmethod
    def plain(word: int) -> int:
        """The descriptor as that of a kind without scales and a float32 accumulator."""
        return word & ~(3 << 4 | 1 << 23 | 3 << 29) | 1 << 4


class Scales:
    """The scales of one operand, which an instruction in flight reads."""

    def __init__(
        self, cta: Any, row: int, agent: int, scaling: Scaling, side: int,
        rows: int, address: int, halved: bool,
    ) -> None:  # fmt: skip
        base, column = address >> 16, address & 0xFFFF
        if base:
            raise PtxError(f"scales from lane {base} on")
        self._tmem, self._scaling, self._rows = tmem.of_cta(cta), scaling, rows
        self._first, self._halved = scaling.ids[side], halved
        lane = np.arange(tmem.TMEM_LANES)[:, None]
        self._held = rows // 2 if halved else rows
        columns = column + np.arange(-(-self._held // 32))[None]
        self._cells = np.broadcast_arrays(lane, columns)
        self._tmem.begin(
            row, agent, self._cells, writes=False, what="tcgen05.mma", pipelined=True
        )

    def complete(self, agent: int, epoch: int) -> np.ndarray:
        """[rows, vector] the scales that TMEM holds now, in float64."""
        words = self._tmem.data[self._cells]
        self._tmem.end(agent, epoch, self._cells, writes=False)
        quarters = words.reshape(4, 32, -1)
        # Of M = 128 in a pair, the first half of the columns of B has its scales in
        # the lower two quarters, the other one in the upper two.
        apart = [quarters[:2], quarters[2:]] if self._halved else [quarters]
        if not all((same == same[0]).all() for same in apart):
            raise PtxError("the scales are not the same in all quarters of TMEM")
        # Row m of a half is in lane m % 32 and column m / 32.
        held = np.concatenate([x[0].T.reshape(-1)[: self._held] for x in apart])
        each = held.view(np.uint8).reshape(self._rows, 4)
        chosen = each[:, self._first : self._first + self._scaling.vector]
        return np.ascontiguousarray(chosen).view(self._scaling.dtype).astype(np.float64)
