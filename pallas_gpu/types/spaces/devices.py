# SPDX-License-Identifier: Apache-2.0
"""The devices around a kernel, and whose memory a reference in GMEM names.

A device is its logical id: its position in the mesh of the `jax.shard_map` around the
call, row-major. A step of a reference says whose memory it names: that of one other
device, or that of all of them; without such a step it is the executing device's.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect


class DeviceIdType(enum.Enum):
    """How a device is named.

    Attributes:
      MESH: by its position on axes of the mesh: a dict from names of axes, or tuples of
        them, to positions, the device's own on the other axes; a tuple of positions,
        one for each axis; or one position, on a mesh of one axis.
      LOGICAL: by its logical id, its position in the mesh in row-major order.
    """

    MESH = "mesh"
    LOGICAL = "logical"


@expect.arguments(device_id=expect.anything, device_id_type=expect.member(DeviceIdType))
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PeerMemRef(_jax.Transform):
    """The step of a reference to the same memory of another device.

    `remote_ref` makes it, always with a logical id.

    Attributes:
      device_id: the logical id, an integer or an int32 scalar.
      device_id_type: LOGICAL.

    Raises:
      ArgumentTypeError: not a member of `DeviceIdType`.
    """

    device_id: Any
    device_id_type: DeviceIdType = dataclasses.field(metadata={"static": True})

    def transform_type(self, aval: Any) -> Any:
        """Returns the type of the reference, which stays the same."""
        return aval


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MulticastRef(_jax.Transform):
    """The step of a reference to the same memory of all devices at once.

    Attributes:
      collective_axes: the axes of the mesh, all of them.
    """

    collective_axes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    def transform_type(self, aval: Any) -> Any:
        """Returns the type of the reference, which stays the same."""
        return aval


Owner = PeerMemRef | MulticastRef


def split_owner(steps: Sequence[Any]) -> tuple[tuple[Any, ...], Owner | None]:
    """Returns the steps that select elements, and the one that says whose memory.

    Of several the last one counts; None is the executing device.
    """
    owners = [step for step in steps if isinstance(step, Owner)]
    rest = tuple(step for step in steps if not isinstance(step, Owner))
    return rest, owners[-1] if owners else None


@dataclasses.dataclass(frozen=True)
class Devices:
    """The mesh of devices around a kernel.

    Attributes:
      names: of its axes.
      sizes: of its axes.
      present: the ids of the devices where a program is lowered for those of this
        process, which then keep arrays for it.
    """

    names: tuple[Any, ...]
    sizes: tuple[int, ...]
    present: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance of logical ids along each axis."""
        return tuple(math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes)))

    @property
    def axes(self) -> tuple[tuple[Any, int], ...]:
        """Name and size of each axis."""
        return tuple(zip(self.names, self.sizes, strict=True))

    def positions(self, logical_id: int) -> dict[Any, int]:
        """Returns the position of a device on each axis."""
        places = zip(self.axes, self.strides, strict=True)
        return {name: logical_id // stride % size for (name, size), stride in places}

    @classmethod
    def around(cls, who: str) -> Devices:
        """Returns the devices of the `jax.shard_map` around the kernel being traced."""
        mesh = _jax.mesh_around()
        if mesh is None or not mesh.manual_axes:
            raise errors.KernelError(
                f"{who}: there is no mesh of devices around the kernel",
                expected="a kernel that is called in a function of jax.shard_map",
                got="a kernel of one device",
                hint="jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)(x), "
                "where f calls the kernel",
            )
        left = [name for name in mesh.axis_names if name not in mesh.manual_axes]
        if left:
            raise errors.UnsupportedError(
                f"{who}: jax.shard_map leaves axes of its mesh to the compiler",
                expected=f"a jax.shard_map over all axes, {tuple(mesh.axis_names)}",
                got=f"one over {tuple(mesh.manual_axes)}",
                hint="leave axis_names out: logical ids count all devices of the mesh",
            )
        return cls(tuple(mesh.axis_names), tuple(mesh.axis_sizes))
