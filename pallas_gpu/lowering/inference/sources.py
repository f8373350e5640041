# SPDX-License-Identifier: Apache-2.0
"""Names of operations in messages: as in the kernel's source, with the line."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import _jax
from pallas_gpu.mosaic import logical

_WORDS = {
    "mosaic_gpu.vector_load": "load",
    "mosaic_gpu.vector_store": "store",
    "mosaic_gpu.layout_cast": "layout_cast",
    "mosaic_gpu.wgmma": "wgmma",
    "mosaic_gpu.broadcast_in_dim": "broadcast",
    "mosaic_gpu.broadcasted_iota": "iota",
    "mosaic_gpu.optimization_barrier": "optimization_barrier",
    "mosaic_gpu.async_load": "copy_gmem_to_smem",
    "mosaic_gpu.async_store": "copy_smem_to_gmem",
    "mosaic_gpu.async_prefetch": "async_prefetch",
    "mosaic_gpu.slice_smem": "SMEM array",
    "mosaic_gpu.with_transforms": "transforms",
    "mosaic_gpu.tmem_alloc": "TMEM array",
    "mosaic_gpu.slice_tmem": "TMEM array",
    "mosaic_gpu.tmem_layout_cast": "TMEM layout",
    "mosaic_gpu.async_load_tmem": "async_load_tmem",
    "mosaic_gpu.async_store_tmem": "async_store_tmem",
    "mosaic_gpu.tcgen05_mma": "tcgen05_mma",
    "pallas_gpu.sparse_tcgen05_mma": "tcgen05_mma",
    "mosaic_gpu.async_store_smem_to_tmem": "copy_smem_to_tmem",
    "mosaic_gpu.async_store_scales_smem_to_tmem": "copy of scales to TMEM",
    "mosaic_gpu.async_store_sparse_metadata_smem_to_tmem": "copy of metadata to TMEM",
    "vector.broadcast": "splat",
    "vector.shape_cast": "reshape",
    "vector.transpose": "transpose",
    "vector.extract_strided_slice": "slice",
    "vector.multi_reduction": "reduction",
    "builtin.unrealized_conversion_cast": "address of an array",
    "scf.for": "loop",
    "scf.while": "while loop",
    "scf.if": "branch",
}


# Names of primitives in messages, where the kernel's source has another one.
_NAMES = {
    "swap": "store",
    "get": "load",
    "scan": "loop",
    "while": "while loop",
    "cond": "branch",
    "broadcast_in_dim": "broadcast",
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "scan"),
}


def name_of(primitive: Any) -> str:
    """The name of a primitive in the kernel's source."""
    name = primitive.name
    return "reduction" if name.startswith("reduce_") else _NAMES.get(name, name)


def words(op: Any) -> str:
    """The operation's name in the kernel's source."""
    if not isinstance(op, ir.Operation):
        return op.words
    return _WORDS.get(op.name, op.name.removeprefix(logical.OWN))


def where(op: Any) -> str | None:
    """The operation's line as `file:line`, `file:line (function)` if that is known."""
    if not isinstance(op, ir.Operation):
        return op.where
    return _place(op.location)


def _place(location: ir.Location) -> str | None:
    match location:
        case ir.FileLineColLoc():
            return f"{_jax.short_path(location.filename)}:{location.start_line}"
        case ir.NameLoc():
            inner = _place(location.child_loc)
            return None if inner is None else f"{inner} ({location.name_str})"
        case ir.CallSiteLoc():
            return _place(location.callee)
        case ir.FusedLoc():
            places = map(_place, location.locations)
            return next((place for place in places if place is not None), None)
    return None


def named(op: Any) -> str:
    """The operation with its line, if known: `wgmma (kernel.py:12)`."""
    line = where(op)
    return words(op) if line is None else f"{words(op)} ({line})"
