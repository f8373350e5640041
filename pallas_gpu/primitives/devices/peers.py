# SPDX-License-Identifier: Apache-2.0
"""References to the memory of other devices, and the ids that name devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax

from pallas_gpu import errors, expect, types
from pallas_gpu.layouts.window import added
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.types import values
from pallas_gpu.types.spaces.devices import DeviceIdType

__all__ = ["multicast_ref", "remote_ref"]

# Annotations of parameters, with their rules.
IdType = Annotated[DeviceIdType, expect.member(DeviceIdType)]


def _axes(value: Any, what: str) -> tuple[Any, ...]:
    return expect.names(value, what)


# A rule of a parameter that names axes of the mesh of devices.
collective_axes = _axes


@expect.arguments()
def remote_ref(
    ref: types.Ref, device_id: Any, device_id_type: IdType = DeviceIdType.MESH
) -> types.RefView:
    """Returns a reference to the same array in the GMEM of another device.

    It can be read, written, indexed, updated by atomic operations, copied from and to,
    and, if it is a semaphore, signalled. Every device of the mesh has the array: an
    operand, a result, or scratch of the kernel in GMEM.

    PTX: none; the address is that of the other device's array, on which ld.global,
    st.global, red, atom and the copies of TMA act. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; what accesses the reference
    is complete as an access to the device's own memory is. What a device stores there
    is visible to the other one after a signal that it waits for:
    `semaphore_signal(..., device_id=...)`, after `wait_smem_to_gmem` for copies.
    All devices start the kernel before any of them accesses another one's memory,
    unless `CompilerParams(skip_device_barrier=True)`; a kernel ends when its own device
    is done, so wait for the others' last accesses before it does.

    Args:
      ref: GMEM reference or a part of one, or a semaphore.
      device_id: the device: a dict from names of axes of the `jax.shard_map` around the
        call, or tuples of them, to positions, the executing device's own on the other
        axes; a tuple of positions, one for each axis; on a mesh of one axis also the
        position alone. Positions are integers or integer scalars, uniform in the
        warpgroup or warp. It may be the executing device.
      device_id_type: `MESH` (default), or `LOGICAL`: `device_id` is the position in the
        mesh in row-major order, one integer or scalar.

    Raises:
      MemorySpaceError: the reference is not in GMEM.
      KernelError: there is no `jax.shard_map` around the kernel.
      AxisNameError: the mesh has no such axis.
      OutOfBoundsError: a position outside of the mesh.
      ArgumentError: another number of positions than axes, or a multicast reference.
      UnsupportedError: the `jax.shard_map` is not over all axes of its mesh.

    Example:
      >>> right = lax.rem(lax.axis_index("x") + 1, lax.axis_size("x"))
      >>> plgpu.remote_ref(o_ref, {"x": right})[...] = x_ref[...]
    """
    who = "remote_ref"
    view = _symmetric(ref, who)
    steps, owner = types.split_owner(view.transforms)
    if isinstance(owner, types.MulticastRef):
        raise errors.ArgumentError(
            f"{who}: the reference is to the memory of all devices",
            expected="a reference to memory of this device",
            got="a result of multicast_ref",
            hint="pass the reference that multicast_ref was given",
        )
    found = logical_id(device_id, device_id_type, who)
    peer = types.PeerMemRef(found, DeviceIdType.LOGICAL)
    return types.RefView(view.ref, (peer, *steps))


@expect.arguments(collective_axes=collective_axes)
def multicast_ref(
    ref: types.Ref, collective_axes: str | Sequence[str]
) -> types.RefView:
    """Returns a reference to the same array in the GMEM of all devices at once.

    `copy_smem_to_gmem` to it stores to the arrays of all devices, the executing one
    included; `semaphore_signal` signals the semaphores of all. Threads store with
    `multimem_store` and load with `multimem_load_reduce`.

    PTX: none; the address is a multimem address (NVLink SHARP). Since: sm_90, and
    devices that are connected by an NVSwitch with multicast.

    Issued by a warpgroup, or inside `warp_map` by a warp; what accesses the reference
    is complete as an access to the device's own memory is.

    Args:
      ref: GMEM reference or a part of one, or a semaphore.
      collective_axes: all axes of the mesh of the `jax.shard_map` around the call.

    Raises:
      MemorySpaceError: the reference is not in GMEM.
      KernelError: there is no `jax.shard_map` around the kernel.
      AxisNameError: the mesh has no such axis.
      ArgumentError: a reference to another device's memory.
      UnsupportedError: not all axes of the mesh.

    Example:
      >>> all_done = plgpu.multicast_ref(done, ("x", "y"))
    """
    who = "multicast_ref"
    view = _symmetric(ref, who)
    steps, owner = types.split_owner(view.transforms)
    if isinstance(owner, types.PeerMemRef):
        raise errors.ArgumentError(
            f"{who}: the reference is to the memory of another device",
            expected="a reference to memory of this device",
            got="a result of remote_ref",
            hint="pass the reference that remote_ref was given",
        )
    step = types.MulticastRef(all_axes(collective_axes, who))
    return types.RefView(view.ref, (step, *steps))


def _symmetric(ref: Any, who: str) -> types.RefView:
    """Returns a reference as a view, if other devices have the array, too."""
    aval = ops.require_ref(ref, who, "the reference")
    if aval.memory_space not in (types.GMEM, types.SEMAPHORES):
        raise errors.MemorySpaceError(
            f"{who}: other devices cannot access the reference's memory",
            expected="a reference in GMEM: an operand, a result, or scratch of the "
            "kernel in GMEM",
            got=types.describe(ref),
            hint="cluster_ref reaches the SMEM of another CTA of the cluster; copy to "
            "another device's GMEM",
        )
    return types.as_view(ref.at[()])


def all_axes(axes: Sequence[Any], who: str) -> tuple[Any, ...]:
    """Returns the axes of the mesh, if they are all given."""
    devices = types.Devices.around(who)
    for axis in axes:
        _require_axis(axis, devices, who)
    if set(axes) != set(devices.names):
        raise errors.UnsupportedError(
            f"{who}: a part of the devices",
            expected=f"all axes of the mesh, {devices.names}",
            got=f"collective_axes={tuple(axes)}",
            hint="name all axes, or reach each device with remote_ref",
        )
    return devices.names


# --- ids ------------------------------------------------------------------------------


def logical_id(device_id: Any, id_type: DeviceIdType, who: str) -> Any:
    """Returns the logical id of a device, an integer or an int32 scalar."""
    devices, what = types.Devices.around(who), f"{who}: device_id"
    if id_type is DeviceIdType.LOGICAL:
        if isinstance(device_id, Mapping) or expect.is_sequence(device_id):
            raise errors.ArgumentError(
                f"{what}: a logical id is one number",
                expected="an integer or an integer scalar",
                got=expect.shown(device_id),
                hint="leave device_id_type out to name positions on axes",
            )
        return _position(device_id, devices.size, what, "logical ids")
    positions = _positions(device_id, devices, who)
    total: Any = 0
    for (axis, size), stride in zip(devices.axes, devices.strides, strict=True):
        at = positions[axis] if axis in positions else jax.lax.axis_index(axis)
        term = _product(_position(at, size, what, f"axis {axis!r}"), stride)
        total = added(total, term, _add)
    return total


def _positions(device_id: Any, devices: types.Devices, who: str) -> dict[Any, Any]:
    """Returns the positions on axes that a device id of `MESH` names."""
    if isinstance(device_id, Mapping):
        found: dict[Any, Any] = {}
        for name, at in device_id.items():
            more = _on_axes(name, at, devices, who)
            if twice := sorted(map(str, found.keys() & more.keys())):
                raise errors.ArgumentError(
                    f"{who}: device_id names an axis twice",
                    expected="one position on each axis",
                    got=", ".join(twice),
                    hint="name the axis alone, or in one tuple of axes",
                )
            found |= more
        return found
    several = tuple(device_id) if expect.is_sequence(device_id) else (device_id,)
    if len(several) != len(devices.names):
        raise errors.ArgumentError(
            f"{who}: device_id does not have a position for each axis of the mesh",
            expected=f"{len(devices.names)}, on {devices.names}",
            got=f"{len(several)}",
            hint="a dict, {axis: position}, may leave axes out; "
            "device_id_type=plgpu.DeviceIdType.LOGICAL takes one number",
        )
    return dict(zip(devices.names, several, strict=True))


def _on_axes(name: Any, at: Any, devices: types.Devices, who: str) -> dict[Any, Any]:
    """Returns the positions on the axes that one name of a dict stands for."""
    if name in devices.names or not isinstance(name, tuple):
        _require_axis(name, devices, who)
        return {name: at}
    sizes = [dict(devices.axes)[_require_axis(axis, devices, who)] for axis in name]
    joint = _position(at, math.prod(sizes), f"{who}: device_id", f"axes {name}")
    found = {}
    for i, axis in enumerate(name):
        inner = math.prod(sizes[i + 1 :])
        if isinstance(joint, int):
            found[axis] = joint // inner % sizes[i]
        else:
            found[axis] = jax.lax.rem(
                jax.lax.div(joint, _int32(inner)), _int32(sizes[i])
            )
    return found


def _require_axis(axis: Any, devices: types.Devices, who: str) -> Any:
    if axis not in devices.names:
        raise errors.AxisNameError(
            f"{who}: the mesh of devices has no axis named {axis!r}",
            expected=f"one of {devices.names}",
            got=repr(axis),
            hint="name axes of the mesh of the jax.shard_map around the call",
        )
    return axis


def _position(at: Any, size: int, what: str, of: str) -> Any:
    """Returns a position as an integer in bounds, or as an int32 scalar."""
    at = values.index(at, what)
    if not isinstance(at, int):
        return jax.lax.convert_element_type(at, "int32")
    if not 0 <= at < size:
        raise errors.OutOfBoundsError(
            f"{what}: the mesh has no device at this position",
            expected=f"0 to {size - 1} ({of})",
            got=at,
            hint="compute the position modulo the size of the axis",
        )
    return at


def _int32(number: int) -> Any:
    return jax.numpy.int32(number)


def _add(*terms: Any) -> Any:
    return jax.lax.add(*(_int32(x) if isinstance(x, int) else x for x in terms))


def _product(a: Any, factor: int) -> Any:
    if isinstance(a, int) or factor == 1:
        return a * factor if isinstance(a, int) else a
    return jax.lax.mul(a, _int32(factor))
