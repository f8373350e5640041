# SPDX-License-Identifier: Apache-2.0
"""The number of CTAs of a launch that are resident on a device at once."""

from __future__ import annotations

import dataclasses

from pallas_gpu.arch.nvidia import GpuTarget

# CUDA programming guide, "Technical Specifications per Compute Capability": the SMEM
# that the system reserves in each block.
_RESERVED_SMEM_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Residency:
    """The resident CTAs of one launch on a device.

    Registers are not counted: only ptxas determines how many a thread has. So this is
    an upper bound where more than one CTA fits on an SM.

    Attributes:
      target: the device's target.
      ctas_per_sm: number of CTAs that fit on one SM.
      ctas_per_cluster: size of a cluster, whose CTAs start together.
    """

    target: GpuTarget
    ctas_per_sm: int
    ctas_per_cluster: int

    @classmethod
    def of(
        cls,
        target: GpuTarget,
        smem_bytes: int,
        threads_per_block: int,
        ctas_per_cluster: int,
    ) -> Residency:
        """Returns the residency of blocks that need SMEM and threads.

        Args:
          target: the device's target.
          smem_bytes: dynamic SMEM of one block.
          threads_per_block: CUDA threads of one block.
          ctas_per_cluster: size of a cluster; 1 without clusters.
        """
        by_smem = target.smem_bytes_per_sm // (smem_bytes + _RESERVED_SMEM_BYTES)
        by_threads = target.max_threads_per_sm // threads_per_block
        fit = min(by_smem, by_threads, target.max_blocks_per_sm)
        return cls(target, fit, ctas_per_cluster)

    @property
    def ctas(self) -> int:
        """Number of CTAs that are resident at once, not regarding clusters."""
        return self.target.sm_count * self.ctas_per_sm

    @property
    def clusters(self) -> int:
        """Number of clusters that are resident at once.

        A cluster runs in one GPC that has as many SMs as it has CTAs, or more; several
        of its CTAs may then share an SM.
        """
        size = self.ctas_per_cluster
        fitting = [sms for sms in self.target.gpc_sms if sms >= size]
        return sum(sms * self.ctas_per_sm // size for sms in fitting)

    def __str__(self) -> str:
        text = f"{self.target.sm_count} SMs of {self.target.name}, {self.ctas_per_sm} "
        text += "CTA each" if self.ctas_per_sm == 1 else "CTAs each"
        if self.ctas_per_cluster > 1:
            text += f", {self.ctas_per_cluster} CTAs per cluster"
        return text
