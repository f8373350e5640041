# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that an array of indices names."""

from __future__ import annotations

import dataclasses

from pallas_gpu import types
from pallas_gpu.entry.check import references
from pallas_gpu.entry.check.tma import side
from pallas_gpu.primitives import _engines, rows
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import Access, Op


@registry.checks(rows.gather_rows_p, rows.scatter_rows_p)
def _check_rows(op: Op, mesh: types.Mesh) -> None:
    gmem, smem = op.access_to(types.GMEM), op.access_to(types.SMEM)
    name = "copy_gmem_to_smem" if smem.writes else "copy_smem_to_gmem"
    references.window_in_bounds(smem, name)
    references.window_in_bounds(gmem, name)
    _engines.require_elements(gmem.window)
    _engines.check_threads(_row(gmem), _row(smem), store=gmem.writes)


def _row(array: Access) -> _engines.Side:
    window = array.window
    one = window.slice([0] * len(window.axes), [None, *window.shape[1:]])
    return dataclasses.replace(side(array), window=one)
