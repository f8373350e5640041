# SPDX-License-Identifier: Apache-2.0
"""JAX's own reads and writes of references, described to the registry.

The other operations of JAX that a kernel supports compute values: they have rules, and
need no description.
"""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, layouts, types
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.registers import load_p
from pallas_gpu.primitives.tensor_cores import tmem

_FAMILY = "references"
_WRITES = {"reads": ("ref",), "writes": ("ref",), "remote": ("ref",)}
registry.describe(_jax.get_p, _FAMILY, called="a read", reads=("ref",), remote=("ref",))
registry.describe(_jax.swap_p, _FAMILY, called="a write", **_WRITES)
registry.describe(_jax.addupdate_p, _FAMILY, called="an update", **_WRITES)


@registry.checks(load_p, _jax.get_p, _jax.swap_p, _jax.addupdate_p)
def _check_access(op: Any, mesh: types.Mesh) -> None:
    for access in op.accesses:
        if access.space is types.TMEM:
            tmem.check_transfer(access.buffer.aval, access.window, None)
        else:
            _check_layout(access.buffer.aval, access.window, op.params.get("layout"))


def _check_layout(aval: Any, window: Window, layout: Any) -> None:
    """Raises LayoutError unless the loaded or stored array has a register layout."""
    if window.shape == () or isinstance(aval, types.AccumulatorRef):
        return
    if layout is not None:
        description = layouts.to_layout(layout)
        # A strided layout that is not linear in coordinates still covers each element.
        if not isinstance(description, layouts.WGStridedLayout):
            description.linear(window.shape)
        return
    tiled = any(isinstance(t, types.TilingTransform) for t in aval.transforms)
    if tiled and len(window.shape) == 2 and window.shape[0] % types.WGMMA_ROWS == 0:
        return
    layouts.default_layout(window.shape, types.itemsize_bits(aval.dtype))
