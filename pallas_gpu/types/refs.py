# SPDX-License-Identifier: Apache-2.0
"""Abstract references: what kernels handle while they are traced.

An SMEM reference has the logical shape that the author wrote; how it is stored is part
of its type (`transforms`). One object is one variable: JAX refuses the same abstract
reference for two arguments, so declarations make a fresh one each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax

if TYPE_CHECKING:
    from pallas_gpu.types.barrier import Barrier


class KernelRef(_jax.AbstractRef):
    """A reference to an array in GMEM, SMEM, TMEM or registers.

    Attributes:
      inner_aval: shape and dtype.
      memory_space: a `MemorySpace`.
      transforms: how an SMEM array is stored.
    """

    __slots__ = ["transforms"]

    def __init__(
        self,
        inner_aval: Any,
        memory_space: Any = None,
        kind: Any = None,
        transforms: tuple[Any, ...] = (),
    ):
        super().__init__(inner_aval, memory_space, kind)
        self.transforms = tuple(transforms)

    def update(self, inner_aval=None, memory_space=None, kind=None):
        return KernelRef(
            self.inner_aval if inner_aval is None else inner_aval,
            self.memory_space if memory_space is None else memory_space,
            self.kind if kind is None else kind,
            self.transforms,
        )

    def __eq__(self, other):
        return (
            type(other) is type(self)
            and self.inner_aval == other.inner_aval
            and self.memory_space == other.memory_space
            and self.transforms == other.transforms
        )

    def __hash__(self):
        return hash((KernelRef, self.inner_aval, self.memory_space, self.transforms))


class BarrierRef(_jax.AbstractRef):
    """A reference to one mbarrier or an array of them in SMEM.

    Attributes:
      barrier: the declaration: arrivals, shape, what it orders.
    """

    __slots__ = ["barrier"]

    def __init__(self, barrier: Barrier, inner_aval: Any = None, memory_space: Any = None):
        # An mbarrier is an opaque 64-bit word; the element type is never read, and
        # uint32 is the widest unsigned type that JAX has without x64.
        aval = jax.core.ShapedArray(barrier.shape, jnp.uint32)
        super().__init__(inner_aval or aval, memory_space or "barrier")
        self.barrier = barrier

    def update(self, inner_aval=None, memory_space=None, kind=None):
        return BarrierRef(
            self.barrier, inner_aval or self.inner_aval, memory_space or self.memory_space
        )

    def str_short(self, short_dtypes=False, mesh_axis_types=False) -> str:
        return f"Barrier{list(self.shape)}({self.barrier.num_arrivals})"

    def __eq__(self, other):
        return (
            type(other) is type(self)
            and self.barrier == other.barrier
            and self.inner_aval == other.inner_aval
        )

    def __hash__(self):
        return hash((BarrierRef, self.barrier, self.inner_aval))


def base_aval(ref: Any) -> Any:
    """Returns the abstract reference under a tracer, a view or an abstract value."""
    while isinstance(ref, _jax.TransformedRef):
        ref = ref.ref
    if isinstance(ref, _jax.AbstractRef):
        return ref
    try:
        aval = jax.typeof(ref)
    except TypeError:
        return None
    return aval if isinstance(aval, _jax.AbstractRef) else None


def describe(ref: Any) -> str:
    """Returns memory space, dtype and shape of a reference for error messages."""
    aval = base_aval(ref)
    if aval is None:
        return f"{type(ref).__name__}, not a reference"
    if isinstance(aval, BarrierRef):
        return f"a barrier of shape {tuple(aval.shape)}"
    space = str(aval.memory_space).upper()
    return f"{space} {jnp.dtype(aval.dtype).name}{list(ref.shape)}"
