# SPDX-License-Identifier: Apache-2.0
"""The ops and attributes of the `mosaic_gpu` dialect; only this file imports them.

jaxlib provides the dialect in two parts: generated builders of its ops, and an
extension module with its attributes. Both change between versions of jaxlib. What the
package uses of them is listed here, and all other modules import it from here:

* `ops.slice_smem(type, offset)`, `ops.with_transforms(ref, attributes)`
* `ops.vector_load(ref, optimized=)`, `ops.vector_store(vector, ref, optimized=)`
* `ops.layout_cast(vector, attribute)`: tiled and strided layouts, not splats
* `ops.broadcasted_iota(type, dimension)`, `ops.broadcast_in_dim(type, x, dims)`
* `ops.wgmma(acc, a, b)`, `ops.optimization_barrier(values)`
* `ops.async_load(gmem, smem, indices, slice_lengths, collective, barrier=, predicate=)`
* `ops.async_store(smem, gmem, indices, slice_lengths, predicate=, commit_group=,
  reduction_op=)`
* `ops.async_prefetch(gmem, indices, slice_lengths, collective, predicate=)`
* `ops.tmem_alloc(type, smem, collective=, packing=)`
* `ops.slice_tmem(type, ref, offset)`
* `ops.tmem_layout_cast(ref, attribute)`: tiled layouts
* `ops.async_load_tmem(ref)`, `ops.async_store_tmem(vector, ref)`
* `ops.tcgen05_mma(acc, a, b, accumulate, a_scale=, b_scale=, a_sparse_metadata=,
  collective=)`

Their signatures agree in jaxlib 0.11.2 and 0.12. The verifiers require the dialect to
be registered (`module.make_context`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _mosaic_gpu_ext as _ext

# The generated builders look up their attribute classes in this package's namespace.
from jaxlib.mosaic.dialect.gpu import _mosaic_gpu_gen_enums as enums
from jaxlib.mosaic.dialect.gpu import _mosaic_gpu_gen_ops as ops

from pallas_gpu import errors
from pallas_gpu.layouts import (
    RegisterLayout,
    Replicated,
    TiledLayout,
    Tiling,
    TmemLayout,
    WGSplatLayout,
    WGStridedLayout,
)
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE

# The bindings import a module for the dialect of each operation that Python accesses,
# and if none exists they retry every time: 0.3 ms for each elementwise operation, whose
# dialect is our own, unregistered one. An empty module ends the search.
sys.modules.setdefault(
    "jaxlib.mlir.dialects.pallas_gpu", types.ModuleType("pallas_gpu")
)

__all__ = [
    "from_attribute",
    "ops",
    "reduction_attribute",
    "reduction_from_attribute",
    "tmem_from_attribute",
    "to_attribute",
    "transforms_from_attribute",
    "transforms_to_attributes",
]


def to_attribute(layout: RegisterLayout) -> ir.Attribute:
    """The dialect's attribute for a register layout, in the current MLIR context."""
    match layout:
        case TiledLayout():
            return _ext.TiledLayoutAttr.get(
                ir.ArrayAttr.get([_integers(tile) for tile in layout.tiling.tiles]),
                _partition(layout.warp_dims),
                _partition(layout.lane_dims),
                layout.vector_dim,
            )
        case WGStridedLayout():
            shape = ir.DenseI64ArrayAttr.get(layout.shape)
            return _ext.WGStridedFragLayoutAttr.get(shape, layout.vec_size)
        case WGSplatLayout():
            return _ext.WGSplatFragLayoutAttr.get(
                ir.DenseI64ArrayAttr.get(layout.shape)
            )
    raise errors.InternalError("Not a register layout", got=repr(layout))


def from_attribute(attribute: ir.Attribute) -> RegisterLayout:
    """The register layout that an attribute of the dialect describes.

    Raises:
      LayoutError: the attribute does not describe a valid layout.
      InternalError: the attribute is of another kind.
    """
    match attribute:
        case _ext.TiledLayoutAttr():
            tiles = [tuple(int(x) for x in tile) for tile in attribute.tiling]
            return TiledLayout(
                Tiling(tuple(tiles)),
                tuple(map(_partition_dim, attribute.warp_dims)),
                tuple(map(_partition_dim, attribute.lane_dims)),
                attribute.vector_dim,
            )
        case _ext.WGStridedFragLayoutAttr():
            return WGStridedLayout(tuple(attribute.shape), attribute.vector_size)
        case _ext.WGSplatFragLayoutAttr():
            return WGSplatLayout(tuple(attribute.shape))
    raise errors.InternalError(
        "Not an attribute of a register layout",
        expected="TiledLayout, WGStridedFragLayout or WGSplatFragLayout",
        got=str(attribute),
    )


def tmem_from_attribute(attribute: ir.Attribute) -> TmemLayout:
    """The layout in TMEM that the attribute of a `tmem_layout_cast` describes.

    The inverse is `to_attribute(layout.tiled)`.

    Raises:
      LayoutError: it is not a layout of TMEM.
      InternalError: the attribute is of another kind.
    """
    tiled = from_attribute(attribute)
    if not isinstance(tiled, TiledLayout):
        raise errors.InternalError(
            "Not an attribute of a layout in TMEM",
            expected="TiledLayout",
            got=str(attribute),
        )
    return TmemLayout.from_tiled(tiled)


def transforms_to_attributes(
    tiling: Sequence[int] | None, swizzle: int
) -> list[ir.Attribute]:
    """Attributes of `with_transforms` for a tiling (or None) and a swizzle in bytes."""
    tile = [] if tiling is None else [_ext.TileTransformAttr.get(list(tiling))]
    return [*tile, _ext.SwizzleTransformAttr.get(swizzle)]


def transforms_from_attribute(
    transforms: ir.ArrayAttr,
) -> tuple[tuple[int, ...] | None, int]:
    """The tiling and the swizzle in bytes (16 for none) that `with_transforms` states.

    Raises:
      InternalError: a kind of transform is repeated or unknown.
    """
    tilings, swizzles = [], []
    for attribute in transforms:
        match attribute:
            case _ext.TileTransformAttr():
                tilings.append(tuple(int(t) for t in attribute.tiling))
            case _ext.SwizzleTransformAttr():
                swizzles.append(int(attribute.swizzle))
            case _:
                tilings = [(), ()]
    if len(tilings) > 1 or len(swizzles) > 1:
        raise errors.InternalError(
            "with_transforms has more than a tiling and a swizzle",
            got=str(transforms),
        )
    return (
        tilings[0] if tilings else None,
        swizzles[0] if swizzles else NO_SWIZZLE,
    )


def _integer(value: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _integers(values: Sequence[int]) -> ir.ArrayAttr:
    return ir.ArrayAttr.get([_integer(value) for value in values])


def _partition(dims: Sequence[int | Replicated]) -> ir.ArrayAttr:
    return ir.ArrayAttr.get(
        [
            _ext.ReplicatedAttr.get(d.times)
            if isinstance(d, Replicated)
            else _integer(d)
            for d in dims
        ]
    )


def _partition_dim(attribute: ir.Attribute) -> int | Replicated:
    if isinstance(attribute, _ext.ReplicatedAttr):
        return Replicated(attribute.times)
    return int(attribute)


def reduction_attribute(reduction: str | None) -> ir.Attribute | None:
    """The dialect's attribute for a copy's reduction, as `add`; None for none."""
    if reduction is None:
        return None
    number = enums.TMAReduction[reduction.capitalize()]
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)


def reduction_from_attribute(attribute: ir.Attribute | None) -> str | None:
    """The reduction of an attribute."""
    if attribute is None:
        return None
    return enums.TMAReduction(ir.IntegerAttr(attribute).value).name.lower()
