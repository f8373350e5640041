# SPDX-License-Identifier: Apache-2.0
"""Arrays in GMEM that the launch adds, as handles."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import KernelState


def handle(kernel: KernelState, key: Hashable) -> vals.GmemHandle:
    """Returns the handle of an array that the launch adds, the part of this CTA.

    Args:
      kernel: the kernel, after its prologue.
      key: that of its `WorkArray`.
    """
    params = kernel.params
    work = array(params, key)
    position = params.workspace.index(work)
    if listed := bool(work.listed(params.devices)):
        buffer = params.num_inputs + position
    else:
        buffer = len(params.jaxpr.invars) + len(params.work_operands) + position
    shape = (*params.lead(work), *work.array.shape)
    lead = tuple(kernel.axes[axis] for axis in _axes(kernel, work.array.sharing))
    return vals.GmemHandle(buffer, shape, np.dtype(work.array.dtype), lead, listed)


def array(params: CallParams, key: Hashable) -> Any:
    """Returns the `WorkArray` of a key."""
    found = next((work for work in params.workspace if work.key == key), None)
    if found is None:
        raise errors.InternalError(f"the launch adds no array {key}")
    return found


def _axes(kernel: KernelState, sharing: types.Sharing) -> list[Hashable]:
    """Returns the names of the axes of which a CTA has a position in the array."""
    params = kernel.params
    if sharing is types.Sharing.LAUNCH:
        return []
    batch: list[Hashable] = [("batch", level) for level, _ in enumerate(params.batch)]
    if sharing is types.Sharing.INSTANCE:
        return batch
    return [*batch, *params.mesh.grid_names, *params.mesh.cluster_names]
