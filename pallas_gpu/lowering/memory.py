# SPDX-License-Identifier: Apache-2.0
"""Views of parts of references, for the emitters."""

from __future__ import annotations

from typing import Any

from pallas_gpu import errors
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext, part_window
from pallas_gpu.mosaic import gmem, smem


def memory_view(ctx: RuleContext, handle: Any, transforms: Any) -> Any:
    """Returns the emitter's view of a part of a reference."""
    window = part_window(handle, transforms)
    if isinstance(handle, vals.SmemHandle):
        return smem.SmemView(handle.pointer, handle.layout, handle.dtype, window)
    if isinstance(handle, vals.GmemHandle):
        pointer = ctx.builder.buffers[handle.buffer_index]
        return gmem.GmemView(pointer, handle.buffer_index, handle.dtype, window)
    raise errors.InternalError(f"{type(handle).__name__} is not an array in memory")
