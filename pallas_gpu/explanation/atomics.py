# SPDX-License-Identifier: Apache-2.0
"""Atomic operations of all CTAs on the same elements, which the L2 executes in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax

from pallas_gpu import types
from pallas_gpu.explanation.findings import BY_ID, SlowFinding
from pallas_gpu.explanation.model import Model
from pallas_gpu.layouts.moves import rates
from pallas_gpu.program.nodes import Access

# The L2 updates a sector that others update too. It fits 256 int32 that 256 to 2048
# CTAs add to, on an H100.
_SECTOR_SECONDS = 0.65e-9


def atomics(model: Model) -> Iterator[SlowFinding]:
    """Yields atomic operations on elements that do not depend on the CTA."""
    for site in model.sites:
        times = model.executed.get(site.op, 0.0)
        for access in site.op.accesses:
            is_update = access.space is types.GMEM and access.operation.atomic
            if not times or not is_update or _depends_on_cta(access):
                continue
            size = math.prod(access.window.sizes)
            size *= types.itemsize_bits(access.dtype) // 8
            sectors = -(-size // rates.SECTOR_BYTES)
            seconds = model.ctas * times * sectors * _SECTOR_SECONDS
            yield SlowFinding(
                BY_ID["contended-atomics"],
                f"{model.ctas:,} CTAs update the same {size:,} bytes of GMEM in turn",
                f"{site.op.name} of {access.dtype}{list(access.window.sizes)}",
                "let a CTA take more elements, so that fewer CTAs update the array",
                model.place(site),
                model.loops(site),
                seconds,
                seconds,
                facts={"bytes": size, "ctas": model.ctas},
            )


def _depends_on_cta(access: Access) -> bool:
    """Whether the elements may differ: by a start, or an array of indices."""
    steps = jax.tree.leaves(access.transforms)
    return bool(access.window.dynamic) or any(getattr(x, "shape", ()) for x in steps)
