# SPDX-License-Identifier: Apache-2.0
"""The memories of a SparseCore, and the declarations of scratch in them.

Sizes are in words of 32 bits, the unit of the hardware's budgets.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect
from pallas_gpu.arch import tpu
from pallas_gpu.sparsecore.types.meshes import MACHINE
from pallas_gpu.sparsecore.types.refs import SparseCoreRef, TiledStorage, TilingName
from pallas_gpu.types import values
from pallas_gpu.types.refs import IndexableRef
from pallas_gpu.types.spaces.resource import ROW_MAJOR, Counters, Declaration, Resource

WORD_BYTES = 4
# The element types that a memory holds; bools have no form in memory.
_ELEMENT_BYTES = (1, 2, 4)


class Space(Resource):
    """A memory of a SparseCore. `VMEM(shape, dtype)` declares an array in it.

    Attributes:
      on_scalar, on_vector: whether a scalar and a vector subcore may name it.
      shared: whether all subcores of a core have the same one.
      vectors: whether a subcore loads and stores vectors there.
    """

    unit = "words"
    by_element = "plsc.load_gather and plsc.store_scatter access single elements"
    on_scalar: ClassVar[bool] = True
    on_vector: ClassVar[bool] = True
    shared: ClassVar[bool] = False
    vectors: ClassVar[bool] = False
    copy_first: ClassVar[str] = ""

    @expect.arguments(
        lambda self, *_, **__: self.name,
        shape=expect.integers(1, hint="sizes are known when the kernel is traced"),
        dtype=values.element_type,
    )
    def __call__(
        self, shape: Sequence[int], dtype: Any, *, tiling: TilingName | None = None
    ) -> Scratch:
        """Declares a scratch array.

        Args:
          shape: positive static sizes.
          dtype: an element type of 8, 16 or 32 bits.
          tiling: of VMEM and VMEM_SHARED: `"sparsecore"` in a kernel whose tiling is
            compact; None: that of `CompilerParams`.

        Raises:
          DTypeError: bools, and elements of another width.
          ArgumentError, ArgumentTypeError: a size that is not a positive integer,
            another tiling.
          LayoutError: a tiling of SMEM.
        """
        return Scratch(self, tuple(shape), jnp.dtype(dtype), tiling)

    def size(self, aval: Any) -> int:
        return -(-math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize // WORD_BYTES)

    def check_access(self, aval: Any, shape: Sequence[int]) -> None:
        if self.copy_first:
            raise errors.MemorySpaceError(
                f"an array in {self.name} is read or written by a subcore",
                expected="an array in VMEM, or a scalar of SMEM",
                got=self.describe(aval, shape),
                hint=self.copy_first,
            )
        if self.vectors and math.prod(shape) == 1:
            raise errors.MemorySpaceError(
                f"a scalar is read from {self.name} or written to it",
                expected="a vector, of the shape of a register",
                got=self.describe(aval, shape),
                hint="load the vector and take an element of it, or keep scalars in "
                "SMEM; plsc.load_gather loads single elements",
            )
        if not self.vectors and shape:
            raise errors.ShapeError(
                f"a vector is read from {self.name} or written to it",
                expected="one element: an index for each dimension",
                got=self.describe(aval, shape),
                hint=f"{self.name} holds scalars; vectors are in VMEM",
            )

    def __reduce__(self) -> Any:
        return _space, (self.name,)


class Hbm(Space):
    """HBM: the arguments and results of a kernel."""

    name = "HBM"
    shared = True
    declared_by = "pass an argument or a result"
    copy_first = "copy it to VMEM: plsc.sync_copy(x_ref.at[...], x_vmem)"

    def budget(self, target: Any) -> int:
        raise errors.InternalError("HBM has no budget in a kernel")


class Vmem(Space):
    """VMEM: the memory of one vector subcore."""

    name = "VMEM"
    on_scalar = False
    vectors = True
    declared_by = "declare plsc.VMEM(shape, dtype)"

    def budget(self, target: tpu.TpuTarget) -> int:
        return target.vmem_words


class VmemShared(Space):
    """VMEM_SHARED: memory that all subcores of a core share."""

    name = "VMEM_SHARED"
    shared = True
    declared_by = "declare plsc.VMEM_SHARED(shape, dtype)"
    copy_first = "copy the part to VMEM: plsc.sync_copy(x_shared.at[...], x_vmem)"

    def budget(self, target: tpu.TpuTarget) -> int:
        return target.pool_words


class Smem(Space):
    """SMEM: scalars of one subcore."""

    name = "SMEM"
    declared_by = "declare plsc.SMEM(shape, dtype)"

    def budget(self, target: tpu.TpuTarget) -> int:
        return target.smem_words


HBM, VMEM, VMEM_SHARED, SMEM = Hbm(), Vmem(), VmemShared(), Smem()
SPACES: dict[str, Space] = {s.name: s for s in (HBM, VMEM, VMEM_SHARED, SMEM)}


def _space(name: str) -> Space:
    return SPACES[name]


@dataclasses.dataclass(frozen=True)
class Scratch(Declaration):
    """A declaration of a scratch array.

    Attributes:
      memory_space: where it lives.
      shape: positive static sizes.
      dtype: element type.
      tiling: its own; None for that of the kernel.

    Raises:
      DTypeError: elements that the memory does not hold.
      LayoutError: a tiling of SMEM.
    """

    memory_space: Space
    shape: tuple[int, ...]
    dtype: Any
    tiling: str | None = None

    def __post_init__(self) -> None:
        require_stored(self.dtype, f"{self.memory_space.name}: dtype")
        if self.tiling and self.memory_space not in (VMEM, VMEM_SHARED):
            raise errors.LayoutError(
                f"{self.memory_space.name} with a tiling",
                expected="a tiling of VMEM or VMEM_SHARED",
                got=f"tiling={self.tiling!r}",
                hint="omit tiling: scalars lie one after the other",
            )

    def to_ref(self) -> SparseCoreRef:
        aval = jax.core.ShapedArray(self.shape, self.dtype)
        own = TiledStorage(tiling=self.tiling) if self.tiling else ROW_MAJOR
        return SparseCoreRef(aval, self.memory_space, details=own)

    def check_scope(self, mesh: Any) -> None:
        if mesh.machine != MACHINE:
            raise errors.MemorySpaceError(
                f"{self.memory_space.name} of SparseCores in a kernel of a GPU",
                expected="plgpu.SMEM(shape, dtype)",
                got=f"plsc.{self.memory_space.name}",
                hint="pass a mesh of subcores to plsc.kernel for a TPU",
            )


def register_elements(dtype: Any, lanes: int) -> int:
    """Returns how many elements of a type a register has; of bools, those of words."""
    dtype = jnp.dtype(dtype)
    return lanes * WORD_BYTES // (WORD_BYTES if dtype == jnp.bool_ else dtype.itemsize)


def require_stored(dtype: Any, what: str) -> None:
    """Raises DTypeError unless the memories of a SparseCore hold such elements."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_ or dtype.itemsize not in _ELEMENT_BYTES:
        raise errors.DTypeError(
            f"{what} has no form in the memories of a SparseCore",
            expected="integers and floats of 8, 16 or 32 bits",
            got=dtype.name,
            hint="store a mask as int32: jnp.where(mask, 1, 0)"
            if dtype == jnp.bool_
            else "convert it to 32 bits",
        )


# --- semaphores -----------------------------------------------------------------------


class Semaphores(Counters):
    """The semaphores of a subcore."""

    name = "SEMAPHORE"
    unit = "semaphores"
    word = "semaphore"
    declared_by = "declare it with plsc.SemaphoreType.DMA or REGULAR"
    accessed_by = "copies, semaphore_signal, semaphore_wait or semaphore_read"


SEMAPHORES = Semaphores()


class SemaphoreRef(IndexableRef):
    """A reference to one semaphore or an array of them."""

    __slots__ = ()

    @property
    def type(self) -> SemaphoreType:
        """What they count."""
        return self.details

    def str_short(self, short_dtypes=False, mesh_axis_types=False) -> str:
        return f"Semaphore<{self.details.value}>{list(self.shape)}"


class _OfASubcore(Declaration):
    memory_space = SEMAPHORES


@dataclasses.dataclass(frozen=True)
class Semaphore(_OfASubcore):
    """Declares one semaphore or an array of them: what a `SemaphoreType` returns.

    Attributes:
      type: what counts: copies, or signals.
      shape: of the array; `()` is a single semaphore.
    """

    type: SemaphoreType
    shape: tuple[int, ...] = ()

    def to_ref(self) -> SemaphoreRef:
        aval = jax.core.ShapedArray(self.shape, jnp.int32)
        return SemaphoreRef(aval, SEMAPHORES, details=self.type)


class SemaphoreType(_OfASubcore, enum.Enum):
    """The types of semaphores: counters that are zero at first and at the end.

    A member declares one semaphore; called with a shape it declares an array of them.

    * `DMA`: counts what copies have moved; `wait` of a copy subtracts it.
    * `REGULAR`: counts signals, also those of other subcores.

      >>> arrived = plsc.SemaphoreType.DMA((2,))
    """

    DMA = "dma"
    REGULAR = "regular"

    @expect.arguments(
        lambda self, *_, **__: f"SemaphoreType.{self.name}",
        shape=expect.integers(1, hint="a semaphore array has one element or more"),
    )
    def __call__(self, shape: int | Sequence[int] = ()) -> Semaphore:
        """Declares an array of semaphores.

        Args:
          shape: positive static sizes; `()` is a single semaphore.

        Raises:
          ArgumentError, ArgumentTypeError: sizes that are not positive integers.
        """
        return Semaphore(self, tuple(shape))  # type: ignore[arg-type]

    def to_ref(self) -> SemaphoreRef:
        return Semaphore(self).to_ref()
