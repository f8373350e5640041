# SPDX-License-Identifier: Apache-2.0
"""Scans with masks, counts, sorts of pairs, reductions of masks, packing."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.sparsecore.emitters import conversions, lanes
from pallas_gpu.sparsecore.emitters.values import (
    BOOL,
    I32,
    Array,
    broadcast,
    elements_of,
    several_registers,
)
from pallas_gpu.sparsecore.lowering.state import emits, masks
from pallas_gpu.sparsecore.primitives import packing, scans

_KINDS = {"population_count": "sum", "ffs": "find_first_set"}


def _mask(ctx: Any, mask: Array | None, x: Array) -> Any:
    return masks(ctx, mask, 1, elements_of(x.value))[0]


@emits(scans.masked_scan_p)
def _masked_scan(ctx: Any, x: Array, mask: Array | None = None) -> list[Array]:
    kind = ctx.op.params["kind"]
    if mask is None:
        return [lanes.cumulative(kind, x)]
    made = lanes.scan(kind, x.value, x.dtype, _mask(ctx, mask, x))
    return [x.with_parts([made])]


@emits(scans.scan_count_p)
def _scan_count(ctx: Any, x: Array, mask: Array) -> list[Array]:
    counts, last = lanes.scan_count(x.value, _mask(ctx, mask, x))
    return [x.with_parts([counts], I32), x.with_parts([last], BOOL)]


@emits(scans.mask_reduce_p)
def _mask_reduce(ctx: Any, x: Array) -> list[Array]:
    width = ctx.kernel.target.lanes
    shape = (x.size // ctx.op.params["reduce"],)
    mask = conversions.mask_of(x, width, width)
    if shape[0] % width:
        raise several_registers(x)
    if len(mask.parts) == 1:
        made = lanes.mask_reduce(_KINDS[ctx.op.params["kind"]], mask.value, width)
    elif ctx.op.params["kind"] == "ffs":
        made = broadcast(lanes.first(mask, width), width)
    else:
        made = broadcast(lanes.count(mask, width), width)
    return [Array(shape, I32, (made,) * (shape[0] // width))]


@emits(scans.sort_key_val_p)
def _sort_key_val(
    ctx: Any, keys: Array, values: Array, mask: Array | None = None
) -> list[Array]:
    sorted_keys, sorted_values, moved = lanes.sort(
        keys.value,
        values.value,
        keys.dtype,
        mask=_mask(ctx, mask, keys),
        descending=ctx.op.params["descending"],
    )
    found = [keys.with_parts([sorted_keys]), values.with_parts([sorted_values])]
    if mask is not None:
        found.append(keys.with_parts([moved], BOOL))
    return found


# --- narrow elements ------------------------------------------------------------------


@emits(packing.pack_p)
def _pack(ctx: Any, a: Array, b: Array) -> list[Array]:
    params, out = ctx.op.params, ctx.out_aval
    dtype = np.dtype(params["dtype"])
    made = conversions.packed([a.value, b.value], dtype, params["format"])
    return [Array(tuple(out.shape), dtype, (made,))]


@emits(packing.unpack_p)
def _unpack(ctx: Any, x: Array) -> list[Array]:
    params, out = ctx.op.params, ctx.op.results[0].aval
    dtype, shape = np.dtype(params["dtype"]), tuple(out.shape)
    unsigned = x.dtype.kind == "u"
    given = dtype, shape[0], params["format"], unsigned
    halves = [conversions.unpacked(x.value, i, *given) for i in (0, 1)]
    return [Array(shape, dtype, (half,)) for half in halves]
