# SPDX-License-Identifier: Apache-2.0
"""Copies by threads between GMEM and SMEM."""

from __future__ import annotations

from pallas_gpu import _jax, types
from pallas_gpu.entry.check import references
from pallas_gpu.entry.check.tma import require_some_inside, sides
from pallas_gpu.primitives import _engines, cp_async
from pallas_gpu.primitives import _registry as registry


@registry.checks(cp_async.cp_async_p, cp_async.store_by_threads_p)
def _check_copy(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    operands = references.static_operands(eqn)
    src, dst = operands["src"], operands["dst"]
    load = eqn.primitive is cp_async.cp_async_p
    gmem, smem = (src, dst) if load else (dst, src)
    name = "copy_gmem_to_smem" if load else "copy_smem_to_gmem"
    references.window_in_bounds(smem.ref, smem.transforms, name)
    # A range may exceed the array: threads load zeros, and store nothing outside.
    far, near = sides(gmem, smem)
    _engines.require_elements(far.window)
    _engines.check_threads(far, near, store=not load)
    if not load or eqn.params["oob_mode"] is None:
        require_some_inside(far.window, name, "source" if load else "destination")
