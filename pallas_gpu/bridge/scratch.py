# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of received bodies: declarations from the types in their jaxprs."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, errors, types
from pallas_gpu.types import values

# JAX's element types of semaphores; those of DMA engines have no counterpart.
_SEMAPHORES = {
    "semaphore": types.SemaphoreType.REGULAR,
    "barrier_semaphore": types.SemaphoreType.BARRIER,
}


def declaration(aval: Any) -> Any:
    """Returns the declaration of a scratch reference.

    Args:
      aval: its type: one of this package's, or of JAX's Pallas.
    """
    if isinstance(aval, types.AccumulatorRef):
        return types.ACC(aval.shape, aval.dtype)
    if isinstance(aval, types.BarrierRef):
        return aval.barrier
    if isinstance(aval, types.SemaphoreRef):
        return aval.declaration
    if isinstance(aval, types.KernelRef):
        space = aval.memory_space
        return types.ScratchType(space, aval.shape, aval.dtype, aval.storage)
    inner = aval.inner_aval
    kind = _SEMAPHORES.get(str(getattr(inner, "dtype", "")))
    if kind is not None:
        return kind(inner.shape) if inner.shape else kind
    is_array = isinstance(inner, _jax.ShapedArray) and values.is_element_type(
        inner.dtype
    )
    if is_array and types.base_aval(aval).memory_space is types.SMEM:
        return types.SMEM(inner.shape, inner.dtype)
    raise errors.MemorySpaceError(
        "a scratch reference is in a memory that has no counterpart",
        expected="an array in SMEM, an accumulator, a barrier or a semaphore",
        got=str(aval),
        hint="declare it with pl.MemorySpace.DEFAULT(shape, dtype), plgpu.SMEM(shape, "
        "dtype), plgpu.ACC(shape, dtype) or plgpu.Barrier()",
    )


def names(jaxpr: _jax.Jaxpr, count: int) -> list[str]:
    """Returns the author's names of a jaxpr's last inputs; empty where unknown."""
    given = jaxpr.debug_info.arg_names or ()
    found = ["" if name is None else str(name) for name in given][-count:]
    return found if len(found) == count else [""] * count
