# SPDX-License-Identifier: Apache-2.0
"""Arrays in memory and parts of them, as memrefs of the warpgroup-level module."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.lowering.expansion.walk import Expansion
from pallas_gpu.lowering.inference.constraints import use_as_pointers
from pallas_gpu.lowering.inference.network import Key, Network
from pallas_gpu.lowering.rules import expands, infers


@infers("mosaic_gpu.slice_smem")
def _infer_smem_array(network: Network, op: ir.Operation, key: Key) -> None:
    part = network.part(op.results[0])
    if part is not None:
        network.array(part)


@infers(
    "mosaic_gpu.with_transforms",
    "memref.subview",
    "memref.transpose",
    "builtin.unrealized_conversion_cast",
)
def _infer_view(network: Network, op: ir.Operation, key: Key) -> None:
    """Parts are resolved at their uses; a cast of an array may yield its pointer."""
    is_cast = op.name == "builtin.unrealized_conversion_cast"
    if is_cast and not isinstance(op.results[0].type, ir.MemRefType):
        use_as_pointers(network, op)


@expands(
    "mosaic_gpu.slice_smem",
    "mosaic_gpu.with_transforms",
    "memref.subview",
    "memref.transpose",
)
def _expand_view(expansion: Expansion, op: Any) -> None:
    expansion.dead.append(op.operation)


@expands("builtin.unrealized_conversion_cast")
def _expand_cast(expansion: Expansion, op: Any) -> None:
    if isinstance(op.results[0].type, ir.MemRefType):
        expansion.dead.append(op.operation)
