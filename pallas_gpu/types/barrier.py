# SPDX-License-Identifier: Apache-2.0
"""Barriers: declarations, references, and the SMEM that they occupy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import arch, errors, expect
from pallas_gpu.types.completion import shows
from pallas_gpu.types.mesh import Mesh
from pallas_gpu.types.refs import IndexableRef
from pallas_gpu.types.spaces.resource import Counters, Declaration

# Parities of a declaration are bits of 32-bit registers of each thread, at most 32 of
# them: an index that is known at run time only selects among them all.
PARITIES_PER_WORD = 32
MAX_BARRIERS_PER_ALLOCATION = 32 * PARITIES_PER_WORD
# PTX ISA, "Size and alignment of mbarrier object".
BARRIER_BYTES = 8


class Barriers(Counters):
    """The mbarriers of a block, in SMEM behind the arrays.

    Their phase outlives a scope, so scopes that follow each other do not share them.
    """

    name = "BARRIER"
    unit = "barriers"
    word = "barrier"
    declared_by = "declare it with plgpu.Barrier()"
    accessed_by = "barrier_wait, barrier_arrive or a copy on the barrier"

    def budget(self, target: arch.GpuTarget) -> int:
        return target.smem_bytes_per_block // BARRIER_BYTES


BARRIERS = Barriers()


class BarrierRef(IndexableRef):
    """A reference to one mbarrier or an array of them in SMEM."""

    __slots__ = ()

    @property
    def barrier(self) -> Barrier:
        """The declaration: arrivals, shape, what it orders."""
        return self.details

    def str_short(self, short_dtypes=False, mesh_axis_types=False) -> str:
        return f"Barrier{list(self.shape)}({self.barrier.num_arrivals})"


# PTX ISA, mbarrier: the expected arrival count lies in [1, 2**20 - 1].
MAX_ARRIVALS = 2**20 - 1
# PTX ISA, mbarrier: the tx-count lies in [-(2**20 - 1), 2**20 - 1].
MAX_PENDING_BYTES = 2**20 - 1


@expect.arguments(
    num_arrivals=expect.integer(
        1,
        MAX_ARRIVALS,
        unit="arrivals",
        hint="count one arrival for each warpgroup and each copy of a phase",
    )
)
@shows("shape", "size")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Barrier(Declaration):
    """Declares one mbarrier, or an array of them, in SMEM.

    A phase completes when all arrivals and all bytes announced by TMA copies have
    arrived; then the next phase begins with the same counts.

    PTX: mbarrier. Since: sm_90.

    Attributes:
      num_arrivals: arrivals that complete a phase. One warpgroup's `barrier_arrive`
        counts once; a TMA copy on the barrier counts once and adds its bytes.
      num_barriers: shape of the array, of at most 1024 barriers; `()` is a single
        barrier, used without index. Each 32 of them take a register of every thread.
      orders_tensor_core: whether arrivals and waits order tcgen05 operations, too:
        those before an arrival happen before those after the wait. Needs sm_100a.
      initially_complete: the first wait of each warpgroup returns at once, the second
        one waits for the first phase. So a producer that waits for a free buffer need
        not treat the first round apart.

    Raises:
      ArgumentError, ArgumentTypeError: counts out of range, or not integers.
    """

    num_arrivals: int = 1
    num_barriers: int | Sequence[int] = ()
    orders_tensor_core: bool = False
    initially_complete: bool = False

    memory_space = BARRIERS

    def __post_init__(self):
        shape = self.shape
        if any(n < 1 for n in shape) or math.prod(shape) > MAX_BARRIERS_PER_ALLOCATION:
            raise errors.ArgumentError(
                "Barrier: num_barriers is out of range",
                expected=f"1 to {MAX_BARRIERS_PER_ALLOCATION} in one declaration",
                got=shape,
                hint="declare several barrier arrays",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of barriers."""
        return self.num_barriers  # type: ignore[return-value]

    @property
    def size(self) -> int:
        """Number of barriers."""
        return math.prod(self.shape)

    def parity_keys(self, slot: int) -> tuple[int, ...]:
        """Returns the index of the first barrier of each word of parities.

        Args:
          slot: index of the first barrier of the declaration in the block.
        """
        return tuple(range(slot, slot + self.size, PARITIES_PER_WORD))

    def phase_arrivals(self, mesh: Mesh) -> int:
        """Returns the arrivals that complete a phase in a kernel with this mesh."""
        return self.num_arrivals

    def to_ref(self) -> BarrierRef:
        # An mbarrier is an opaque 64-bit word; the element type is never read, and
        # uint32 is the widest unsigned type that JAX has without x64.
        aval = jax.core.ShapedArray(self.shape, jnp.uint32)
        return BarrierRef(aval, BARRIERS, details=self)


def _axes_and_groups(value: Any, what: str) -> tuple[Any, ...]:
    """Accepts names of axes, and groups of names."""
    entries = (value,) if isinstance(value, str) else value
    if not expect.is_sequence(entries):
        entries = (value,)
    return tuple(
        entry if isinstance(entry, str) else expect.names(entry, what)
        for entry in entries
    )


@expect.arguments(collective_axes=_axes_and_groups)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterBarrier(Barrier):
    """Declares barriers whose arrivals reach every CTA along cluster axes.

    `barrier_arrive` on it arrives once in each CTA that differs from its own along one
    of `collective_axes` only, and in its own, at the same barrier of the declaration;
    so a phase completes after `num_arrivals` arrivals from each of these CTAs.
    `barrier_wait` waits on the CTA's own barrier. In a 2 x 2 cluster `("x", "y")` are
    the CTAs in the same row or column, 3 of them; `(("x", "y"),)` are all 4.

    PTX: mbarrier.arrive.release.cluster.shared::cluster with mapa. Since: sm_90.

    Attributes:
      num_arrivals, num_barriers, orders_tensor_core, initially_complete: as of
        `Barrier`.
      collective_axes: names of cluster axes, or tuples of them: several axes that
        count as one. `(("x", "y"),)` is a meeting of all CTAs along both. With
        `("x", "y")` a CTA hears from its row and its column alone: a neighbour can be
        a phase ahead of CTAs that it does not hear from. `()` is the CTA alone.
      leader_tracked: whether `barrier_arrive` arrives in the leader alone, the CTA with
        index 0 along the axis: only there phases complete, after `num_arrivals`
        arrivals from each CTA along the axis. Needs a single axis, not in a group.

    Raises:
      ArgumentError: counts out of range, or one axis twice.
      UnsupportedError: leader_tracked without a single axis, or with a group.
    """

    collective_axes: str | Sequence[str | Sequence[str]] = ()
    leader_tracked: bool = False

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The axes that count as one, for each entry of `collective_axes`."""
        entries = self.collective_axes  # a tuple, after the checks of its rule
        groups = tuple((x,) if isinstance(x, str) else tuple(x) for x in entries)
        # Along no axes is the CTA itself.
        return groups or ((),)

    def phase_arrivals(self, mesh: Mesh) -> int:
        """Returns the arrivals of all CTAs that complete a phase."""
        sizes = dict(zip(mesh.cluster_names, mesh.cluster, strict=True))
        others = [math.prod(sizes[a] for a in group) - 1 for group in self.groups]
        return self.num_arrivals * (1 + sum(others))

    def __post_init__(self):
        super().__post_init__()
        axes = [axis for group in self.groups for axis in group]
        if len(set(axes)) != len(axes):
            raise errors.ArgumentError(
                "ClusterBarrier: collective_axes names an axis twice",
                expected="different cluster axes",
                got=self.collective_axes,
                hint="name each axis once",
            )
        entries = tuple(self.collective_axes)
        if self.leader_tracked and (len(entries) != 1 or isinstance(entries[0], tuple)):
            raise errors.UnsupportedError(
                "ClusterBarrier: leader_tracked without one axis is not supported",
                expected="one cluster axis, not in a group",
                got=self.collective_axes,
                hint="name one axis: its CTAs share the leader with index 0 along it",
            )

    def check_scope(self, mesh: Mesh) -> None:
        """Raises AxisNameError unless the kernel's cluster has the axes."""
        named = [axis for group in self.groups for axis in group]
        unknown = [axis for axis in named if axis not in mesh.cluster_names]
        if unknown:
            raise errors.AxisNameError(
                f"ClusterBarrier: no cluster axis is named {unknown[0]!r}",
                expected=f"one of {tuple(mesh.cluster_names)}"
                if mesh.cluster_names
                else "a kernel with cluster=(...) and cluster_names=(...)",
                got=self.collective_axes,
                hint="collective_axes names axes of the kernel's cluster",
            )
        arrivals = self.phase_arrivals(mesh)
        if arrivals > MAX_ARRIVALS:
            raise errors.ArgumentError(
                "ClusterBarrier: a phase has too many arrivals",
                expected=f"at most {MAX_ARRIVALS} of all CTAs together",
                got=f"{arrivals}: num_arrivals={self.num_arrivals} from each of "
                f"{arrivals // self.num_arrivals} CTAs",
                hint="count one arrival for each warpgroup and each copy of a phase",
            )
