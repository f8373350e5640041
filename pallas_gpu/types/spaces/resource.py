# SPDX-License-Identifier: Apache-2.0
"""What every resource of a kernel says of itself, memory space or barriers."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from pallas_gpu import errors
from pallas_gpu.types.mesh import Mesh
from pallas_gpu.types.transforms import Transform


@dataclasses.dataclass(frozen=True)
class Overlay:
    """That an array is a member of a union, whose alternatives start at one address.

    Attributes:
      path: the number of a union and of one of its alternatives, for each union around
        the array, the outermost first. Unions are numbered in a scope, and inner ones
        in the alternative that they belong to.
    """

    path: tuple[tuple[int, int], ...]

    @property
    def union(self) -> int:
        """The number of the outermost union in its scope."""
        return self.path[0][0]


@dataclasses.dataclass(frozen=True)
class Storage:
    """How an array is stored; row-major unless a space's own storage says otherwise.

    Attributes:
      transforms: from the logical shape to the stored form.
      internal: whether an operation declares it, not the author, who cannot follow the
        advice of a warning about its accesses.
      overlay: its place in a union, if it is a member of one.
    """

    transforms: tuple[Transform, ...] = ()
    internal: bool = False
    overlay: Overlay | None = None

    def __str__(self) -> str:
        return ", ".join(transform.describe() for transform in self.transforms)


ROW_MAJOR = Storage()


class Sharing(enum.Enum):
    """Who shares an array in GMEM that a launch allocates.

    * `LAUNCH`: all CTAs, those of all instances of `jax.vmap` included.
    * `INSTANCE`: the CTAs of one instance of `jax.vmap`.
    * `CTA`: nobody, each CTA has its own.
    """

    LAUNCH = "launch"
    INSTANCE = "instance"
    CTA = "cta"


@dataclasses.dataclass(frozen=True)
class GmemArray:
    """An array in GMEM that a launch allocates.

    Attributes:
      initial: what all elements are when the launch starts; None: undefined.
      sharing: how many of them there are.
      kept: it may also hold what the last launch of the kernel has left.
    """

    shape: tuple[int, ...]
    dtype: Any
    initial: Any
    sharing: Sharing
    kept: bool = False


class Resource:
    """What a declaration occupies; each kind is one object, compared by identity.

    Attributes:
      name: the public name, e.g. `SMEM`.
      unit: what sizes and offsets count.
      alignment: what offsets are multiples of, in units.
      per_warpgroup: each warpgroup has its own; otherwise the block shares one.
      feature: what a target needs to have it; None for all targets.
      has_addresses: whether threads may access any element of it by its address.
      by_element: what to do instead, where they may not.
      has_unions: whether arrays in it may share their memory.
      access_rank: the dimensions of an array that one operation accesses; None for any.
      declared_by: how a kernel gets a reference to it, for hints.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    alignment: ClassVar[int] = 1
    per_warpgroup: ClassVar[bool] = False
    feature: ClassVar[Any] = None
    has_addresses: ClassVar[bool] = False
    by_element: ClassVar[str] = "read it, and change the value; or go through SMEM"
    has_unions: ClassVar[bool] = False
    access_rank: ClassVar[int | None] = None
    declared_by: ClassVar[str]

    def __str__(self) -> str:
        return self.name.lower()

    def size(self, aval: Any) -> int:
        """Returns how many units an abstract reference occupies, without padding."""
        raise NotImplementedError

    def budget(self, target: Any) -> int:
        """Returns how many units a target has for what shares this resource.

        Args:
          target: of the machine that has the resource.
        """
        raise NotImplementedError

    def gmem_array(self, aval: Any) -> GmemArray | None:
        """Returns the array in GMEM that the launch allocates for it, if any."""
        return None

    def describe(self, aval: Any, shape: Sequence[int]) -> str:
        """Returns a description for error messages.

        Args:
          aval: abstract reference in this resource.
          shape: of the reference, or of a part of it.
        """
        return f"{self.name} {jnp.dtype(aval.dtype).name}{list(shape)}"

    def check_access(self, aval: Any, shape: Sequence[int]) -> None:
        """Raises unless threads may read and write it with an index expression.

        Args:
          aval: abstract reference in this resource.
          shape: of the part that is accessed.
        """

    def check_beside(self, aval: Any, earlier: Sequence[Any]) -> None:
        """Raises unless one kernel may declare it along with the earlier ones.

        Args:
          aval: abstract reference in this resource.
          earlier: abstract references in this resource.
        """


class Counters(Resource):
    """What only operations of its own access, such as barriers.

    Attributes:
      word: what one of them is called.
      accessed_by: those operations.
    """

    word: ClassVar[str]
    accessed_by: ClassVar[str]

    def size(self, aval: Any) -> int:
        return math.prod(aval.shape)

    def describe(self, aval: Any, shape: Sequence[int]) -> str:
        return f"a {self.word} of shape {tuple(shape)}"

    def check_access(self, aval: Any, shape: Sequence[int]) -> None:
        raise errors.MemorySpaceError(
            f"a {self.word} is read or written like an array",
            expected=self.accessed_by,
            got=f"an index expression on a {self.word}",
            hint=f"index an array of {self.word}s with {self.word}.at[i]",
        )


class Declaration:
    """What `scratch_types` and `run_scoped` accept.

    Attributes:
      memory_space: what it occupies.
    """

    memory_space: Resource

    def to_ref(self) -> Any:
        """Returns a fresh abstract reference of this declaration."""
        raise NotImplementedError

    def to_refs(self, number: int) -> list[Any]:
        """Returns the references that it declares, as the `number`-th in its scope."""
        return [self.to_ref()]

    def paths(self) -> list[str]:
        """Returns how a body writes each of them, without the declaration's name."""
        return [""]

    def bound(self, refs: Sequence[Any]) -> Any:
        """Returns what a body gets for these references."""
        (ref,) = refs
        return ref

    def get_ref_aval(self) -> Any:
        """`to_ref` under the name by which JAX's own Pallas calls it."""
        return self.to_ref()

    def check_scope(self, mesh: Mesh) -> None:
        """Raises unless a scope of a kernel with this mesh may declare it."""
