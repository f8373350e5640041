# SPDX-License-Identifier: Apache-2.0
"""The metadata that a sparse tcgen05.mma reads from TMEM.

From the PTX ISA, tcgen05 "Sparse matrices": the granularity of each kind, its values,
and where they lie for M = 128.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.lockstep import tmem
from tests.support.lockstep.engine import KernelError
from tests.support.lockstep.not_modelled import NotModelled

_ROWS = 128
# kind -> K of a sparse instruction.
_K = {"f16": 32, "f8f6f4": 64, "i8": 64, "mxf8f6f4": 64}
# The values of 4 bits: positions of the first and, above it, of the second element.
_LEGAL = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)


class SparseRows:
    """The metadata of one instruction in flight."""

    def __init__(
        self, cta: Any, row: int, agent: int, kind: str, selector: int, address: int
    ) -> None:
        base, column = address >> 16, address & 0xFFFF
        if base or column % 2:
            raise KernelError(f"metadata from lane {base}, column {column} on")
        self._tmem, self._k = tmem.of_cta(cta), _K[kind]
        # For each row and each four elements of K: its lane, column and first bit.
        m = np.arange(_ROWS)[:, None]
        k = np.arange(0, self._k, 4)[None]
        if kind == "f16":
            lane = m % 8 + 8 * (k // 16) + 16 * (m // 16)
            self._bit = k % 16 + 16 * (m // 8 % 2)
            columns = column + selector + 0 * self._bit
        else:
            lane, self._bit = m + 0 * k, k % 32 + 0 * m
            columns = column + k // 32 + 0 * m
        self._cells = np.broadcast_arrays(lane, columns)
        self._tmem.begin(
            row,
            agent,
            self._cells,
            writes=False,
            what="tcgen05.mma",
            pipelined=True,
        )

    @staticmethod
    def check(selector: int, kind: str, m: int) -> None:
        """Raises unless there are such instructions, and they are modelled.

        Args:
          m: rows in each CTA.
        """
        if m != _ROWS or kind not in _K:
            raise NotModelled(f"a sparse tcgen05.mma of kind::{kind}, M = {m}")
        if selector and kind != "f16":
            raise KernelError(f"sparsity selector {selector} of kind::{kind}")
        if selector > 1:
            raise NotModelled(f"sparsity selector {selector}")

    def complete(self, agent: int, epoch: int, stored: np.ndarray) -> np.ndarray:
        """[m, k] of the stored elements, with what TMEM holds now."""
        words = self._tmem.data[self._cells]
        self._tmem.end(agent, epoch, self._cells, writes=False)
        values = words >> self._bit.astype(np.uint32) & 15
        if not np.isin(values, _LEGAL).all():
            raise KernelError("sparsity metadata that the PTX ISA does not define")
        dense = np.zeros((_ROWS, self._k // 4, 4), stored.dtype)
        pairs = stored.reshape(_ROWS, self._k // 4, 2)
        places = np.stack([values & 3, values >> 2], axis=-1).astype(np.int64)
        np.put_along_axis(dense, places, pairs, axis=-1)
        return dense.reshape(_ROWS, self._k)
