# SPDX-License-Identifier: Apache-2.0
"""How a kernel is launched: its grid, clusters and blocks along CUDA's axes."""

from __future__ import annotations

import dataclasses
import math

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

from pallas_gpu import errors
from pallas_gpu.emitters.elements import arith

WARPGROUP_THREADS = 128


@dataclasses.dataclass(frozen=True)
class LaunchSpec:
    """How a kernel is launched.

    Attributes:
      name: the kernel's symbol name.
      grid: blocks per axis, x first.
      cluster: blocks of one cluster per axis, x first; divides the grid.
      threads: threads per block, a multiple of 128.
      block: threads per axis, x first; None: all along x.
      smem_bytes: dynamic SMEM per block.
      num_buffers: number of operands and results of the kernel.
      devices: number of devices of which the kernel accesses the memory of others; 0:
        it accesses its own device's alone.
      multicasts: whether it accesses the memory of all of them at once.
      arch: compute capability, e.g. (9, 0).
      shares_smem: whether threads access the SMEM of other blocks of the cluster.
      waits_for_grids: whether the kernel may start before the kernels before it have
        ended, for which it waits itself (programmatic dependent launch).
    """

    name: str
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    threads: int = WARPGROUP_THREADS
    smem_bytes: int = 0
    num_buffers: int = 0
    devices: int = 0
    multicasts: bool = False
    arch: tuple[int, int] = (9, 0)
    shares_smem: bool = False
    waits_for_grids: bool = False
    block: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.threads < 1 or self.threads % WARPGROUP_THREADS:
            raise errors.ArgumentError(
                "The number of threads is not a multiple of a warpgroup's",
                expected=f"a multiple of {WARPGROUP_THREADS} threads",
                got=self.threads,
            )
        if math.prod(self.block_dims) != self.threads:
            raise errors.ArgumentError(
                "The sizes of the block do not match its number of threads",
                expected=f"sizes with the product {self.threads}",
                got=self.block,
            )
        for axis, (blocks, cluster) in enumerate(
            zip(self.grid, self.cluster, strict=True)
        ):
            if cluster < 1 or blocks % cluster:
                raise errors.ArgumentError(
                    f"The grid is not a multiple of the cluster along axis {axis}",
                    expected=f"a multiple of {cluster} blocks",
                    got=blocks,
                )

    @property
    def has_cluster(self) -> bool:
        """True if a cluster has more than one block."""
        return self.cluster != (1, 1, 1)

    @property
    def block_dims(self) -> tuple[int, int, int]:
        """Threads per axis, x first."""
        return self.block or (self.threads, 1, 1)

    @property
    def warpgroups(self) -> int:
        """The number of warpgroups per block."""
        return self.threads // WARPGROUP_THREADS


def thread_in_block(block: tuple[int, int, int]) -> ir.Value:
    """i32: the number of the thread in its block, x fastest."""
    i32 = ir.IntegerType.get_signless(32)
    registers = (nvvm.ThreadIdXOp, nvvm.ThreadIdYOp, nvvm.ThreadIdZOp)
    total, below = None, 1
    for register, size in zip(registers, block, strict=True):
        if size == 1 and total is not None:
            continue
        bounds = ir.Attribute.parse(f"#llvm.constant_range<i32, 0, {size}>")
        position = register(results=[i32], range=bounds).result
        if total is None:
            total = position
        else:
            step = arith.constant(i32, below)
            total = arith.addi(total, arith.muli(position, step))
        below *= size
    return total
