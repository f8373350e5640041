# SPDX-License-Identifier: Apache-2.0
"""Semaphores: signals, waits and reads, between all CTAs of a launch."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.types import values

__all__ = [
    "semaphore_signal",
    "semaphore_signal_parallel",
    "SemaphoreSignal",
    "semaphore_wait",
    "semaphore_read",
]

# Scopes of a release or an acquire (PTX ISA, Memory Consistency Model, Scope).
GPU, SYSTEM = "gpu", "sys"

semaphore_signal_p = registry.define(
    "semaphore_signal", "semaphore", writes=("semaphore",), atomic=True, releases=True
)
# Operands: a list of those of `semaphore_signal`.
semaphore_signal_parallel_p = registry.define(
    "semaphore_signal_parallel",
    "semaphore",
    writes=("semaphore",),
    atomic=True,
    releases=True,
)
semaphore_wait_p = registry.define(
    "semaphore_wait",
    "semaphore",
    reads=("semaphore",),
    writes=("semaphore",),
    atomic=True,
)
semaphore_read_p = registry.define(
    "semaphore_read",
    "semaphore",
    result=lambda *_, **__: jax.core.ShapedArray((), jnp.dtype(jnp.int32)),
    reads=("semaphore",),
)

_ONE_DEVICE = expect.refused(
    None, "leave it out: kernels over several devices are not supported yet"
)
# An annotation of a parameter, with its rule.
Scope = Annotated[str, expect.choice(SYSTEM, GPU)]


@expect.arguments(device_id=_ONE_DEVICE)
def semaphore_signal(
    semaphore: types.Ref,
    inc: values.Index = 1,
    *,
    device_id: Any = None,
    memory_scope: Scope = SYSTEM,
) -> None:
    """Adds to a semaphore, after all earlier memory accesses of the issuer.

    PTX: red.release.{sys,gpu}.global.add.u32. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp, which synchronizes; one
    elected lane adds. Whoever waits for the semaphore with `semaphore_wait` then sees
    what the issuer has stored, and what the issuer itself has waited for. Copies to
    GMEM have to be waited for before, with `wait_smem_to_gmem`; if a copy is to read
    what threads have stored to GMEM, `commit_gmem` goes between store and signal.

    Args:
      semaphore: one semaphore, or an array of one; index a larger one with
        `semaphore.at[i]`.
      inc: int32 scalar, uniform in the warpgroup or warp; may be negative.
      device_id: not supported yet: another device whose semaphore is signalled.
      memory_scope: "gpu" if the threads that wait run on this device, which is
        cheaper; "sys" orders accesses of other devices and of the host, too.

    Raises:
      MemorySpaceError: the operand is not a semaphore.
      ShapeError: the operand is an array of several semaphores.
      ArgumentTypeError: `inc` is not an integer scalar.
      UnsupportedError: device_id.

    Example:
      >>> o_ref[...] = x
      >>> plgpu.semaphore_signal(ready, memory_scope="gpu")
    """
    who = "semaphore_signal"
    operands = {"semaphore": _one(semaphore, who), "inc": _int32(inc, who, "inc")}
    ops.bind(semaphore_signal_p, operands, memory_scope=memory_scope)


@expect.arguments(device_id=_ONE_DEVICE)
@dataclasses.dataclass(frozen=True)
class SemaphoreSignal:
    """One signal of `semaphore_signal_parallel`.

    PTX: red.relaxed.sys.global.add.u32. Since: sm_90.

    Attributes:
      ref: one semaphore, or an array of one.
      device_id: not supported yet: another device whose semaphore is signalled.
      inc: int32 scalar, uniform in the warpgroup or warp.

    Raises:
      ArgumentTypeError: `inc` is not an integer scalar.
      UnsupportedError: device_id.
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
        {"semaphore": _one(x.ref, who), "inc": _int32(x.inc, who, "inc")}
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
