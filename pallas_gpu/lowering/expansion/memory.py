# SPDX-License-Identifier: Apache-2.0
"""From memrefs back to views: an array, and the part of it that subviews name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import builtin

from pallas_gpu import errors
from pallas_gpu.lowering.context import divisor
from pallas_gpu.lowering.expansion.expand import Expansion, expands
from pallas_gpu.lowering.warpgroup.memory import BUFFER
from pallas_gpu.mosaic import gmem, logical, smem


@expands(
    "mosaic_gpu.slice_smem",
    "mosaic_gpu.with_transforms",
    "memref.subview",
    "memref.transpose",
)
def _named_by_its_users(expansion: Expansion, op: Any) -> None:
    expansion.dead.append(op.operation)


@expands("builtin.unrealized_conversion_cast")
def _cast(expansion: Expansion, op: Any) -> None:
    if isinstance(op.results[0].type, ir.MemRefType):
        expansion.dead.append(op.operation)


def view(expansion: Expansion, ref: ir.Value) -> smem.SmemView | gmem.GmemView:
    """Returns the emitters' view of a memref."""
    order = None
    if ref.owner.name == "memref.transpose":
        permutation = ref.owner.attributes["permutation"]
        order = _permutation(permutation)
        ref = ref.owner.operands[0]
    part = None
    if ref.owner.name == "memref.subview":
        part = ref.owner.opview
        ref = ref.owner.operands[0]
    whole = _whole(expansion, ref)
    shape = list(ref.type.shape)
    if part is None:
        starts: tuple[Any, ...] = (0,) * len(shape)
        sizes, kept = tuple(shape), (True,) * len(shape)
    else:
        starts, sizes = _starts(part), tuple(part.static_sizes)
        kept = _kept(sizes, part.result.type.shape)
    order = tuple(range(sum(kept))) if order is None else order
    divisors = tuple(map(divisor, starts))
    if isinstance(whole, smem.SmemView):
        return smem.SmemView(
            whole.pointer, whole.layout, whole.dtype,
            starts, sizes, kept, order, divisors,
        )  # fmt: skip
    return gmem.GmemView(
        whole.pointer, whole.buffer_index, whole.array_shape, whole.dtype,
        starts, sizes, kept, order, divisors,
    )  # fmt: skip


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


def _whole(expansion: Expansion, ref: ir.Value) -> smem.SmemView | gmem.GmemView:
    builder = expansion.kernel.builder
    dtype = logical.dtype_of(ref.type)
    if ref.owner.name == "builtin.unrealized_conversion_cast":
        index = ir.IntegerAttr(ref.owner.attributes[BUFFER]).value
        pointer = builder.buffers[index]
        return gmem.GmemView.whole(pointer, index, tuple(ref.type.shape), dtype)
    if ref.owner.name == "mosaic_gpu.with_transforms":
        ref = ref.owner.operands[0]
    if ref.owner.name != "mosaic_gpu.slice_smem":
        raise errors.InternalError(f"no array in memory: {ref.owner.name}")
    offset = ir.IntegerAttr(ref.owner.attributes["offset"]).value
    layout = expansion.assignment.smem(ref)
    return smem.SmemView.whole(builder.smem_pointer(offset), layout, dtype)


def _starts(part: Any) -> tuple[int | ir.Value, ...]:
    dynamic = iter(part.offsets)
    mark = ir.ShapedType.get_dynamic_size()
    return tuple(
        # The cast to index hides the i32 that the addresses are made of.
        next(dynamic).owner.operands[0] if x == mark else x
        for x in part.static_offsets
    )


def _kept(sizes: Sequence[int], shape: Sequence[int]) -> tuple[bool, ...]:
    """Which axes of a subview its memref still has; all it drops have one element."""
    surplus = len(sizes) - len(shape)
    kept = []
    for size in sizes:
        drop = surplus > 0 and size == 1
        surplus -= drop
        kept.append(not drop)
    return tuple(kept)


def _permutation(attribute: ir.Attribute) -> tuple[int, ...]:
    affine = ir.AffineMapAttr(attribute).value
    return tuple(ir.AffineDimExpr(e).position for e in affine.results)


def barrier_pointer(ref: ir.Value) -> ir.Value:
    """Returns the address of a barrier from its memref."""
    cast = ref.owner.opview
    assert isinstance(cast, builtin.UnrealizedConversionCastOp)
    return cast.operands[0]
