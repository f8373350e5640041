# SPDX-License-Identifier: Apache-2.0
"""Arrays in TMEM: allocation, loads, stores, and what copies from SMEM require.

A load needs no wait before its values are used: a true dependency of registers is
honoured (PTX ISA, tcgen05 "Memory consistency"). So a relayout of it may stand before
`wait_load_tmem`, which orders accesses to TMEM only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from pallas_gpu import errors
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.tensor_cores import tmem
from pallas_gpu.layouts.registers.placement import Placement, describe, place_registers
from pallas_gpu.layouts.tmem.access import register_layouts, transfers
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families import shapes
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives.tensor_cores import tmem as primitives


@emits_and_relates(primitives.async_load_tmem_p)
def _load(on: RuleContext | Node, src: Any, *, layout: Any) -> Any:
    return load(on, src, on.op.results[0].dtype, layout)


@emits_and_relates(primitives.async_store_tmem_p)
def _store(on: RuleContext | Node, ref: Any, value: Any) -> None:
    store(on, ref, value)


def load(on: RuleContext | Node, ref: Any, dtype: Any, layout: Any = None) -> Any:
    """Loads a part of an array, in a layout if one is specified."""
    if isinstance(on, Node):
        aval = jax.ShapeDtypeStruct(ref.window.shape, dtype)
        loaded = on.make(on.accessing(on.part(ref), "load", aval), aval, "loaded")
        return loaded if layout is None else shapes.related_cast(on, loaded, layout)
    view, placement = on.view(ref), on.target("loaded")
    if placement is None and layout is not None:
        placement = place_registers(layout, view.shape)
    return on.operand(tmem.load(view, placement or next(_layouts(view))))


def store(on: RuleContext | Node, ref: Any, value: Any) -> None:
    """Stores to a part of an array."""
    if isinstance(on, Node):
        aval = jax.ShapeDtypeStruct(ref.window.shape, value.dtype)
        on.taken(value, on.accessing(on.part(ref), "store", aval), "stored")
        return
    part = on.view(ref)
    value = on.operand(vals.as_shape(value, part.shape), "stored")
    if isinstance(value, regs.Deferred):
        value = value.materialize(next(_layouts(part)))
    elif not transfers(value.layout, part.layout, dtypes.stored_bits(part.dtype)):
        raise errors.LayoutError(
            "async_store_tmem: no instruction stores from this register layout",
            expected=" or ".join(dict.fromkeys(map(describe, _layouts(part)))),
            got=describe(value.layout),
            hint="layout_cast the value, e.g. to plgpu.Layout.TCGEN05",
        )
    tmem.store(part, value)


def _layouts(view: tmem.TmemView) -> Iterator[Placement]:
    return register_layouts(view.layout, view.shape, dtypes.stored_bits(view.dtype))
