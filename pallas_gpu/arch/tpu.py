# SPDX-License-Identifier: Apache-2.0
"""TPU targets: the SparseCores of each chip, and the limits of their subcores.

The figures are those that libtpu 0.0.48 compiles for; the bandwidth is JAX's table of
chips. None was measured on a TPU.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

from pallas_gpu import errors, expect
from pallas_gpu.arch.target import Featured


class Feature(enum.Enum):
    """Features of a SparseCore that an operation may require."""

    ROUND_TO_EVEN = "an instruction that rounds to even"
    ERF = "an instruction for the error function"


@dataclasses.dataclass(frozen=True)
class TpuTarget(Featured):
    """One chip with SparseCores; implements `arch.Target`.

    Sizes are in words of 32 bits.

    Attributes:
      name: the chip, e.g. `v5p`.
      topology: what libtpu calls the smallest machine with such chips.
      cores: SparseCores of a device.
      subcores: vector subcores of a core.
      lanes: elements of 32 bits in a vector register.
      vmem_words: VMEM of a vector subcore.
      pool_words: what the VMEM of all subcores and VMEM_SHARED of a core may occupy
        together.
      smem_words: SMEM of a vector subcore that a kernel can use.
      scalar_smem_words: SMEM of a scalar subcore that a kernel can use.
      hbm_bytes_per_second: bandwidth of the HBM of a device; for the cost report alone.
      branch_delay: bundles behind a branch that it still executes.
      features: the features of the chip.
    """

    name: str
    topology: str
    cores: int
    lanes: int
    vmem_words: int
    pool_words: int
    hbm_bytes_per_second: float
    branch_delay: int
    subcores: int = 16
    smem_words: int = 1920
    scalar_smem_words: int = 16000
    features: frozenset[Feature] = frozenset()

    @property
    def machine(self) -> str:
        """The machine whose planner, launch and rules compile for the target."""
        return "sparsecore"

    @property
    def budgets(self) -> Mapping[str, int]:
        """The limits of one subcore, and of the pool of a core."""
        return {
            "VMEM words": self.vmem_words,
            "VMEM and VMEM_SHARED words of a core": self.pool_words,
            "SMEM words": self.smem_words,
            "SMEM words of a scalar subcore": self.scalar_smem_words,
        }

    @property
    def others(self) -> Iterable[TpuTarget]:
        """All targets of the machine."""
        return TARGETS.values()


V5P = TpuTarget(
    name="v5p",
    topology="v5p:2x2x1",
    cores=4,
    lanes=8,
    vmem_words=131_072,
    pool_words=2_097_152,
    hbm_bytes_per_second=2.46e12,
    branch_delay=2,
)
V6E = TpuTarget(
    name="v6e",
    topology="v6e:2x2",
    cores=2,
    lanes=8,
    vmem_words=65_536,
    pool_words=1_048_576,
    hbm_bytes_per_second=1.64e12,
    branch_delay=2,
    features=frozenset({Feature.ERF}),
)
TPU7X = TpuTarget(
    name="tpu7x",
    topology="tpu7x:2x2x1",
    cores=2,
    lanes=16,
    vmem_words=131_072,
    pool_words=2_097_152,
    hbm_bytes_per_second=7.40e12 / 2,  # two devices a chip
    branch_delay=4,
    features=frozenset(Feature),
)
TARGETS: dict[str, TpuTarget] = {t.name: t for t in (V5P, V6E, TPU7X)}
DEFAULT_TARGET = TPU7X


@expect.arguments()
def target(name: str | TpuTarget) -> TpuTarget:
    """Returns the chip of that name.

    Args:
      name: `v5p`, `v6e`, `tpu7x`, or a `TpuTarget`, which is returned unchanged.

    Raises:
      TargetError: the chip is unknown, or has no SparseCores.
    """
    if isinstance(name, TpuTarget):
        return name
    if isinstance(name, str) and name in TARGETS:
        return TARGETS[name]
    raise errors.TargetError(
        "unknown target",
        expected=" or ".join(TARGETS),
        got=expect.shown(name),
        hint="pass target='tpu7x', 'v6e' or 'v5p', the chips whose SparseCores "
        "libtpu compiles for",
    )
