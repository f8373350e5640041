# SPDX-License-Identifier: Apache-2.0
"""Scratch of a Mosaic-level kernel, declared as upstream does, on our declarations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import ShapeDtypeStruct as ShapeDtypeStruct
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, nvvm

from pallas_gpu import errors, expect, types
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.module import WARP_THREADS
from pallas_gpu.emitters.smem import add_index
from pallas_gpu.mosaic.scalars import barrier_index, i32_value

# The hardware's barriers; 0 is that of the block, the next ones are the warpgroups'.
_NAMED_BARRIERS = 16


def _require(holds: bool, what: str, expected: str, got: Any) -> None:
    if not holds:
        raise errors.ArgumentError(what, expected=expected, got=got)


@dataclasses.dataclass(frozen=True)
class Union:
    """Pytrees of scratch whose arrays in SMEM share memory; other scratch does not.

    A body gets a `Union` of its references.
    """

    members: Sequence[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.members)


jax.tree_util.register_pytree_node(
    Union, lambda x: (tuple(x.members), None), lambda _, members: Union(members)
)


@dataclasses.dataclass(frozen=True)
class TMABarrier:
    """Barriers for copies: an arrival and the bytes it announces complete a phase."""

    num_barriers: int = 1


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class Barrier:
    """Barriers in SMEM: `arrival_count` arrivals complete a phase.

    `orders_tensor_core` is accepted for upstream's sake: arrivals and waits say so.
    """

    arrival_count: int
    num_barriers: int = 1
    orders_tensor_core: bool = False

    def __post_init__(self) -> None:
        _require(self.arrival_count >= 1, "Barrier: arrival_count is out of range",
                 "1 or more arrivals", self.arrival_count)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ClusterBarrier:
    """Barriers on which blocks of a cluster arrive, at each other's.

    Attributes:
      collective_dims: dimensions of the cluster, or groups of them that count as one:
        a phase completes after `arrival_count` arrivals of each block that differs
        along one of them only.
      arrival_count, num_barriers, orders_tensor_core: as of `Barrier`.
      leader_tracked: whether all arrive at the first block alone.
    """

    collective_dims: Sequence[gpu.Dimension | Sequence[gpu.Dimension]]
    arrival_count: int = 1
    num_barriers: int = 1
    _: dataclasses.KW_ONLY
    orders_tensor_core: bool = False
    leader_tracked: bool = False


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class CtaBarrier:
    """Hardware barriers of the block, at most 15 with those of its warpgroups.

    PTX: `barrier`. `arrival_count`, a multiple of 32, threads complete a phase.
    """

    arrival_count: int
    num_barriers: int = 1

    def __post_init__(self) -> None:
        threads = self.arrival_count
        _require(threads >= 1 and threads % WARP_THREADS == 0,
                 "CtaBarrier: arrival_count does not count whole warps",
                 f"a multiple of {WARP_THREADS}", threads)  # fmt: skip
        _require(self.num_barriers >= 1, "CtaBarrier: num_barriers is out of range",
                 "1 or more barriers", self.num_barriers)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CtaBarrierRef:
    """What a body gets for a `CtaBarrier`; `first` is the number of the first one."""

    first: int | ir.Value
    arrival_count: int
    num_barriers: int = 1

    def __getitem__(self, offset: int | ir.Value) -> CtaBarrierRef:
        offset = barrier_index(offset, self.num_barriers)
        return CtaBarrierRef(add_index(self.first, offset), self.arrival_count)

    def get_barrier_id(self) -> ir.Value:
        """Returns the number of the one barrier, i32."""
        _require(self.num_barriers == 1, "An operation on several hardware barriers",
                 "one of them: barrier[i]", self.num_barriers)  # fmt: skip
        return i32_value(self.first)

    def arrive(self, *, predicate: ir.Value | None = None) -> None:
        """Arrives and goes on. PTX: `barrier.arrive`; all threads of a warp do so."""
        with predicated(predicate):
            nvvm.barrier_arrive(
                number_of_threads=i32_value(self.arrival_count),
                barrier_id=self.get_barrier_id(),
            )

    def arrive_and_wait(self) -> None:
        """Arrives and waits for the others. PTX: `barrier.sync`."""
        nvvm.barrier(
            barrier_id=self.get_barrier_id(),
            number_of_threads=i32_value(self.arrival_count),
        )


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class TMEM:
    """An array of rows and columns in tensor memory.

    Attributes:
      layout: a TMEM layout; None: that of an accumulator or an operand.
      collective: whether a pair of blocks allocates it.
      packing: elements that share a column of 32 bits, instead of `layout`; None is 1.
    """

    shape: tuple[int, int]
    dtype: Any
    _: dataclasses.KW_ONLY
    layout: Any = None
    collective: bool = False
    packing: int | None = None

    def __post_init__(self) -> None:
        both = self.layout is not None and self.packing is not None
        _require(not both, "TMEM: layout and packing exclude each other",
                 "one of them", f"{self.layout}, {self.packing}")  # fmt: skip


# --- on our declarations --------------------------------------------------------------


def cluster_axes(dims: Any) -> tuple[Any, ...]:
    """Returns the names of a `CudaMesh` for dimensions of the cluster, or groups."""
    each = (dims,) if isinstance(dims, gpu.Dimension) else dims
    return tuple(
        f"cluster_{d.name}" if isinstance(d, gpu.Dimension) else cluster_axes(d)
        for d in each
    )


def declaration(leaf: Any) -> Any:
    """Returns our declaration of a leaf; None if it takes no memory.

    Raises:
      ArgumentTypeError: the leaf is not scratch.
    """
    match leaf:
        case TMABarrier():
            return types.Barrier(num_barriers=leaf.num_barriers)
        case Barrier():
            return types.Barrier(
                num_arrivals=leaf.arrival_count, num_barriers=leaf.num_barriers
            )
        case ClusterBarrier():
            return types.ClusterBarrier(
                collective_axes=cluster_axes(leaf.collective_dims),
                num_arrivals=leaf.arrival_count,
                num_barriers=leaf.num_barriers,
                leader_tracked=leaf.leader_tracked,
            )
        case CtaBarrier():
            return None
        case TMEM():
            packed = None if leaf.layout is not None else (leaf.packing or 1) > 1
            return types.TMEM(
                leaf.shape, leaf.dtype, packed=packed, collective=leaf.collective,
                layout=leaf.layout,
            )  # fmt: skip
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return types.SMEM(tuple(leaf.shape), leaf.dtype)
    raise errors.ArgumentTypeError(
        "as_gpu_kernel: smem_scratch_shape has a leaf that is not scratch",
        expected="jax.ShapeDtypeStruct, Union, Barrier, ClusterBarrier, TMABarrier, "
        "CtaBarrier or TMEM",
        got=repr(leaf),
    )


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The scratch of a kernel: leaves as declared, in unions as well, and their tree.

    `declared` are our declarations, and `places` in their form the leaf of each.
    """

    leaves: tuple[Any, ...]
    tree: Any
    declared: tuple[Any, ...]
    places: tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any) -> Scratch:
        """Returns the scratch of a declaration."""
        leaves, structure = jax.tree.flatten(tree)
        arrays, others = _declared(tree, itertools.count())
        pairs = [*arrays, *others]
        return cls(
            tuple(leaves), structure, tuple(x for x, _ in pairs),
            tuple(place for _, place in pairs),
        )  # fmt: skip

    def in_order(self, refs: Sequence[Any]) -> list[Any]:
        """Returns the references of a scope by the leaves' numbers; None without."""
        found: list[Any] = [None] * len(self.leaves)
        _put(found, self.places, refs)
        return found


def _put(found: list[Any], places: Any, refs: Any) -> None:
    for place, ref in zip(places, refs, strict=True):
        if isinstance(place, int):
            found[place] = ref
        else:
            _put(found, place, ref)


type _Declared = list[tuple[Any, Any]]


def _declared(tree: Any, numbers: Iterator[int]) -> tuple[_Declared, _Declared]:
    """Declarations with places: arrays in SMEM, which may be in a union; others."""
    arrays: _Declared = []
    others: _Declared = []
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Union)):
        if not isinstance(leaf, Union):
            found, number = declaration(leaf), next(numbers)
            is_array = getattr(found, "memory_space", None) is types.SMEM
            if found is not None:
                (arrays if is_array else others).append((found, number))
            continue
        parts = [_declared(member, numbers) for member in leaf.members]
        others += [x for _, part in parts for x in part]
        members = [part for part, _ in parts if part]
        if members:
            shared = types.RefUnion(*([x for x, _ in part] for part in members))
            arrays.append((shared, [[place for _, place in p] for p in members]))
    return arrays, others


def named_barriers(leaves: Sequence[Any], warpgroups: int) -> list[int | None]:
    """Returns for each leaf its first hardware barrier; None for other scratch.

    Raises:
      ArgumentError: there are not that many.
    """
    # A block's own barrier, and one for each warpgroup.
    number = 1 + warpgroups
    found: list[int | None] = []
    for leaf in leaves:
        is_named = isinstance(leaf, CtaBarrier)
        found.append(number if is_named else None)
        number += leaf.num_barriers if is_named else 0
    if number > _NAMED_BARRIERS:
        raise errors.ArgumentError(
            "The block has too many hardware barriers",
            expected=f"at most {_NAMED_BARRIERS}",
            got=f"{number}: one of the block, {warpgroups} of its warpgroups, and "
            "those of CtaBarrier",
        )
    return found
