# SPDX-License-Identifier: Apache-2.0
"""tcgen05: products with an accumulator in TMEM. Infer rule only."""

from __future__ import annotations

from jaxlib.mlir import ir

from pallas_gpu import errors, types
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.lowering.families.tmem import packed, require
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.constraints import array_of
from pallas_gpu.lowering.inference.network import Network, Use
from pallas_gpu.lowering.memrefs import Part
from pallas_gpu.lowering.rules import infers

_HALF_ROWS, _ROWS = 64, 128


@infers("mosaic_gpu.tcgen05_mma")
def _infer_mma(network: Network, op: ir.Operation, key: int) -> None:
    # accumulator, a, b, accumulate, a_scale, b_scale, a_sparse_metadata
    counts = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
    first = [sum(counts[:i]) if n else None for i, n in enumerate(counts)]
    collective = ir.BoolAttr(op.attributes["collective"]).value
    accumulator, left = array_of(network, op, 0), array_of(network, op, 1)
    half = accumulator.window.sizes[0] == _HALF_ROWS
    require(
        network, op, 0, "accumulator", lambda: _accumulator(accumulator, collective)
    )
    if left.space is types.TMEM:
        _check_left(op, left)
        require(network, op, 1, "left operand", lambda: packed(left))
    else:
        use = Use(op, "mma", left, network.weight, role="left operand")
        network.use_memory(use)
    right = array_of(network, op, 2)
    network.use_memory(Use(op, "mma", right, network.weight, role="right operand"))
    both = TmemLayout.scales_m64_collective if collective and half else None
    made = (
        ("scales of the left operand", TmemLayout.scales),
        ("scales of the right operand", both or TmemLayout.scales),
        ("metadata", TmemLayout.sparse_metadata),
    )
    for i, (role, make) in zip(first[4:], made, strict=True):
        if i is not None:
            require(network, op, i, role, make)


def _accumulator(part: Part, collective: bool) -> TmemLayout:
    """One element per column; the layout of 64 rows depends on one or two CTAs."""
    if part.window.sizes[0] != _HALF_ROWS:
        return TmemLayout.default()
    if collective:
        return TmemLayout.m64_collective(part.window.sizes[1])
    return TmemLayout.half_lane(part.window.sizes[1])


def _check_left(op: ir.Operation, part: Part) -> None:
    window = part.window
    if window.sizes[0] != _ROWS:
        raise errors.UnsupportedError(
            f"tcgen05_mma: a left operand in TMEM cannot have {window.sizes[0]} rows",
            expected=f"{_ROWS} rows",
            got=f"shape {window.shape}",
            hint="pass the left operand in SMEM",
            where=sources.where(op),
        )
