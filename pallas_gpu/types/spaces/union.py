# SPDX-License-Identifier: Apache-2.0
"""Unions: scratch arrays that share their memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from pallas_gpu import errors, expect
from pallas_gpu.types.completion import shows
from pallas_gpu.types.mesh import Mesh
from pallas_gpu.types.refs import KernelRef
from pallas_gpu.types.spaces.memory_space import MemorySpace, ScratchType
from pallas_gpu.types.spaces.resource import Declaration, Overlay


@expect.arguments()
@shows("refs", "memory_space")
class RefUnion(Declaration):
    """Declares scratch arrays of which only some are in use at a time.

    The alternatives start at the same address, and the largest one determines the size.
    The reference that a body gets unpacks to them: `a_ref, (b_ref, c_ref) = union_ref`.

    PTX: none; the memory is allocated at compile time. Since: sm_90.

    Issued by the scope that declares it. Whoever uses another alternative than before
    has to order its accesses with the earlier ones, as for accesses to one array:
    between warpgroups by barriers, and before a copy or a product that reads what
    threads have stored by `commit_smem`. An alternative has the bytes that another one
    left there, stored as its transforms say. Under Warpgroup semantics this does not
    hold for an operand of `wgmma` without transforms, whose layout is inferred; other
    members are row-major unless they have transforms.

    Args:
      *refs: the alternatives: declarations of arrays in SMEM, or all in TMEM, or
        pytrees of them, in which further unions may stand for an array. The arrays of
        one alternative lie behind each other.

    Raises:
      ArgumentError: there are no arrays, or they exclude each other.
      ArgumentTypeError: a member is not a declaration of an array.
      MemorySpaceError: the arrays are in different memories, or in GMEM.
      ShapeError: arrays in TMEM of different numbers of rows.

    Example:
      >>> stages = [plgpu.SMEM((64, 64), jnp.float16) for _ in range(4)]
      >>> tiles = plgpu.RefUnion(stages, plgpu.SMEM((64, 128), jnp.float32))
    """

    def __init__(self, *refs: Any):
        self.refs: tuple[Any, ...] = refs
        members = [jax.tree.leaves(tree, is_leaf=lambda x: x is None) for tree in refs]
        for member in itertools.chain(*members):
            _require_array(member)
        if not members or not all(members):
            raise errors.ArgumentError(
                "RefUnion: an alternative without arrays",
                expected="one declaration or more in each alternative",
                got=expect.shown(refs),
                hint="write plgpu.RefUnion(plgpu.SMEM(...), plgpu.SMEM(...))",
            )
        self.memory_space = _memory_space([array for _, array in self._arrays(0)])

    def __repr__(self) -> str:
        return f"RefUnion({', '.join(map(repr, self.refs))})"

    def to_refs(self, number: int) -> list[KernelRef]:
        return [array.to_ref() for _, array in self._arrays(number)]

    def _arrays(self, number: int) -> list[tuple[str, ScratchType]]:
        """Returns the arrays with their places, inner unions' included, by path."""
        found: list[tuple[str, ScratchType]] = []
        for alternative, tree in enumerate(self.refs):
            leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
            for inner, (path, member) in enumerate(leaves):
                name = f"[{alternative}]{jax.tree_util.keystr(path)}"
                arrays = (
                    member._arrays(inner)
                    if isinstance(member, RefUnion)
                    else [("", member)]
                )
                found += [
                    (name + rest, _inside(array, (number, alternative)))
                    for rest, array in arrays
                ]
        return found

    def to_ref(self) -> Any:
        """Refuses: a union is several references."""
        raise errors.ArgumentTypeError(
            "a union of arrays is used where one array is meant",
            expected="one declaration, e.g. plgpu.SMEM(shape, dtype)",
            got=repr(self),
            hint="declare unions in scratch_types and run_scoped",
        )

    def bound(self, refs: Sequence[Any]) -> UnionRef:
        return self._bound(iter(refs))

    def _bound(self, left: Iterator[Any]) -> UnionRef:
        leaves, tree = jax.tree.flatten(self.refs)
        members = [
            member._bound(left) if isinstance(member, RefUnion) else next(left)
            for member in leaves
        ]
        return UnionRef(jax.tree.unflatten(tree, members))

    def paths(self) -> list[str]:
        return [path for path, _ in self._arrays(0)]

    def check_scope(self, mesh: Mesh) -> None:
        for _, array in self._arrays(0):
            array.check_scope(mesh)


def _require_array(member: Any) -> None:
    if not isinstance(member, ScratchType | RefUnion):
        raise errors.ArgumentTypeError(
            "RefUnion: a member is not a declaration of an array",
            expected="plgpu.SMEM(shape, dtype), or pytrees of such declarations",
            got=expect.shown(member),
            hint="barriers and accumulators share nothing",
        )


def _memory_space(members: Sequence[ScratchType]) -> MemorySpace:
    """Returns the memory that all members share."""
    space = members[0].memory_space
    names = sorted({member.memory_space.name for member in members})
    if len(names) > 1 or not space.has_unions:
        known = [f"all in {space.name}" for space in MemorySpace if space.has_unions]
        raise errors.MemorySpaceError(
            "RefUnion: the arrays cannot share their memory",
            expected=f"arrays that are {', or '.join(known)}",
            got=", ".join(names),
            hint="make a union for each memory",
        )
    space.check_union(members)
    return space


def _inside(member: ScratchType, place: tuple[int, int]) -> ScratchType:
    """Returns an array as a member of an alternative of a union around it."""
    inner = member.storage.overlay
    overlay = Overlay((place, *(() if inner is None else inner.path)))
    storage = dataclasses.replace(member.storage, overlay=overlay)
    return dataclasses.replace(member, storage=storage)


@jax.tree_util.register_pytree_node_class
class UnionRef:
    """What a body gets for a union: an immutable sequence of its alternatives."""

    def __init__(self, alternatives: tuple[Any, ...]):
        self._alternatives = alternatives

    def __iter__(self) -> Iterator[Any]:
        return iter(self._alternatives)

    def __len__(self) -> int:
        return len(self._alternatives)

    def __getitem__(self, idx: Any) -> Any:
        number = expect.index(idx)
        if number is not None and -len(self) <= number < len(self):
            return self._alternatives[number]
        raise _not_an_array("read", idx, len(self))

    def __setitem__(self, idx: Any, value: Any) -> None:
        raise _not_an_array("written", idx, len(self))

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """Returns the alternatives."""
        return self._alternatives, None

    @classmethod
    def tree_unflatten(cls, _: None, alternatives: Any) -> UnionRef:
        """Returns a union of other alternatives."""
        return cls(tuple(alternatives))


def _not_an_array(verb: str, idx: Any, count: int) -> errors.ArgumentTypeError:
    return errors.ArgumentTypeError(
        f"a union of references is {verb} as if it were an array",
        expected=f"one of its members: a union unpacks to {count} alternatives",
        got=f"an index expression: {expect.shown(idx)}",
        hint="unpack it, and use a member: a_ref, b_ref = union_ref",
    )
