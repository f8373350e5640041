# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that an array of indices names."""

from __future__ import annotations

from pallas_gpu import _jax, types
from pallas_gpu.entry.check import references
from pallas_gpu.primitives import _engines, rows
from pallas_gpu.primitives import _registry as registry


@registry.checks(rows.gather_rows_p, rows.scatter_rows_p)
def _check_rows(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    operands = references.static_operands(eqn)
    src, dst = operands["src"], operands["dst"]
    gather = eqn.primitive is rows.gather_rows_p
    gmem, smem = (src, dst) if gather else (dst, src)
    name = "copy_gmem_to_smem" if gather else "copy_smem_to_gmem"
    smem_window = references.window_in_bounds(smem.ref, smem.transforms, name)
    gmem_window = references.window_in_bounds(gmem.ref, gmem.transforms, name)
    _engines.require_elements(gmem.ref.aval, gmem_window)
    rest = len(gmem_window.axes) - 1
    one = [0] * (rest + 1)
    row_of_gmem = gmem_window.slice(one, [None, *gmem_window.shape[1:]])
    row_of_smem = smem_window.slice(one, [None, *smem_window.shape[1:]])
    _engines.check_threads(row_of_gmem, smem.ref.aval, row_of_smem, store=not gather)
