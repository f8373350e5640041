# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's targets: the limits per block and SM, and the features of each GPU.

Nothing here queries an attached device; `runtime/` does so once and selects a target by
compute capability.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import overload

from pallas_gpu import errors, expect
from pallas_gpu.arch.target import Featured, Target


class Feature(enum.Enum):
    """Hardware features that a primitive may require."""

    TMA = "TMA copies"
    MBARRIER_TX = "mbarrier transaction counts"
    CLUSTER = "thread block clusters"
    WGMMA = "wgmma"
    SETMAXNREG = "setmaxnreg"
    TCGEN05 = "tcgen05"
    TCGEN05_INT8 = "tcgen05 products of 8-bit integers"
    TMEM = "tensor memory"
    MULTIMEM_FLOAT8 = "multimem reductions of float8"
    CLUSTER_LAUNCH_CONTROL = "cluster launch control"


# MLIR addresses dynamic SMEM by a static variable (gpu.dynamic_shared_memory), before
# which dynamic SMEM cannot start. On an H200 a launch with 232,448 bytes fails with
# "invalid argument", one with 232,440 bytes runs.
STATIC_SMEM_BYTES = 16


@dataclasses.dataclass(frozen=True)
class GpuTarget(Featured):
    """One compilation target and its limits; implements `arch.Target`.

    The limits per block and SM are those of the CUDA programming guide's table
    "Technical Specifications per Compute Capability"; clocks, bandwidth and counts
    describe the usual card of the target and are only for XLA's cost model.

    Attributes:
      name: PTX target, e.g. `sm_90a`.
      compute_capability: (major, minor).
      card: the card that the figures describe.
      smem_bytes_per_block: maximum of dynamic SMEM of a kernel: what a block can opt in
        to, less `STATIC_SMEM_BYTES`.
      smem_bytes_per_sm: SMEM per SM, of which 1 KiB is reserved for each block.
      registers_per_sm: 32-bit registers per SM.
      max_registers_per_thread: hardware limit.
      max_threads_per_block: hardware limit.
      max_threads_per_sm: hardware limit.
      max_blocks_per_sm: hardware limit.
      max_cluster_blocks: largest cluster. More than 8 blocks are not portable: they
        need as many free SMs in one GPC, a part of the card.
      tmem_columns: 32-bit columns of TMEM per SM; 0 without TMEM.
      gpc_sms: number of SMs of each GPC, a part of the card: a cluster runs in one.
        Cards of one model differ in it.
      features: the features of the target.
    """

    name: str
    compute_capability: tuple[int, int]
    card: str
    smem_bytes_per_block: int
    smem_bytes_per_sm: int
    registers_per_sm: int
    max_registers_per_thread: int
    max_threads_per_block: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    max_cluster_blocks: int
    tmem_columns: int
    gpc_sms: tuple[int, ...]
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_second: int
    l2_bytes: int
    features: frozenset[Feature]

    @property
    def machine(self) -> str:
        """The machine whose planner, launch and rules compile for the target."""
        return "nvidia"

    @property
    def sm_count(self) -> int:
        """Number of SMs of the card."""
        return sum(self.gpc_sms)

    @property
    def budgets(self) -> Mapping[str, int]:
        """The limits of one block."""
        return {
            "SMEM bytes": self.smem_bytes_per_block,
            "threads": self.max_threads_per_block,
            "registers of a thread": self.max_registers_per_thread,
            "TMEM columns": self.tmem_columns,
        }

    @property
    def others(self) -> Iterable[GpuTarget]:
        """All targets of the machine."""
        return TARGETS.values()

    @property
    def described(self) -> str:
        """The target, for messages."""
        major, minor = self.compute_capability
        return f"{self.name} (compute capability {major}.{minor})"


_HOPPER = frozenset(
    {
        Feature.TMA,
        Feature.MBARRIER_TX,
        Feature.CLUSTER,
        Feature.WGMMA,
        Feature.SETMAXNREG,
    }
)
_BLACKWELL = (_HOPPER - {Feature.WGMMA}) | {
    Feature.TCGEN05,
    Feature.TMEM,
    Feature.MULTIMEM_FLOAT8,
    Feature.CLUSTER_LAUNCH_CONTROL,
}

SM_90A = GpuTarget(
    name="sm_90a",
    compute_capability=(9, 0),
    card="NVIDIA H200",
    smem_bytes_per_block=227 * 1024 - STATIC_SMEM_BYTES,
    smem_bytes_per_sm=228 * 1024,
    registers_per_sm=65536,
    max_registers_per_thread=255,
    max_threads_per_block=1024,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    # CUDA programming guide, "Thread Block Clusters": 16 with the attribute for sizes
    # that are not portable, which the plugin sets for more than 8.
    max_cluster_blocks=16,
    tmem_columns=0,
    # What cuOccupancyMaxActiveClusters answers on an H200 for clusters of 1 to 16.
    gpc_sms=(18, 18, 16, 16, 16, 16, 16, 8, 2, 2, 2, 2),
    clock_ghz=1.98,
    memory_bytes=141 * 10**9,
    memory_bytes_per_second=4_800_000_000_000,
    l2_bytes=60 * 2**20,
    features=_HOPPER,
)

SM_100A = dataclasses.replace(
    SM_90A,
    name="sm_100a",
    compute_capability=(10, 0),
    card="NVIDIA B200",
    tmem_columns=512,
    # Its division into GPCs has not been measured.
    gpc_sms=(148,),
    memory_bytes=180 * 10**9,
    memory_bytes_per_second=8_000_000_000_000,
    l2_bytes=126 * 2**20,
    features=_BLACKWELL | {Feature.TCGEN05_INT8},
)

# PTX ISA, tcgen05.mma: .kind::i8 is not for sm_103a.
SM_103A = dataclasses.replace(
    SM_100A,
    name="sm_103a",
    compute_capability=(10, 3),
    card="NVIDIA B300",
    memory_bytes=288 * 10**9,
    features=_BLACKWELL,
)

# Else `isinstance` looks up each attribute of the interface.
Target.register(GpuTarget)

TARGETS: dict[str, GpuTarget] = {t.name: t for t in (SM_90A, SM_100A, SM_103A)}
DEFAULT_TARGET = SM_90A


@overload
def target(name: str) -> GpuTarget: ...
@overload
def target[T: Target](name: T) -> T: ...
@expect.arguments()
def target(name: str | Target) -> Target:
    """Returns the target of that name.

    Args:
      name: `sm_90a`, `sm_100a`, `sm_103a`, or a `Target`, which is returned unchanged.

    Raises:
      TargetError: the target is unknown.
    """
    if isinstance(name, Target) and not isinstance(name, type):
        return name
    if isinstance(name, str) and name in TARGETS:
        return TARGETS[name]
    raise errors.TargetError(
        "unknown target",
        expected=" or ".join(TARGETS),
        got=expect.shown(name),
        hint="pass target='sm_90a' for Hopper, 'sm_100a' for Blackwell, or 'sm_103a' "
        "for Blackwell Ultra",
    )


@expect.arguments(major=expect.integer(0), minor=expect.integer(0))
def target_of_capability(major: int, minor: int) -> GpuTarget:
    """Returns the target for a device's compute capability.

    Raises:
      TargetError: the device's architecture is not supported.
    """
    for candidate in TARGETS.values():
        if candidate.compute_capability == (major, minor):
            return candidate
    raise errors.TargetError(
        "this GPU is not supported",
        expected="compute capability "
        + " or ".join(
            f"{t.compute_capability[0]}.{t.compute_capability[1]} ({t.card})"
            for t in TARGETS.values()
        ),
        got=f"{major}.{minor}",
        hint="run in the emulator with interpret=True",
    )
