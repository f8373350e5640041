# SPDX-License-Identifier: Apache-2.0
"""Synchronization of subcores: semaphores, the barrier of a core, fetch-and-add."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.sparsecore.primitives._define import array_type, define
from pallas_gpu.sparsecore.types import SEMAPHORES, SMEM, SemaphoreType
from pallas_gpu.types import values

__all__ = [
    "fetch_and_add",
    "semaphore_read",
    "semaphore_signal",
    "semaphore_wait",
    "subcore_barrier",
]

_SEMAPHORE = ("semaphore",)


def _word(*_: Any, **__: Any) -> Any:
    return array_type((), jnp.int32)


semaphore_signal_p = define(
    "semaphore_signal", "sync", writes=_SEMAPHORE, atomic=True, releases=True
)
semaphore_wait_p = define(
    "semaphore_wait",
    "sync",
    reads=_SEMAPHORE,
    writes=_SEMAPHORE,
    atomic=True,
    waits=True,
)
semaphore_read_p = define("semaphore_read", "sync", result=_word, reads=_SEMAPHORE)
subcore_barrier_p = define("subcore_barrier", "sync", releases=True)
fetch_and_add_p = define(
    "fetch_and_add",
    "sync",
    result=_word,
    reads=("ref",),
    writes=("ref",),
    atomic=True,
)


def one_semaphore(ref: Any, kind: SemaphoreType | None, who: str) -> ops.RefOperand:
    """Returns the operand of one semaphore of a type, or of an array of one."""
    aval = types.base_aval(ref)
    found = aval is not None and aval.memory_space is SEMAPHORES
    if not found or kind not in (None, aval.type):
        wanted = "" if kind is None else f" of type {kind.name}"
        raise errors.SemaphoreError(
            f"{who}: the semaphore is not a semaphore{wanted}",
            expected=f"plsc.SemaphoreType.{(kind or SemaphoreType.REGULAR).name}",
            got=f"one of type {aval.type.name}" if found else types.describe(ref),
            hint="declare it in scratch_types or run_scoped",
        )
    if math.prod(ref.shape) != 1:
        raise errors.ShapeError(
            f"{who}: the operand is an array of semaphores",
            expected="one semaphore",
            got=f"semaphores of shape {tuple(ref.shape)}",
            hint="select one with semaphore.at[i]",
        )
    return ops.operand(ref.at[(0,) * len(ref.shape)])


def _int32(value: Any) -> Any:
    return jnp.asarray(value, jnp.int32)


_OTHER = expect.optional(values.index)


@expect.arguments(core_index=_OTHER, subcore_id=_OTHER)
def semaphore_signal(
    semaphore: Any,
    inc: values.Index = 1,
    *,
    core_index: Any = None,
    subcore_id: Any = None,
) -> None:
    """Adds to a semaphore, also of another subcore.

    Issued by: a subcore. Whoever waits for the signal sees what the issuer did before.

    Args:
      semaphore: one semaphore of type REGULAR, or an array of one; index a larger one
        with `semaphore.at[i]`.
      inc: int32 scalar, what is added.
      core_index, subcore_id: whose semaphore of this declaration: int32 scalars; None:
        the issuer's own core, or subcore.

    Raises:
      SemaphoreError: the operand is not a semaphore of type REGULAR.
      ShapeError: the operand is an array of several semaphores.
      ArgumentTypeError: another operand is not an integer scalar.
    """
    one = one_semaphore(semaphore, SemaphoreType.REGULAR, "semaphore_signal")
    core, subcore = (None if i is None else _int32(i) for i in (core_index, subcore_id))
    operands = {"semaphore": one, "inc": _int32(inc), "core": core, "subcore": subcore}
    ops.bind(semaphore_signal_p, operands)


@expect.arguments(
    decrement=expect.refused(True, "signal what was subtracted once more")
)
def semaphore_wait(
    semaphore: Any, value: values.Index = 1, *, decrement: bool = True
) -> None:
    """Waits until a semaphore is at least a value, and subtracts it.

    Issued by: a subcore, which waits.

    Args:
      semaphore: one semaphore of type REGULAR, or an array of one.
      value: int32 scalar.
      decrement: True; a wait that subtracts nothing is not supported.

    Raises:
      SemaphoreError: the operand is not a semaphore of type REGULAR.
      ShapeError: the operand is an array of several semaphores.
      ArgumentTypeError: `value` is not an integer scalar.
    """
    one = one_semaphore(semaphore, SemaphoreType.REGULAR, "semaphore_wait")
    ops.bind(semaphore_wait_p, {"semaphore": one, "value": _int32(value)})


@expect.arguments()
def semaphore_read(semaphore: Any) -> jax.Array:
    """Returns the value of a semaphore.

    Issued by: a subcore. Another one may have changed it when the value is used.

    Args:
      semaphore: one semaphore, or an array of one.

    Raises:
      SemaphoreError: the operand is not a semaphore.
      ShapeError: the operand is an array of several semaphores.
    """
    one = one_semaphore(semaphore, None, "semaphore_read")
    return ops.bind(semaphore_read_p, {"semaphore": one})


@expect.arguments()
def subcore_barrier() -> None:
    """Waits until all vector subcores of the core have arrived.

    What each of them did before, completed copies included, is visible to all after it.

    Issued by: each vector subcore of a core, equally often.

    Raises:
      UnsupportedError: the kernel runs on scalar subcores (when the call is traced).
    """
    ops.bind(subcore_barrier_p, {})


@expect.arguments()
def fetch_and_add(
    x_ref: Any, value: values.Index, *, subcore_id: values.Index
) -> jax.Array:
    """Adds to a word in the SMEM of a subcore of the core, and returns what was there.

    Issued by: a vector subcore; atomic with respect to the others.

    Args:
      x_ref: one int32 in SMEM, such as `counter.at[0]`.
      value: int32 scalar, what is added.
      subcore_id: whose SMEM: int32 scalar.

    Returns:
      int32 scalar, the value before.

    Raises:
      MemorySpaceError: the reference is not in SMEM.
      ShapeError, DTypeError: the reference is not one int32.
      ArgumentTypeError: another operand is not an integer scalar.
    """
    who = "fetch_and_add"
    aval = ops.require_ref(x_ref, who, "the operand")
    if aval.memory_space is not SMEM:
        raise errors.MemorySpaceError(
            f"{who}: the operand is in the wrong memory",
            expected="a reference to one int32 in SMEM",
            got=types.describe(x_ref),
            hint=SMEM.declared_by,
        )
    if jnp.dtype(x_ref.dtype) != jnp.int32:
        raise errors.DTypeError(
            f"{who}: the operand has another element type",
            expected="int32",
            got=types.describe(x_ref),
            hint="declare plsc.SMEM(shape, jnp.int32)",
        )
    one = ops.only_element(x_ref, "counter", who)
    operands = {"ref": one, "value": _int32(value), "subcore": _int32(subcore_id)}
    return ops.bind(fetch_and_add_p, operands)
