# SPDX-License-Identifier: Apache-2.0
"""Views of memrefs: an array, and the part of it that subviews select."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import builtin

from pallas_gpu import types
from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.mosaic import addressing, gmem, logical, smem


def view(expansion: Expansion, ref: ir.Value) -> smem.SmemView | gmem.GmemView:
    """Returns the emitters' view of a memref."""
    part = expansion.part(ref)
    builder, maker = expansion.kernel.builder, part.base.owner
    dtype = logical.dtype_of(part.array.type)
    if part.space is types.SMEM:
        offset = ir.IntegerAttr(maker.attributes["offset"]).value
        layout = expansion.assignment.smem(part.base)
        layout = layout.reinterpreted(part.window.array_shape, part.bits)
        internal = logical.INTERNAL in maker.attributes
        pointer = addressing.own_smem_pointer(offset, _distance(maker))
        return smem.SmemView(pointer, layout, dtype, part.window, internal)
    number = ir.IntegerAttr(maker.attributes[logical.BUFFER]).value
    pointer = builder.buffers[number]
    return gmem.GmemView(pointer, number, dtype, part.window)


def _distance(maker: ir.Operation) -> addressing.Distance | None:
    """Returns what a declaration says of who has its array."""
    for of, name in logical.DISTANCES.items():
        if name in maker.attributes:
            size_bytes = ir.IntegerAttr(maker.attributes[name]).value
            return addressing.Distance(of, size_bytes)
    return None


def smem_view(expansion: Expansion, ref: ir.Value) -> smem.SmemView:
    """As `view`, of an array in SMEM."""
    result = view(expansion, ref)
    assert isinstance(result, smem.SmemView)
    return result


def gmem_view(expansion: Expansion, ref: ir.Value) -> gmem.GmemView:
    """As `view`, of an array in GMEM."""
    result = view(expansion, ref)
    assert isinstance(result, gmem.GmemView)
    return result


def barrier_pointer(ref: ir.Value) -> ir.Value:
    """Returns the address of a barrier from its memref."""
    cast = ref.owner.opview
    assert isinstance(cast, builtin.UnrealizedConversionCastOp)
    return cast.operands[0]
