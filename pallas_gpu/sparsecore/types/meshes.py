# SPDX-License-Identifier: Apache-2.0
"""The subcores that run a kernel, with names of their axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from pallas_gpu import errors, expect
from pallas_gpu.arch import tpu
from pallas_gpu.sparsecore.types import chips

MACHINE = "sparsecore"
_COUNT = expect.optional(expect.integer(1))


class SubcoreMesh:
    """What both meshes have in common.

    Attributes:
      machine: whose rules run its kernels.
      platforms: JAX's names of where it runs.
      groups: what runs at once and shares memory, in the plural.
      is_vector: whether vector subcores run the body, otherwise scalar ones.
    """

    machine: ClassVar[str] = MACHINE
    platforms: ClassVar[tuple[str, ...]] = ("tpu",)
    groups: ClassVar[str] = "cores"
    is_vector: ClassVar[bool]
    num_cores: int | None

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes as (name, size), that of the cores first."""
        raise NotImplementedError

    @property
    def grid(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(size for _, size in self.axes)

    @property
    def grid_names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> Mapping[str, int]:
        """The sizes of the axes by their names."""
        return dict(self.axes)

    @property
    def core_axis(self) -> str:
        """The name of the axis of the cores."""
        return self.axes[0][0]

    def of_chip(self, target: tpu.TpuTarget) -> Any:
        """Returns the mesh with the sizes of a chip where it has none."""
        counts = {"num_cores": target.cores, "num_subcores": target.subcores}
        given: dict[str, int] = {}
        for name, most in counts.items():
            count = getattr(self, name, 1)
            if count is not None and count > most:
                raise errors.ArgumentError(
                    f"{type(self).__name__}: {name} exceeds that of {target.name}",
                    expected=f"at most {most}",
                    got=count,
                    hint="loop over several blocks in the body, or choose another "
                    "target",
                )
            if count is None:
                given[name] = most
        return dataclasses.replace(self, **given)  # type: ignore[type-var]


def _require_different(mesh: Any, *names: str) -> None:
    if len(set(names)) < len(names):
        raise errors.ArgumentError(
            f"{type(mesh).__name__}: two axes have the same name",
            expected="different names for the axes of cores and subcores",
            got=names,
            hint="rename one of them",
        )


@expect.arguments(num_cores=_COUNT)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalarSubcoreMesh(SubcoreMesh):
    """The scalar subcores: one a SparseCore, without vectors and VMEM.

      >>> mesh = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1)

    Attributes:
      axis_name: the name of the axis of the cores, for `lax.axis_index`.
      num_cores: SparseCores; None: all of the chip that the kernel is traced for.

    Raises:
      ArgumentError: no cores, or more than the chip has (in `kernel`).
      ArgumentTypeError: the name is not a string, the count is not an integer.
    """

    is_vector: ClassVar[bool] = False
    axis_name: str
    num_cores: int | None = None

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return ((self.axis_name, self.num_cores or chips.current().cores),)


@expect.arguments(num_cores=_COUNT, num_subcores=_COUNT)
@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorSubcoreMesh(SubcoreMesh):
    """The vector subcores: 16 a SparseCore, each with VMEM and a stream engine.

      >>> mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="tile")

    Attributes:
      core_axis_name: the name of the axis of the cores, for `lax.axis_index`.
      subcore_axis_name: that of the axis of the subcores of a core.
      num_cores: SparseCores; None: all of the chip that the kernel is traced for.
      num_subcores: subcores a core; None: all.

    Raises:
      ArgumentError: none of them, or more than the chip has (in `kernel`); one name
        for both axes.
      ArgumentTypeError: a name is not a string, a count is not an integer.
    """

    is_vector: ClassVar[bool] = True
    core_axis_name: str
    subcore_axis_name: str
    num_cores: int | None = None
    num_subcores: int | None = None

    def __post_init__(self) -> None:
        _require_different(self, self.core_axis_name, self.subcore_axis_name)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        chip = chips.current()
        return (
            (self.core_axis_name, self.num_cores or chip.cores),
            (self.subcore_axis_name, self.num_subcores or chip.subcores),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubcoreMeshes(SubcoreMesh):
    """Vector subcores and scalar subcores of the same cores, in one program."""

    is_vector: ClassVar[bool] = True
    vector: VectorSubcoreMesh
    scalar: ScalarSubcoreMesh

    def __post_init__(self) -> None:
        cores = [
            (mesh.core_axis, mesh.num_cores) for mesh in (self.vector, self.scalar)
        ]
        if cores[0] != cores[1]:
            raise errors.ArgumentError(
                "two meshes of one program have different cores",
                expected="one name and one number of the cores",
                got=" and ".join(f"{n!r} of {size or 'all'}" for n, size in cores),
                hint="name the axis of both alike, and pass num_cores to both",
            )

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return self.vector.axes

    def of_chip(self, target: tpu.TpuTarget) -> SubcoreMeshes:
        return SubcoreMeshes(
            vector=self.vector.of_chip(target), scalar=self.scalar.of_chip(target)
        )
