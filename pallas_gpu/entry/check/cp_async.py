# SPDX-License-Identifier: Apache-2.0
"""Copies by threads between GMEM and SMEM."""

from __future__ import annotations

from pallas_gpu import types
from pallas_gpu.entry.check import references
from pallas_gpu.entry.check.tma import require_some_inside, side
from pallas_gpu.primitives import _engines, cp_async
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import Op


@registry.checks(cp_async.cp_async_p, cp_async.store_by_threads_p)
def _check_copy(op: Op, mesh: types.Mesh) -> None:
    gmem, smem = op.access_to(types.GMEM), op.access_to(types.SMEM)
    load = smem.writes
    name = "copy_gmem_to_smem" if load else "copy_smem_to_gmem"
    references.window_in_bounds(smem, name)
    # A range may exceed the array: threads load zeros, and store nothing outside.
    _engines.require_elements(gmem.window)
    _engines.check_threads(side(gmem), side(smem), store=not load)
    if not load or op.params["oob_mode"] is None:
        require_some_inside(gmem.window, name, "source" if load else "destination")
