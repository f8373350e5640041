# SPDX-License-Identifier: Apache-2.0
"""Parts of references, as the emitters want them."""

from __future__ import annotations

from typing import Any

from pallas_gpu import errors, types
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext, starts
from pallas_gpu.mosaic import gmem, smem
from pallas_gpu.mosaic.elements import scalars


def memory_view(ctx: RuleContext, handle: Any, transforms: Any) -> Any:
    """Returns the emitter's view of a part of a reference."""
    window = types.resolve(handle.ref_shape, transforms)
    origin = starts(window)
    divisors = tuple(map(scalars.divisor, origin))
    sizes, kept, order = window.sizes, window.kept, window.order
    if isinstance(handle, vals.SmemHandle):
        return smem.SmemView(
            handle.pointer, handle.layout, handle.dtype,
            origin, sizes, kept, order, divisors,
        )  # fmt: skip
    if isinstance(handle, vals.GmemHandle):
        n = len(handle.lead)
        return gmem.GmemView(
            ctx.builder.buffers[handle.buffer_index],
            handle.buffer_index,
            handle.shape,
            handle.dtype,
            (*handle.lead, *origin),
            (*(1,) * n, *sizes),
            (*(False,) * n, *kept),
            order,
            (*(1,) * n, *divisors),
        )
    raise errors.InternalError(f"{type(handle).__name__} is no array in memory")
