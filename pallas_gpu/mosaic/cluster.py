# SPDX-License-Identifier: Apache-2.0
"""Clusters: who a block is among its neighbours, and how it reaches them.

The blocks (CTAs) of a cluster run at the same time and address each other's SMEM. A
block must not end while others still write into its SMEM or arrive on its mbarriers:
`KernelBuilder.sync_before_exit` sees to that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_gpu import errors
from pallas_gpu.mosaic import mbarrier, module
from pallas_gpu.mosaic.smem import predicated

# How long one try_wait may suspend the thread, in ns; the wait loops anyway.
_SUSPEND_HINT_NS = 10_000_000


Scope = Literal["cta", "cluster"]  # of a release or an acquire (PTX ISA, Scope)


@dataclasses.dataclass(frozen=True)
class Group:
    """The blocks of a cluster that differ from this one along some axes only.

    Attributes:
      index: i32, this block's number in the group, row-major over the axes.
      ranks: i32 each, the ranks of the group's blocks in the order of their numbers.
      mask: i16, bit r set where the block of rank r belongs to the group.
    """

    index: ir.Value
    ranks: tuple[ir.Value, ...]
    mask: ir.Value

    @property
    def count(self) -> int:
        """Blocks in the group."""
        return len(self.ranks)


def rank() -> ir.Value:
    """i32: the block's rank in its cluster, x fastest. PTX: `%cluster_ctarank`."""
    kernel = module.current()
    if not kernel.spec.has_cluster:
        return kernel.i32(0)
    i32 = ir.IntegerType.get_signless(32)
    return kernel.hoisted(
        "cluster rank", lambda: nvvm.read_ptx_sreg_cluster_ctarank(results=[i32])
    )


def group(sizes: Sequence[int], axes: Sequence[int]) -> Group:
    """The blocks along some axes of the cluster, this one among them.

    Args:
      sizes: the cluster's axes, the last one fastest: x of the launch comes last.
      axes: positions in `sizes`, ascending or not; their order numbers the blocks.

    Raises:
      ArgumentError: the sizes are not those of the launch, or no such axes.
    """
    kernel = module.current()
    sizes, axes = tuple(sizes), tuple(axes)
    if math.prod(sizes) != math.prod(kernel.spec.cluster):
        raise errors.ArgumentError(
            "The cluster's axes do not make up the launched cluster",
            expected=f"sizes with the product {math.prod(kernel.spec.cluster)}",
            got=sizes,
        )
    if len(set(axes)) != len(axes) or any(not 0 <= a < len(sizes) for a in axes):
        raise errors.ArgumentError(
            "No such axes of the cluster",
            expected=f"distinct positions below {len(sizes)}",
            got=axes,
        )
    strides = [math.prod(sizes[a + 1 :]) for a in range(len(sizes))]
    chosen = tuple((sizes[a], strides[a]) for a in axes if sizes[a] > 1)
    offsets = [0]
    for size, stride in chosen:
        offsets = [o + i * stride for o in offsets for i in range(size)]
    whole = len(offsets) == math.prod(sizes)
    first = kernel.i32(0) if whole else _hoisted("first", chosen, _first)
    ranks = tuple(
        _hoisted("rank", (chosen, o), lambda key: _plus(first, key[1])) for o in offsets
    )
    bits = sum(1 << o for o in offsets)
    mask = _hoisted("mask", (chosen, bits), lambda key: _mask(first, key[1]))
    return Group(_hoisted("index", chosen, _index), ranks, mask)


def cluster_sync() -> None:
    """Waits until all threads of the cluster have come here.

    PTX: `barrier.cluster.arrive.release.aligned`, `barrier.cluster.wait.acquire`.
    Since: sm_90. All threads of all blocks issue it; their SMEM and GMEM accesses
    before it are visible to each other after it.
    """
    nvvm.cluster_arrive(aligned=True)
    nvvm.cluster_wait(aligned=True)


def map_shared(pointer: ir.Value, block_rank: ir.Value) -> ir.Value:
    """The same place in another block's SMEM, `!llvm.ptr<7>`.

    PTX: `mapa.shared::cluster`. Since: sm_90.

    Args:
      pointer: `!llvm.ptr<3>` into this block's SMEM.
      block_rank: i32, the rank of the other block in the cluster.
    """
    return nvvm.mapa(module.pointer_type(7), pointer, block_rank)


def arrive(
    pointer: ir.Value,
    blocks: Group,
    *,
    elected: ir.Value | None = None,
    sync: bool = True,
    scope: Scope = "cluster",
) -> None:
    """Arrives once on the same mbarrier of each block of a group.

    PTX: `mbarrier.arrive.release.{cta,cluster}.shared::cluster.b64`. Since: sm_90. The
    SMEM accesses of the warpgroup, or of the warp, that arrives come before the
    arrivals. Who waits uses `wait` of this file.

    Args:
      pointer: `!llvm.ptr<3>` of this block's mbarrier.
      blocks: who is told; this block is one of them.
      elected: i1, true in the thread that arrives; the scope's if None.
      sync: False where the caller has met its threads already.
      scope: "cluster" makes the threads' writes visible to the other blocks. It costs a
        fence of the whole GPU for each arrival (MEMBAR.ALL.GPU in SASS, which halves
        the speed of a matrix product), so "cta" serves where only reads are released.
    """
    if sync:
        mbarrier.meet()
    kernel = module.current()
    with predicated(kernel.elected if elected is None else elected):
        for block_rank in blocks.ranks:
            emit_arrive_remote(map_shared(pointer, block_rank), scope)


def emit_arrive_remote(remote: ir.Value, scope: Scope = "cluster") -> None:
    """The bare instruction, for code that only the elected thread runs.

    Args:
      remote: `!llvm.ptr<7>` of the mbarrier, as `map_shared` gives it.
      scope: see `arrive`.
    """
    address = llvm.ptrtoint(ir.IntegerType.get_signless(32), remote)
    llvm.inline_asm(
        None,
        [address],
        f"mbarrier.arrive.release.{scope}.shared::cluster.b64 _, [$0];",
        "r,~{memory}",
        has_side_effects=True,
    )


def wait(pointer: ir.Value, parity: ir.Value, scope: Scope = "cluster") -> None:
    """Waits for a phase that blocks of the cluster complete by arriving.

    PTX: `mbarrier.try_wait.parity.acquire.{cta,cluster}.shared::cta.b64` in a loop.
    Since: sm_90. As `mbarrier.wait`, whose acquire reaches no further than the block.

    Args:
      pointer: `!llvm.ptr<3>` of this block's mbarrier.
      parity: i32, 0 for the first phase, then alternating.
      scope: that of the arrivals.
    """
    # Labels inside braces are local to them, so copies of the text do not clash.
    text = (
        "{ .reg .pred done;\n"
        f"again: mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 "
        "done, [$0], $1, $2;\n"
        "@!done bra again;\n}"
    )
    operands = [pointer, parity, module.current().i32(_SUSPEND_HINT_NS)]
    llvm.inline_asm(None, operands, text, "r,r,r,~{memory}", has_side_effects=True)


# --- pieces ---------------------------------------------------------------------------

Axes = tuple[tuple[int, int], ...]  # (size, stride in ranks) of each


def _hoisted(name: str, key, emit) -> ir.Value:
    return module.current().hoisted(("cluster", name, key), lambda: emit(key))


def _along(size: int, stride: int) -> ir.Value:
    """This block's place along one axis."""
    kernel = module.current()
    position = rank()
    if stride > 1:
        position = arith.divui(position, kernel.i32(stride))
    return arith.remui(position, kernel.i32(size))


def _index(axes: Axes) -> ir.Value:
    kernel = module.current()
    result = kernel.i32(0)
    for size, stride in axes:
        place = _along(size, stride)
        result = arith.addi(arith.muli(result, kernel.i32(size)), place)
    return result


def _first(axes: Axes) -> ir.Value:
    """The rank of the group's first block."""
    kernel = module.current()
    result = rank()
    for size, stride in axes:
        step = arith.muli(_along(size, stride), kernel.i32(stride))
        result = arith.subi(result, step)
    return result


def _plus(first: ir.Value, offset: int) -> ir.Value:
    return arith.addi(first, module.current().i32(offset))


def _mask(first: ir.Value, bits: int) -> ir.Value:
    i16 = ir.IntegerType.get_signless(16)
    return arith.trunci(i16, arith.shli(module.current().i32(bits), first))
