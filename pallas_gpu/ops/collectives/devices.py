# SPDX-License-Identifier: Apache-2.0
"""The devices of a collective, and whether a kernel reaches their memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect


def _axis_name(value: Any, what: str) -> Any:
    """Accepts a name, or several, as a tuple."""
    names = expect.names(value, what)
    return names[0] if len(names) == 1 else names


# An annotation of a parameter, with its rule.
AxisName = Annotated[Any, _axis_name]


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices along axes of a mesh: those that take part in a collective.

    Attributes:
      axes: name of an axis of the `jax.shard_map`, or a tuple of names.
      size: number of devices.
    """

    axes: Any
    size: int

    @classmethod
    def along(cls, axis_name: Any) -> Group:
        """Returns the devices along an axis, or along several.

        Raises:
          AxisNameError: there is no such axis around the call.
        """
        names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        sizes = []
        for name in names:
            try:
                sizes.append(lax.axis_size(name))
            except (NameError, KeyError):
                raise errors.AxisNameError(
                    f"ops.collectives: there is no axis {name!r} around the call",
                    expected="an axis of the jax.shard_map around it",
                    got=expect.shown(axis_name),
                    hint="jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)(x), "
                    "where f calls the collective",
                ) from None
        return cls(axis_name, math.prod(sizes))

    @property
    def names(self) -> tuple[Any, ...]:
        """The names of the axes."""
        return self.axes if isinstance(self.axes, tuple) else (self.axes,)

    def me(self) -> Any:
        """Returns the position of the executing device, in a kernel or outside."""
        position: Any = np.int32(0)
        for name in self.names:
            size = np.int32(lax.axis_size(name))
            position = lax.axis_index(name) + position * size
        return position

    def after(self, me: Any, distance: int) -> Any:
        """Returns the position of the device at a distance, also a negative one."""
        return self.at(me, np.int32(distance % self.size))

    def at(self, me: Any, distance: Any) -> Any:
        """Returns the position of the device at a distance that may be traced."""
        return lax.rem(me + distance, np.int32(self.size))

    def device(self, position: Any) -> dict[Any, Any]:
        """Returns the `device_id` of a position."""
        return {self.axes: position}

    def peer(self, ref: Any, position: Any) -> Any:
        """Returns a reference to the memory of the device at a position."""
        return plgpu.remote_ref(ref, self.device(position))

    def begin(self, ready: Any, me: Any, cta: Any) -> None:
        """Returns when this CTA of all other devices has come here.

        Then their operands are there, and nobody uses their results any more.

        Args:
          ready: a semaphore for each CTA, which is kept: a device that comes first
            signals the others before they have started the kernel. `meet` resets it.
        """
        plgpu.semaphore_signal_parallel(*self._signals(ready.at[cta], me))
        plgpu.semaphore_wait(ready.at[cta], self.size - 1, decrement=False)

    def meet(self, ready: Any, done: Any, me: Any, cta: Any, ctas: int) -> None:
        """Ends a kernel: returns when all CTAs of all other devices have come here.

        Each CTA says so to the other devices; the first one waits for theirs, and the
        kernel ends after it. Then what the others store here has been stored, and what
        they read here has been read. The semaphores are zero again.
        """
        reset = plgpu.SemaphoreSignal(ready.at[cta], inc=1 - self.size)
        plgpu.semaphore_signal_parallel(*self._signals(done, me), reset)
        first = lax.eq(cta, np.int32(0))
        plgpu.when(first)(lambda: plgpu.semaphore_wait(done, ctas * (self.size - 1)))

    def _signals(self, semaphore: Any, me: Any) -> list[plgpu.SemaphoreSignal]:
        """Returns a signal to each of the other devices."""
        others = (self.device(self.after(me, i)) for i in range(1, self.size))
        return [plgpu.SemaphoreSignal(semaphore, device_id=there) for there in others]


@dataclasses.dataclass(frozen=True)
class DeviceCall:
    """What does not depend on the values in a call of a collective; hashable.

    Attributes:
      what: name of the public function.
      axis_name: of the devices.
      method: as the caller states it.
      compiler_params, interpret: of the kernel.
    """

    what: str
    axis_name: Any
    method: str | None
    compiler_params: plgpu.CompilerParams | None
    interpret: Any

    @property
    def group(self) -> Group:
        """The devices."""
        return Group.along(self.axis_name)

    @property
    def of_kernels(self) -> dict[str, Any]:
        """Parameters of the kernels."""
        return {"compiler_params": self.compiler_params, "interpret": self.interpret}

    def reaches(self) -> bool:
        """Returns whether a kernel does it, and not the collective of `jax.lax`.

        Raises:
          UnsupportedError: the method needs a kernel, which cannot reach the devices.
        """
        if self.method == "lax":
            return False
        reason = unreachable(self.axis_name)
        if reason is None or self.method is None:
            return reason is None
        raise errors.UnsupportedError(
            f"{self.what}: a kernel cannot reach the devices along {self.axis_name!r}",
            expected="a jax.shard_map over all axes of a mesh of several devices of "
            "one process",
            got=reason,
            hint='omit method, or method="lax": the collective of jax.lax',
        )


def launch(
    group: Group,
    name: str,
    body: Callable[..., None],
    out_type: Any,
    units: int,
    ctas: int,
    compiler_params: plgpu.CompilerParams | None,
    interpret: Any,
) -> Any:
    """Returns a kernel at whose start and end the devices meet.

    Args:
      group: the devices.
      name: of the kernel.
      body: `body(me, unit, *refs)` does a unit of the work of the device at `me`.
      out_type: types of the results.
      units: number of units of a device.
      ctas: number of CTAs that share them, at most.
      compiler_params, interpret: of the kernel.
    """
    ctas = max(1, min(ctas, units))
    kept = plgpu.SemaphoreType.BARRIER
    params = compiler_params or plgpu.CompilerParams()

    def kernel(*refs: Any) -> None:
        ready, done = (plgpu.get_global(kept(s)) for s in ((ctas,), ()))
        me, cta = group.me(), lax.axis_index("cta")
        group.begin(ready, me, cta)

        @plgpu.nd_loop((units,), collective_axes="cta")
        def _(info: Any) -> None:
            body(me, info.index[0], *refs)

        group.meet(ready, done, me, cta, ctas)

    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        kernel_name=name,
        # Its own barrier is faster than XLA's, which is a kernel.
        compiler_params=params.replace(skip_device_barrier=True),
        interpret=interpret,
    )


@expect.arguments()
def unreachable(axis_name: AxisName) -> str | None:
    """Returns why a kernel cannot reach the memory of all devices along an axis.

    PTX: none. Since: sm_90. Issued by the host, in a function of `jax.shard_map`.

    Args:
      axis_name: name of an axis of the mesh, or a tuple of names.

    Returns:
      The reason for which `ops.collectives` calls a collective of `jax.lax`; None if a
      kernel reaches the devices.

    Raises:
      AxisNameError: there is no such axis around the call.
    """
    axes = Group.along(axis_name).names
    if Group.along(axis_name).size == 1:
        return "there is one device"
    mesh = jax.sharding.get_abstract_mesh()
    if not set(axes) <= set(mesh.manual_axes):
        return "the axis is not one of jax.shard_map"
    if set(mesh.axis_names) != set(mesh.manual_axes):
        return "jax.shard_map leaves axes of its mesh to the compiler"
    if jax.process_count() > 1:
        return "the devices are those of several processes"
    return None


def varying(x: Any, group: Group) -> Any:
    """Converts an array to vary over the axes of a group, as its results do.

    The derivative of the conversion is the sum over the devices.
    """
    known = jax.typeof(x).manual_axis_type.varying
    missing = tuple(name for name in group.names if name not in known)
    mesh = jax.sharding.get_abstract_mesh()
    if not missing or not set(missing) <= set(mesh.manual_axes):
        return x
    return lax.pcast(x, missing, to="varying")
