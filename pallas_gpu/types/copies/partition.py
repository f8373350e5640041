# SPDX-License-Identifier: Apache-2.0
"""How two CTAs share a copy that the barrier of one of them tracks."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pallas_gpu import expect


class CopyPartition:
    """What each CTA of a pair loads by a copy that the leader's barrier tracks.

    The leader is the CTA with index 0 along the axis; `copy_gmem_to_smem` says more.

    Attributes:
      PARTITIONED: `PARTITIONED(axis)`: half of the source, divided along one of its
        dimensions.
      REPLICATED: all of the source; each CTA copies half of it to both.

    Example:
      >>> plgpu.CopyPartition.PARTITIONED(0)
      CopyPartition.PARTITIONED(axis=0)
    """

    PARTITIONED: ClassVar[type[_Partitioned]]
    REPLICATED: ClassVar[_Replicated]


@expect.arguments("CopyPartition.PARTITIONED", axis=expect.integer(0))
@dataclasses.dataclass(frozen=True)
class _Partitioned(CopyPartition):
    """Each CTA loads half of the source.

    Attributes:
      axis: the dimension of the source, of those not indexed by integers.
    """

    axis: int

    def __repr__(self) -> str:
        return f"CopyPartition.PARTITIONED(axis={self.axis})"


@dataclasses.dataclass(frozen=True)
class _Replicated(CopyPartition):
    """Each CTA gets all of the source."""

    def __repr__(self) -> str:
        return "CopyPartition.REPLICATED"


CopyPartition.PARTITIONED = _Partitioned
CopyPartition.REPLICATED = _Replicated()
