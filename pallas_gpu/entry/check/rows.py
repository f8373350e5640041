# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that an array of indices names."""

from __future__ import annotations

import dataclasses

from pallas_gpu import _jax, types
from pallas_gpu.entry.check import references
from pallas_gpu.entry.check.tma import sides
from pallas_gpu.primitives import _engines, rows
from pallas_gpu.primitives import _registry as registry


@registry.checks(rows.gather_rows_p, rows.scatter_rows_p)
def _check_rows(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    operands = references.static_operands(eqn)
    src, dst = operands["src"], operands["dst"]
    gather = eqn.primitive is rows.gather_rows_p
    gmem, smem = (src, dst) if gather else (dst, src)
    name = "copy_gmem_to_smem" if gather else "copy_smem_to_gmem"
    references.window_in_bounds(smem.ref, smem.transforms, name)
    references.window_in_bounds(gmem.ref, gmem.transforms, name)
    far, near = sides(gmem, smem)
    _engines.require_elements(far.window)
    _engines.check_threads(_row(far), _row(near), store=not gather)


def _row(side: _engines.Side) -> _engines.Side:
    one = [0] * len(side.window.axes)
    window = side.window.slice(one, [None, *side.window.shape[1:]])
    return dataclasses.replace(side, window=window)
