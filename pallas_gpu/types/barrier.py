# SPDX-License-Identifier: Apache-2.0
"""Declarations of barriers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pallas_gpu import _jax, errors
from pallas_gpu.types import refs

# Parities of one allocation are bits of one 32-bit register of each warpgroup.
MAX_BARRIERS_PER_ALLOCATION = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Barrier:
    """Declares one mbarrier, or an array of them, in SMEM.

    A phase completes when all arrivals and all bytes announced by TMA copies have
    arrived; then the next phase begins with the same counts.

    PTX: mbarrier. Since: sm_90.

    Attributes:
      num_arrivals: arrivals that complete a phase. One warpgroup's `barrier_arrive`
        counts once; a TMA copy on the barrier counts once and adds its bytes.
      num_barriers: shape of the array; `()` is a single barrier, used without index.
      orders_tensor_core: the barrier is arrived on by tcgen05 (Blackwell).

    Raises:
      ArgumentError: counts out of range.
    """

    num_arrivals: int = 1
    num_barriers: int | Sequence[int] = ()
    orders_tensor_core: bool = False

    def __post_init__(self):
        shape = self.num_barriers
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        object.__setattr__(self, "num_barriers", shape)
        # PTX ISA, mbarrier: the expected arrival count lies in [1, 2**20 - 1].
        if not 1 <= self.num_arrivals < 2**20:
            raise errors.ArgumentError(
                "Barrier: num_arrivals is out of range",
                expected="1 to 1048575 arrivals",
                got=self.num_arrivals,
                hint="count one arrival for each warpgroup and each copy of a phase",
                where=_jax.where_now(),
            )
        if any(n < 1 for n in shape) or math.prod(shape) > MAX_BARRIERS_PER_ALLOCATION:
            raise errors.ArgumentError(
                "Barrier: num_barriers is out of range",
                expected=f"1 to {MAX_BARRIERS_PER_ALLOCATION} in one declaration",
                got=shape,
                hint="declare several barrier arrays",
                where=_jax.where_now(),
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of barriers."""
        return self.num_barriers  # type: ignore[return-value]

    @property
    def size(self) -> int:
        """Number of barriers."""
        return math.prod(self.shape)

    def to_ref(self) -> refs.BarrierRef:
        """Returns a fresh abstract reference of this declaration."""
        return refs.BarrierRef(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterBarrier(Barrier):
    """Declares barriers whose arrivals reach every CTA along cluster axes.

    `barrier_arrive` on it arrives once in each CTA along `collective_axes`, at the same
    barrier of the declaration; so a phase completes after `num_arrivals` arrivals from
    each of these CTAs. `barrier_wait` waits on the CTA's own barrier.

    PTX: mbarrier.arrive.release.cluster.shared::cluster with mapa. Since: sm_90.

    Attributes:
      collective_axes: names of cluster axes.
      leader_tracked: not supported yet.

    Raises:
      ArgumentError: counts out of range, no axis, or one axis twice.
      UnsupportedError: leader_tracked.
    """

    collective_axes: str | Sequence[str] = ()
    leader_tracked: bool = False

    def __post_init__(self):
        super().__post_init__()
        axes = self.collective_axes
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        object.__setattr__(self, "collective_axes", axes)
        if not axes:
            raise errors.ArgumentError(
                "ClusterBarrier: there is no cluster axis",
                expected="collective_axes with one name or several",
                got=axes,
                hint="use plgpu.Barrier for a barrier of one CTA",
                where=_jax.where_now(),
            )
        if len(set(axes)) != len(axes):
            raise errors.ArgumentError(
                "ClusterBarrier: collective_axes names an axis twice",
                expected="different cluster axes",
                got=axes,
                hint="name each axis once",
                where=_jax.where_now(),
            )
        if self.leader_tracked:
            raise errors.UnsupportedError(
                "ClusterBarrier: leader_tracked is not supported yet",
                hint="leave it out",
                where=_jax.where_now(),
            )
