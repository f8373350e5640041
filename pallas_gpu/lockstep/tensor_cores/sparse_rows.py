# SPDX-License-Identifier: Apache-2.0
"""The metadata that a sparse tcgen05.mma reads from TMEM.

From the PTX ISA, tcgen05 "Sparse matrices": the granularity of each kind, its values,
and where they lie for M = 128. Of M = 64 it says that metadata has the lane offset of
D, "Layout F"; its order in 16 lanes is taken to be that of M = 128.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.tensor_cores import tmem

_ROWS = (64, 128)
# kind -> K of a sparse instruction.
_K = {
    "tf32": 16,
    "f16": 32,
    "f8f6f4": 64,
    "i8": 64,
    "mxf8f6f4": 64,
    "mxf4": 128,
    "mxf4nvf4": 128,
}
# kind -> elements of K that 4 bits describe; 4 of all kinds that are not here.
_CHUNKS = {"tf32": 2, "mxf4": 8, "mxf4nvf4": 8}
# The values of 4 bits: positions of the first and, above it, of the second element, or
# pair of elements of the mxf4 kinds.
_LEGAL = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)
# Those of tf32, with the position of the element that is stored.
_LEGAL_TF32 = {0b0100: 0, 0b1110: 1}
_SELECTED = ("f16", "tf32")


class SparseRows:
    """The metadata of one instruction in flight.

    Args:
      rows: M in a CTA.
      d: the address of D.
    """

    def __init__(
        self,
        cta: Any,
        row: int,
        agent: int,
        kind: str,
        rows: int,
        selector: int,
        address: int,
        d: int,
    ) -> None:
        base, column = address >> 16, address & 0xFFFF
        if base != d >> 16 or column % 2:
            raise PtxError(f"metadata from lane {base}, column {column} on")
        self._rows = rows
        self._tmem, self._k = tmem.of_cta(cta), _K[kind]
        self._kind, self._chunk = kind, _CHUNKS.get(kind, 4)
        # For each row and each chunk of K: its lane, column and first bit.
        m = np.arange(rows)[:, None]
        # The first lane of each 16 rows.
        block = m // 16 * 16 if rows == 128 else base + m // 16 * 32
        k = np.arange(0, self._k, self._chunk)[None]
        if kind in _SELECTED:
            half = self._k // 2
            lane = block + m % 8 + 8 * (k // half)
            self._bit = 4 * (k % half // self._chunk) + 16 * (m // 8 % 2)
            columns = column + selector + 0 * self._bit
        else:
            first = 4 * (k // self._chunk)
            lane, self._bit = block + m % 16 + 0 * k, first % 32 + 0 * m
            columns = column + first // 32 + 0 * m
        self._cells = np.broadcast_arrays(lane, columns)
        self._tmem.begin(
            row, agent, self._cells, writes=False, what="tcgen05.mma", pipelined=True
        )

    @staticmethod
    def check(selector: int, kind: str, m: int, ctas: int) -> None:
        """Raises unless there are such instructions, and they are modelled."""
        rows = m // ctas
        if rows not in _ROWS or kind not in _K or (ctas == 2 and rows == 64):
            raise NotModelled(f"a sparse tcgen05.mma of kind::{kind}, M = {m}")
        if selector and kind not in _SELECTED:
            raise PtxError(f"sparsity selector {selector} of kind::{kind}")
        if selector > 1:
            raise NotModelled(f"sparsity selector {selector}")

    def complete(self, agent: int, epoch: int, stored: np.ndarray) -> np.ndarray:
        """[m, k] of the stored elements, with what TMEM holds now."""
        words = self._tmem.data[self._cells]
        self._tmem.end(agent, epoch, self._cells, writes=False)
        values = words >> self._bit.astype(np.uint32) & 15
        tf32 = self._kind == "tf32"
        if not np.isin(values, list(_LEGAL_TF32) if tf32 else _LEGAL).all():
            raise PtxError("sparsity metadata that the PTX ISA does not define")
        chunks = self._rows, self._k // self._chunk
        if tf32:
            places = (values == 0b1110).astype(np.int64)[..., None]
            dense = np.zeros((*chunks, 2), stored.dtype)
            np.put_along_axis(dense, places, stored[..., None], axis=-1)
            return dense.reshape(self._rows, self._k)
        size = self._chunk // 4
        dense = np.zeros((*chunks, 4, size), stored.dtype)
        places = np.stack([values & 3, values >> 2], axis=-1).astype(np.int64)
        kept = stored.reshape(*chunks, 2, size)
        np.put_along_axis(dense, places[..., None], kept, axis=-2)
        return dense.reshape(self._rows, self._k)
