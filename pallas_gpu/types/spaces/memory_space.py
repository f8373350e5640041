# SPDX-License-Identifier: Apache-2.0
"""What memory spaces have in common, and the declarations of arrays that they build."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax

from pallas_gpu import _jax, errors, expect
from pallas_gpu.layouts.drawing.drawing import Drawable, Drawing, part_of_array
from pallas_gpu.types import values
from pallas_gpu.types.completion import shows
from pallas_gpu.types.mesh import Mesh
from pallas_gpu.types.refs import KernelRef
from pallas_gpu.types.spaces.resource import (
    ROW_MAJOR,
    Declaration,
    Resource,
    Storage,
)
from pallas_gpu.types.transforms import Transform


class _Members(type):
    """`MemorySpace` lists its members and finds them by name or value, as an enum."""

    members: ClassVar[dict[str, MemorySpace]] = {}
    aliases: ClassVar[dict[str, MemorySpace]] = {}

    def __call__(cls, *values: Any) -> Any:
        if not values:
            return super().__call__()
        for member in cls:
            if values[0] in (member, member.value):
                return member
        raise ValueError(f"{values[0]!r} is not a valid MemorySpace")

    def __getitem__(cls, name: str) -> MemorySpace:
        return cls.members[name] if name in cls.members else cls.aliases[name]

    def __getattr__(cls, name: str) -> MemorySpace:
        if name in cls.members or name in cls.aliases:
            return cls[name]
        raise AttributeError(f"{cls.__name__} has no member {name!r}", name=name)

    def __dir__(cls) -> list[str]:
        return sorted(cls.members)

    def __iter__(cls) -> Iterator[MemorySpace]:
        return iter(cls.members.values())

    def __len__(cls) -> int:
        return len(cls.members)

    def __contains__(cls, item: Any) -> bool:
        return any(item in (member, member.value) for member in cls)


def _named(space: MemorySpace, *_: Any, **given: Any) -> str:
    """Returns a space's name; refuses arguments that only other spaces have."""
    for name in set(given) - set(space.options):
        owners = [other.name for other in MemorySpace if name in other.options]
        if owners:
            raise errors.MemorySpaceError(
                f"{space.name} does not accept {name}",
                expected=f"{name} in declarations of {owners[0]} arrays only",
                got=f"{name}={given[name]}",
                hint=f"drop the argument, or declare the array in {owners[0]}",
                where=_jax.where_now(),
            )
    return space.name


# Checks a space's declaration, with a rule for each argument that it alone has.
declares = functools.partial(
    expect.arguments, _named, shape=expect.anything, dtype=values.dtype
)


@shows("like", "name", "value")
class MemorySpace(Resource, metaclass=_Members):
    """Where a reference lives.

    A member is callable: `SMEM((64, 128), jnp.float16, transforms=(...))` declares a
    scratch array. Its arguments besides shape and dtype belong to the member.
    """

    # What to know instead of a drawing, in a space whose arrays have none.
    undrawn: ClassVar[str] = "its arrays are row-major"

    def __init_subclass__(cls) -> None:
        # `help` and editors show how to call the class's one object.
        _, *parameters = inspect.signature(cls.__call__).parameters.values()
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
        cls.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]

    def __init__(self) -> None:
        _Members.members[self.name] = self

    def also_named(self, name: str) -> None:
        """Gives the member another name, which does not list it again."""
        _Members.aliases[name] = self

    @property
    def value(self) -> str:
        """The name in lower case."""
        return self.name.lower()

    @property
    def options(self) -> Sequence[str]:
        """The arguments of a declaration besides shape and dtype."""
        rules = self.__call__.__expected__  # type: ignore[attr-defined]
        return [name for name in rules if name not in ("shape", "dtype")]

    def __repr__(self) -> str:
        return f"<MemorySpace.{self.name}: {self.value!r}>"

    def __reduce__(self) -> Any:
        return MemorySpace, (self.value,)

    @declares()
    def __call__(self, shape: Sequence[int], dtype: Any) -> ScratchType:
        """Declares a scratch array in this space.

        Args:
          shape: static shape.
          dtype: element type.

        Raises:
          MemorySpaceError: an argument does not belong to this space.
          ShapeError, DTypeError, LayoutError: the space cannot store such an array.
          ArgumentError, ArgumentTypeError: an invalid argument.
        """
        return ScratchType(self, static_shape(self, shape), dtype)

    @expect.arguments(
        lambda self, *_, **__: f"{self.name}.like", shape_dtype_like=expect.arrays
    )
    def like(self, shape_dtype_like: Any) -> ScratchType:
        """Declares a scratch array in this space with the shape and type of another.

        Args:
          shape_dtype_like: an array, a reference or a `jax.ShapeDtypeStruct`.

        Raises:
          As the declaration of that shape and type.
        """
        return self(shape_dtype_like.shape, shape_dtype_like.dtype)

    def check(self, shape: tuple[int, ...], dtype: Any, storage: Storage) -> None:
        """Raises unless the space can store such an array."""

    def check_scope(self, declaration: ScratchType, mesh: Mesh) -> None:
        """Raises unless a scope of a kernel with this mesh may declare the array."""

    def drawn(self, declaration: ScratchType) -> tuple[Drawable, tuple[int, ...]]:
        """Returns the layout of an array, and the shape that it places.

        Raises:
          LayoutError: arrays in the space have no layout.
        """
        drawn = [s.name for s in MemorySpace if type(s).drawn is not MemorySpace.drawn]
        raise errors.LayoutError(
            f"draw: an array in {self.name} has no layout to draw",
            expected=f"an array in {' or '.join(drawn)}",
            got=self.describe(declaration, declaration.shape),
            hint=self.undrawn,
        )

    def check_union(self, members: Sequence[ScratchType]) -> None:
        """Raises unless arrays in this space can share their memory."""


memory_space = expect.instance(MemorySpace, written="plgpu.SMEM or plgpu.GMEM")


@expect.arguments(inner_aval=expect.arrays, memory_space=memory_space)
def MemoryRef(inner_aval: Any, memory_space: MemorySpace) -> ScratchType:  # noqa: N802
    """Declares a scratch array, as `memory_space(shape, dtype)` does.

    PTX: that of the memory space. Since: sm_90.

    Args:
      inner_aval: what has its shape and type, such as `jax.ShapeDtypeStruct` or
        `jax.core.ShapedArray`.
      memory_space: a `MemorySpace`.

    Returns:
      The declaration.

    Raises:
      ArgumentTypeError: another argument.
      As the declaration in that memory space.
    """
    return memory_space.like(inner_aval)


def static_shape(space: MemorySpace, shape: Any) -> tuple[int, ...]:
    """Returns a shape as a tuple; raises ShapeError unless it is static."""
    sizes = [expect.index(n) for n in shape] if expect.is_sequence(shape) else [None]
    static = tuple(n for n in sizes if n is not None and n >= 1)
    if len(static) == len(sizes):
        return static
    raise errors.ShapeError(
        f"{space.name}: a shape needs positive static sizes",
        expected="positive Python integers",
        got=shape if expect.is_sequence(shape) else expect.shown(shape),
        hint="sizes have to be known when the kernel is traced",
    )


@shows("transforms", "draw")
@dataclasses.dataclass(frozen=True)
class ScratchType(Declaration):
    """A declaration of a scratch array.

    Attributes:
      memory_space: where it lives.
      shape: positive static sizes.
      dtype: element type.
      storage: how it is stored there.

    Raises:
      ShapeError: a size is not positive or not static.
      LayoutError: the array cannot be stored in this way.
    """

    memory_space: MemorySpace
    shape: tuple[int, ...]
    dtype: Any
    storage: Storage = ROW_MAJOR

    def __post_init__(self):
        static_shape(self.memory_space, self.shape)
        self.memory_space.check(self.shape, self.dtype, self.storage)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """From the logical shape to the stored form."""
        return self.storage.transforms

    @expect.arguments("draw", part=part_of_array)
    def draw(self, *, part: Any = None) -> Drawing:
        """Draws where the elements of an array in SMEM or TMEM are.

        Args:
          part: for larger arrays, which part to draw: an integer or a slice for each
            axis; of TMEM, for each of the last two.

        Raises:
          LayoutError: the array is in GMEM or in registers, or the part is too large.

        Example:
          >>> plgpu.SMEM((8, 64), jnp.float16).draw(part=(slice(0, 8), slice(0, 16)))
        """
        layout, shape = self.memory_space.drawn(self)
        return layout.draw(shape, part)

    def as_internal(self) -> ScratchType:
        """Returns the same declaration, made by an operation instead of an author."""
        storage = dataclasses.replace(self.storage, internal=True)
        return dataclasses.replace(self, storage=storage)

    def to_ref(self) -> KernelRef:
        aval = jax.core.ShapedArray(self.shape, self.dtype)
        return KernelRef(aval, self.memory_space, details=self.storage)

    def check_scope(self, mesh: Mesh) -> None:
        self.memory_space.check_scope(self, mesh)
