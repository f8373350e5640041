# SPDX-License-Identifier: Apache-2.0
"""Semaphores: signals, waits and reads, between all CTAs of a launch and of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.devices.peers import (
    IdType,
    collective_axes,
    multicast_ref,
    remote_ref,
)
from pallas_gpu.types import values

__all__ = [
    "semaphore_signal",
    "semaphore_signal_multicast",
    "semaphore_signal_parallel",
    "SemaphoreSignal",
    "semaphore_wait",
    "semaphore_read",
]

# Scopes of a release or an acquire (PTX ISA, Memory Consistency Model, Scope).
GPU, SYSTEM = "gpu", "sys"

_OF_DEVICES = ("semaphore",)
semaphore_signal_p = registry.define(
    "semaphore_signal",
    "semaphore",
    writes=("semaphore",),
    atomic=True,
    releases=True,
    remote=_OF_DEVICES,
    multicast=_OF_DEVICES,
)
# Operands: a list of those of `semaphore_signal`.
semaphore_signal_parallel_p = registry.define(
    "semaphore_signal_parallel",
    "semaphore",
    writes=("semaphore",),
    atomic=True,
    releases=True,
    remote=_OF_DEVICES,
    multicast=_OF_DEVICES,
)
semaphore_wait_p = registry.define(
    "semaphore_wait",
    "semaphore",
    reads=("semaphore",),
    writes=("semaphore",),
    atomic=True,
    waits=True,
)
semaphore_read_p = registry.define(
    "semaphore_read",
    "semaphore",
    result=lambda *_, **__: jax.core.ShapedArray((), jnp.dtype(jnp.int32)),
    reads=("semaphore",),
)

# An annotation of a parameter, with its rule.
Scope = Annotated[str, expect.choice(SYSTEM, GPU)]


@expect.arguments()
def semaphore_signal(
    semaphore: types.Ref,
    inc: values.Index = 1,
    *,
    device_id: Any = None,
    device_id_type: IdType = types.DeviceIdType.MESH,
    memory_scope: Scope = SYSTEM,
) -> None:
    """Adds to a semaphore, after all earlier memory accesses of the issuer.

    PTX: red.release.{sys,gpu}.global.add.u32; multimem.red.release.sys.global.add.u32
    for a result of `multicast_ref`. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp, which synchronizes; one
    elected lane adds. Whoever waits for the semaphore with `semaphore_wait` then sees
    what the issuer has stored, and what the issuer itself has waited for. Copies to
    GMEM have to be waited for before, with `wait_smem_to_gmem`; if a copy is to read
    what threads have stored to GMEM, `commit_gmem` goes between store and signal.

    Args:
      semaphore: one semaphore, or an array of one; index a larger one with
        `semaphore.at[i]`.
      inc: int32 scalar, uniform in the warpgroup or warp; may be negative.
      device_id, device_id_type: the device whose semaphore is signalled, as of
        `remote_ref`: the same as a signal of `remote_ref(semaphore, device_id)`. None:
        this device.
      memory_scope: "gpu" if the threads that wait run on this device, which is
        cheaper; "sys" orders accesses of other devices and of the host, too.

    Raises:
      MemorySpaceError: the operand is not a semaphore.
      ShapeError: the operand is an array of several semaphores.
      ArgumentTypeError: `inc` is not an integer scalar.
      ArgumentError: another device's semaphore, with the scope of this device.
      KernelError, AxisNameError, OutOfBoundsError, UnsupportedError: as `remote_ref`.

    Example:
      >>> o_ref[...] = x
      >>> plgpu.semaphore_signal(ready, memory_scope="gpu")
    """
    who = "semaphore_signal"
    one = _signalled(semaphore, device_id, device_id_type, who)
    if one.owner is not None and memory_scope != SYSTEM:
        raise errors.ArgumentError(
            f"{who}: the scope does not include the device that has the semaphore",
            expected="memory_scope='sys' for another device's semaphore",
            got=f"memory_scope={memory_scope!r}",
            hint="leave memory_scope out",
        )
    operands = {"semaphore": one, "inc": _int32(inc, who, "inc")}
    ops.bind(semaphore_signal_p, operands, memory_scope=memory_scope)


@expect.arguments(collective_axes=collective_axes)
def semaphore_signal_multicast(
    semaphore: types.Ref,
    value: values.Index = 1,
    *,
    collective_axes: str | Sequence[str],
) -> None:
    """Adds to the semaphores of all devices, after earlier accesses of the issuer.

    PTX: multimem.red.release.sys.global.add.u32. Since: sm_90, and devices that are
    connected by an NVSwitch with multicast.

    Issued as `semaphore_signal`, of which it is one on `multicast_ref(semaphore)`; the
    semaphore of the executing device is one of those that it signals.

    Args:
      semaphore: one semaphore, or an array of one; index a larger one with
        `semaphore.at[i]`.
      value: int32 scalar, uniform in the warpgroup or warp.
      collective_axes: all axes of the mesh of the `jax.shard_map` around the call.

    Raises:
      MemorySpaceError, ShapeError, ArgumentTypeError: as `semaphore_signal`.
      KernelError, AxisNameError, UnsupportedError, ArgumentError: as `multicast_ref`.

    Example:
      >>> plgpu.semaphore_signal_multicast(done, collective_axes="x")
      >>> plgpu.semaphore_wait(done, lax.axis_size("x"))
    """
    _one(semaphore, "semaphore_signal_multicast")
    semaphore_signal(multicast_ref(semaphore, collective_axes), value)


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class SemaphoreSignal:
    """One signal of `semaphore_signal_parallel`.

    PTX: red.relaxed.sys.global.add.u32. Since: sm_90.

    Attributes:
      ref: one semaphore, or an array of one.
      device_id: the device whose semaphore is signalled, as of `remote_ref` with
        `DeviceIdType.MESH`; None: this device.
      inc: int32 scalar, uniform in the warpgroup or warp.

    Raises:
      ArgumentTypeError: `inc` is not an integer scalar.
    """

    ref: types.Ref
    _: dataclasses.KW_ONLY
    device_id: Any = None
    inc: values.Index = 1


@expect.arguments()
def semaphore_signal_parallel(*signals: SemaphoreSignal) -> None:
    """Adds to several semaphores, in no order among them.

    PTX: fence.acq_rel.sys, then red.relaxed.sys.global.add.u32 for each. Since: sm_90.

    Issued as `semaphore_signal`, and orders the same accesses before all of the
    signals. Cheaper than a signal after the other, each of which has a fence.

    Args:
      *signals: `SemaphoreSignal(semaphore, inc=1)`, one or more.

    Raises:
      ArgumentError: there are no signals.
      ArgumentTypeError: an argument is not a SemaphoreSignal.
      MemorySpaceError, ShapeError: as `semaphore_signal`.
      KernelError, AxisNameError, OutOfBoundsError, UnsupportedError: as `remote_ref`.
    """
    who = "semaphore_signal_parallel"
    if not signals:
        raise errors.ArgumentError(
            f"{who}: there are no signals",
            expected="one SemaphoreSignal or more",
            got="none",
            hint="leave the call out",
        )
    operands = [
        {
            "semaphore": _signalled(x.ref, x.device_id, types.DeviceIdType.MESH, who),
            "inc": _int32(x.inc, who, "inc"),
        }
        for x in signals
    ]
    ops.bind(semaphore_signal_parallel_p, operands)


@expect.arguments()
def semaphore_wait(
    semaphore: types.Ref,
    value: values.Index = 1,
    *,
    decrement: bool = True,
    memory_scope: Scope = SYSTEM,
) -> None:
    """Waits until a semaphore has reached a value, and subtracts the value from it.

    PTX: ld.acquire.{sys,gpu}.global.s32 in a loop, and
    atom.acquire.{sys,gpu}.global.cas.b32 to subtract. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; one elected lane polls, then
    the issuer synchronizes. It sees what was stored before each signal that has come.
    CTAs that wait for each other have to be resident at the same time: launch no more
    of them than fit on the device.

    Args:
      semaphore: one semaphore, or an array of one; index a larger one with
        `semaphore.at[i]`.
      value: int32 scalar, uniform in the warpgroup or warp; the wait ends when the
        semaphore is this or more.
      decrement: whether to subtract `value`. Of several that wait, as many continue as
        the semaphore has for.
      memory_scope: "gpu" if the threads that signal run on this device, which is
        cheaper; "sys" otherwise.

    Raises:
      MemorySpaceError: the operand is not a semaphore.
      ShapeError: the operand is an array of several semaphores.
      ArgumentTypeError: `value` is not an integer scalar.
    """
    who = "semaphore_wait"
    operands = {"semaphore": _one(semaphore, who), "value": _int32(value, who, "value")}
    ops.bind(semaphore_wait_p, operands, decrement=decrement, memory_scope=memory_scope)


@expect.arguments()
def semaphore_read(sem_or_view: types.Ref) -> jax.Array:
    """Returns the value of a semaphore.

    PTX: ld.acquire.sys.global.s32. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp, which synchronizes: one
    elected lane reads, and all threads get its value. They see what was stored before
    each signal that the value contains.

    Args:
      sem_or_view: one semaphore, or an array of one; index a larger one with
        `semaphore.at[i]`.

    Returns:
      An int32 scalar. Other CTAs may have changed the semaphore since.

    Raises:
      MemorySpaceError: the operand is not a semaphore.
      ShapeError: the operand is an array of several semaphores.
    """
    operands = {"semaphore": _one(sem_or_view, "semaphore_read")}
    return ops.bind(semaphore_read_p, operands)


def _signalled(
    semaphore: Any, device_id: Any, id_type: types.DeviceIdType, who: str
) -> ops.RefOperand:
    """Returns the operand of a semaphore, that of another device if one is named."""
    one = _one(semaphore, who)
    if device_id is None:
        return one
    return _one(remote_ref(semaphore, device_id, id_type), who)


def _one(semaphore: Any, who: str) -> ops.RefOperand:
    aval = ops.require_ref(semaphore, who, "the semaphore")
    if not _is_semaphore(semaphore, aval):
        raise errors.MemorySpaceError(
            f"{who}: the operand is not a semaphore",
            expected="a reference declared with plgpu.SemaphoreType.REGULAR, or what "
            "plgpu.alloc_semaphore returns",
            got=types.describe(semaphore),
            hint="declare it in scratch_types (pallas_call: scratch_shapes), or "
            "with plgpu.get_global for all CTAs",
        )
    return ops.only_element(semaphore, "semaphore", who)


def _is_semaphore(ref: Any, aval: Any) -> bool:
    """True for a declared one, and for int32 in GMEM that may outlive the kernel."""
    if aval.memory_space is types.SEMAPHORES:
        return True
    plain = not isinstance(ref, types.RefView) or ref.is_window
    return aval.memory_space is types.GMEM and aval.dtype == jnp.int32 and plain


def _int32(value: Any, who: str, what: str) -> jax.Array:
    values.index(value, f"{who}: {what}")
    return jnp.asarray(value, jnp.int32)


@registry.checks_program
def _check_uses(sites: Any) -> None:
    """Raises KernelError for an array that is accessed as semaphores and otherwise.

    Semaphores order accesses; nothing orders their own with those of an array.
    """
    found: dict[Any, dict[bool, tuple[Any, Any]]] = {}
    for site in sites:
        for access in site.op.accesses:
            if access.space is types.GMEM:
                kinds = found.setdefault(site.origin(access.buffer), {})
                signals = access.operation.family == "semaphore"
                kinds.setdefault(signals, (access, site))
    for kinds in found.values():
        if len(kinds) == 1:
            continue
        (_, at), (other, site) = kinds[True], kinds[False]
        raise errors.KernelError(
            f"{types.describe(other.buffer.aval)} has semaphores, and is accessed as "
            "an array",
            expected="semaphore_signal, semaphore_wait and semaphore_read alone",
            got=f"{registry.called(site.op.primitive)} of it, and {at.op.name}"
            + (f" at {at.where}" if at.where is not None else ""),
            hint="pass the array apart from the semaphores, plgpu.alloc_semaphore()",
            where=site.where,
        )
