# SPDX-License-Identifier: Apache-2.0
"""Memrefs of the warpgroup-level module, resolved to parts of the arrays behind them.

An array is a `slice_smem` in SMEM, a `tmem_alloc` or a `slice_tmem` in TMEM, or a cast
of a pointer in GMEM. A part of it is made
by at most one subview, whose axes of size one may be dropped, and one transpose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.layouts.window import Window
from pallas_gpu.lowering.inference import sources
from pallas_gpu.mosaic import dialect, logical
from pallas_gpu.mosaic.elements import scalars


@dataclasses.dataclass(frozen=True)
class View:
    """A part of an array in memory.

    Attributes:
      base: the result of the operation that declares it: the whole array.
      in_smem, in_tmem: where it lies; in GMEM if in neither.
      shape: shape of the whole array.
      bits: width of an element in memory; a bool takes a byte.
      starts: first index per axis of the array, None where it is dynamic.
      indices: the dynamic starts as i32 values, None where the start is known.
      multiples: per axis what a dynamic start is known to be a multiple of.
      sizes: elements per axis; 1 where an integer index stands.
      kept: per axis, False for an integer index.
      order: axis i of the view is the kept axis number `order[i]`.
    """

    base: ir.Value
    in_smem: bool
    shape: tuple[int, ...]
    bits: int
    starts: tuple[int | None, ...]
    indices: tuple[ir.Value | None, ...]
    multiples: tuple[int, ...]
    sizes: tuple[int, ...]
    kept: tuple[bool, ...]
    order: tuple[int, ...]
    in_tmem: bool = False

    @property
    def kept_axes(self) -> tuple[int, ...]:
        """The array's axes that the view has, in the view's order."""
        axes = [a for a, k in enumerate(self.kept) if k]
        return tuple(axes[i] for i in self.order)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape that a load has."""
        return tuple(self.sizes[a] for a in self.kept_axes)

    @property
    def array_strides(self) -> tuple[int, ...]:
        """Of a row-major array: elements between neighbours, per axis of the array."""
        return tuple(math.prod(self.shape[a + 1 :]) for a in range(len(self.shape)))

    @property
    def strides(self) -> tuple[int, ...]:
        """The same, per axis of the view."""
        return tuple(self.array_strides[a] for a in self.kept_axes)

    @property
    def window(self) -> Window:
        """The part as a window."""
        starts = tuple(
            i if s is None else s
            for s, i in zip(self.starts, self.indices, strict=True)
        )
        multiples = self.start_multiples
        return Window(self.shape, starts, self.sizes, self.kept_axes, multiples)

    @property
    def is_transposed(self) -> bool:
        """Whether the axes are out of order."""
        return list(self.order) != sorted(self.order)

    @property
    def start_multiples(self) -> tuple[int, ...]:
        """Per axis of the array a divisor of the start; 0 is a start of 0."""
        return tuple(
            m if s is None else s
            for s, m in zip(self.starts, self.multiples, strict=True)
        )

    def moved(self, indices: Sequence[ir.Value], lengths: Sequence[int]) -> View:
        """The part that starts at further indices, one per axis of the view.

        Args:
          lengths: elements per axis; negative for an axis that goes away.
        """
        starts, multiples = list(self.starts), list(self.multiples)
        sizes, kept = list(self.sizes), list(self.kept)
        for axis, index, length in zip(self.kept_axes, indices, lengths, strict=True):
            known = scalars.known(index)
            before = self.start_multiples[axis]
            multiples[axis] = math.gcd(before, scalars.divisor(index))
            start = starts[axis]
            both = start is not None and known is not None
            starts[axis] = start + known if both else None  # type: ignore[operator]
            sizes[axis] = max(length, 1)
            kept[axis] = length >= 0
        left = [a for a in self.kept_axes if kept[a]]
        return dataclasses.replace(
            self,
            starts=tuple(starts),
            multiples=tuple(multiples),
            sizes=tuple(sizes),
            kept=tuple(kept),
            order=tuple(sorted(left).index(a) for a in left),
        )


def resolve(memref: ir.Value) -> View | None:
    """The part of an array behind a memref; None where it is no array of ours."""
    owner = memref.owner
    if isinstance(owner, ir.Block):
        return None
    op = owner.operation
    match op.name:
        case "mosaic_gpu.slice_smem":
            return _whole(memref, in_smem=True)
        case "builtin.unrealized_conversion_cast" if logical.BUFFER in op.attributes:
            return _whole(memref, in_smem=False)
        case "mosaic_gpu.tmem_alloc" | "mosaic_gpu.slice_tmem":
            return _whole_tmem(memref)
        case "mosaic_gpu.with_transforms" | "mosaic_gpu.tmem_layout_cast":
            return resolve(op.operands[0])
        case "memref.subview":
            source = resolve(op.operands[0])
            return None if source is None else _subview(op, source)
        case "memref.transpose":
            source = resolve(op.operands[0])
            return None if source is None else _transposed(op, source)
    return None


def memory_bits(element: ir.Type) -> int:
    """Width of an element in memory."""
    return max(element_bits(element), 8)


def element_bits(element: ir.Type) -> int:
    """Width of an element of a vector; 1 for a bool."""
    width = getattr(element, "width", None)
    if width is None:
        raise errors.InternalError("Not an element of an array", got=str(element))
    return int(width)


def _whole(memref: ir.Value, *, in_smem: bool) -> View:
    type_ = ir.MemRefType(memref.type)
    shape = tuple(type_.shape)
    rank = len(shape)
    return View(
        memref,
        in_smem,
        shape,
        memory_bits(type_.element_type),
        (0,) * rank,
        (None,) * rank,
        (1,) * rank,
        shape,
        (True,) * rank,
        tuple(range(rank)),
    )


def _whole_tmem(memref: ir.Value) -> View:
    # Columns of TMEM hold elements of fewer than 8 bits side by side.
    bits = element_bits(ir.MemRefType(memref.type).element_type)
    return dataclasses.replace(_whole(memref, in_smem=False), in_tmem=True, bits=bits)


def _subview(op: ir.Operation, source: View) -> View:
    if not all(source.kept) or source.is_transposed:
        raise errors.InternalError(
            "A subview of a part of an array",
            expected="one subview, then one transpose",
            where=sources.where(op),
        )
    attributes = op.attributes
    offsets = list(ir.DenseI64ArrayAttr(attributes["static_offsets"]))
    sizes = tuple(ir.DenseI64ArrayAttr(attributes["static_sizes"]))
    dynamic = iter(list(op.operands)[1:])
    mark = ir.ShapedType.get_dynamic_stride_or_offset()
    indices = [_uncast(next(dynamic)) if o == mark else None for o in offsets]
    kept = _kept(source, sizes, ir.MemRefType(op.results[0].type), op)
    return dataclasses.replace(
        source,
        starts=tuple(None if o == mark else o for o in offsets),
        indices=tuple(indices),
        multiples=tuple(1 if i is None else scalars.divisor(i) for i in indices),
        sizes=sizes,
        kept=kept,
        order=tuple(range(sum(kept))),
    )


def _uncast(index: ir.Value) -> ir.Value:
    """The i32 behind a cast to index, which addresses are made of."""
    owner = index.owner
    if isinstance(owner, ir.Block) or owner.operation.name != "arith.index_cast":
        return index
    return owner.operation.operands[0]


def _kept(
    source: View, sizes: tuple[int, ...], result: ir.MemRefType, op: ir.Operation
) -> tuple[bool, ...]:
    """Which axes the result has: of equal sizes and strides, from the last one on."""
    shape, (strides, _) = list(result.shape), result.get_strides_and_offset()
    strides = list(strides)
    kept = [False] * len(sizes)
    for axis in reversed(range(len(sizes))):
        stride = math.prod(source.shape[axis + 1 :])
        if shape and shape[-1] == sizes[axis] and strides[-1] == stride:
            kept[axis] = True
            shape.pop()
            strides.pop()
    dropped = [s for s, k in zip(sizes, kept, strict=True) if not k]
    if shape or any(s != 1 for s in dropped):
        raise errors.InternalError(
            "A subview drops axes that are longer than one",
            got=str(op),
            where=sources.where(op),
        )
    return tuple(kept)


def _transposed(op: ir.Operation, source: View) -> View:
    results = ir.AffineMapAttr(op.attributes["permutation"]).value.results
    permutation = [ir.AffineDimExpr(r).position for r in results]
    return dataclasses.replace(
        source, order=tuple(source.order[p] for p in permutation)
    )


def user_transforms(base: ir.Value) -> ir.Operation | None:
    """The `with_transforms` behind an array in SMEM, if there is one."""
    for use in base.uses:
        owner = use.owner
        op = owner.operation if hasattr(owner, "operation") else owner
        if op.name == "mosaic_gpu.with_transforms":
            return op
    return None


def storage(transforms: ir.Operation) -> tuple[tuple[int, ...] | None, int]:
    """Tiling and swizzle of a `with_transforms`."""
    return dialect.transforms_from_attribute(transforms.attributes["transforms"])
