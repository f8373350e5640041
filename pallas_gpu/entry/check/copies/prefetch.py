# SPDX-License-Identifier: Apache-2.0
"""Prefetches that a tensor map describes, or of adjacent bytes."""

from __future__ import annotations

import math

import pallas_gpu.layouts as layouts
from pallas_gpu import errors, types
from pallas_gpu.entry.check.tma import require_cluster_axes
from pallas_gpu.layouts.gmem.line import prefetched_bytes
from pallas_gpu.layouts.gmem.tma_start import require_start
from pallas_gpu.primitives import _engines
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.copies.prefetch import async_prefetch_p
from pallas_gpu.program.nodes import Op


@registry.checks(async_prefetch_p)
def _check_prefetch(op: Op, mesh: types.Mesh) -> None:
    ref, name = op.operands["ref"], op.name
    window = ref.window
    _engines.require_elements(window)
    axes = op.params["collective_axes"]
    require_cluster_axes(axes, mesh, name)
    sizes = dict(mesh.axes)
    pieces = math.prod(sizes[a] for a in axes)
    bits = types.itemsize_bits(ref.dtype)
    if window.is_transposed:
        raise errors.UnsupportedError(
            f"{name}: a transposed reference is not supported",
            expected="a part with its dimensions in order",
            got=f"dimensions in the order {window.order}",
            hint="prefetch the same part of the untransposed reference",
        )
    if pieces > 1 or prefetched_bytes(window, bits) is None:
        layouts.plan_prefetch(window, bits, pieces)
    require_start(window, bits, name, store=False)
