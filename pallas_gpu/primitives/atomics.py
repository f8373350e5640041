# SPDX-License-Identifier: Apache-2.0
"""Atomic operations on elements of references: sums, extrema, bits, exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import indexed

__all__ = [
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
]

_INTEGERS = ("int32", "uint32", "int64", "uint64")
_FLOATS = ("float32", "float64")
_HALVES = ("float16", "bfloat16")

# The element types of each operation: PTX ISA, Parallel Synchronization: atom. Floats
# are ordered and exchanged as integers.
TYPES: dict[str, tuple[str, ...]] = {
    "atomic_add": (*_INTEGERS, *_FLOATS, *_HALVES),
    "atomic_max": (*_INTEGERS, *_FLOATS),
    "atomic_min": (*_INTEGERS, *_FLOATS),
    "atomic_and": _INTEGERS,
    "atomic_or": _INTEGERS,
    "atomic_xor": _INTEGERS,
    "atomic_xchg": (*_INTEGERS, *_FLOATS),
    "atomic_cas": (*_INTEGERS, *_FLOATS, "int16", "uint16", *_HALVES),
}


# PTX ISA, atom: .sem and .scope.
ORDERS = ("relaxed", "acquire", "release", "acq_rel")
SCOPES = ("cta", "cluster", "gpu", "sys")


def releases(order: str) -> bool:
    """True if earlier accesses of the issuer happen before an acquire that sees it."""
    return order in ("release", "acq_rel")


def acquires(order: str) -> bool:
    """True if what was released to it happens before later accesses of the issuer."""
    return order in ("acquire", "acq_rel")


def _old(operands: Any, shape: tuple[int, ...], dtype: Any, **_: Any) -> Any:
    return jax.core.ShapedArray(shape, dtype)


PRIMITIVES = {
    name: registry.define(
        name,
        "atomics",
        result=_old,
        reads=("ref",),
        writes=("ref",),
        remote=("ref",),
        atomic=True,
        releases=True,
    )
    for name in TYPES
}


def _bind(
    who: str,
    ref: Any,
    values: dict[str, Any],
    mask: Any,
    sem: str,
    scope: str | None,
) -> Any:
    aval = ops.require_ref(ref, who, "the reference")
    if aval.memory_space not in (types.SMEM, types.GMEM):
        raise errors.MemorySpaceError(
            f"{who}: the reference has no atomic operations",
            expected="a reference in SMEM or GMEM",
            got=types.describe(ref),
            hint="add to an accumulator with acc[...] += x",
        )
    view = types.as_view(ref.at[()])
    dtype = jnp.dtype(view.dtype)
    if dtype.name not in TYPES[who]:
        raise errors.DTypeError(
            f"{who}: there is no such operation on these elements",
            expected=", ".join(TYPES[who]),
            got=types.describe(view),
            hint="convert the array, or combine in one block and store the result",
        )
    mask = indexed.mask_of(mask, view.shape, who)
    stored = {name: types.stored(value, view) for name, value in values.items()}
    operand, where, params = indexed.place(view, who, mask is not None)
    is_remote = operand.owner is not None
    if (scope == "cta" and params["cta_axes"]) or (is_remote and scope in SCOPES[:-1]):
        raise errors.ArgumentError(
            f"{who}: the scope does not include "
            f"the {'device' if is_remote else 'CTA'} that the memory belongs to",
            expected="sys for another device's memory"
            if is_remote
            else "cluster, gpu or sys for another CTA's SMEM",
            got=f"scope={scope!r}",
            hint="leave scope out: it then includes all who can access the memory",
        )
    scope = "sys" if is_remote else scope
    return ops.bind(
        PRIMITIVES[who],
        {"ref": operand, **where, "mask": mask, **stored},
        sem=sem,
        scope=scope,
        **params,
    )


# Annotations of parameters, with their rules.
Order = Annotated[str, expect.choice(*ORDERS)]
Scope = Annotated[str | None, expect.choice(None, *SCOPES)]

_PART = expect.arguments(
    None,
    "an index selects a part of the reference: plgpu.atomic_add(ref.at[idx], val, "
    "mask=mask)",
)


@_PART
def atomic_add(
    ref: types.Ref,
    val: Any,
    *,
    mask: Any = None,
    sem: Order = "relaxed",
    scope: Scope = None,
    optimized: bool = True,
) -> jax.Array:
    """Adds to elements of a reference, each addition at once.

    PTX: red.add or atom.add, relaxed by default, for each element. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp. Complete when the old
    values are used, or at the next barrier of the issuer. Atomic operations of all CTAs
    on one element take effect one after the other, in any order: sums of floats depend
    on it. Relaxed ones order no other accesses; the others do so for all threads of the
    issuer, which meet at a barrier.

    Args:
      ref: SMEM or GMEM reference, or a part of one, of int32, uint32, int64, uint64,
        float16, bfloat16, float32 or float64. Subnormal float32 in GMEM count as 0.
      val: of the reference's shape and dtype; a scalar is broadcast. A part that index
        arrays select, `ref.at[i]`, may have an element several times: all of the values
        are added.
      mask: bools of a shape that broadcasts to the reference's. Where it is False no
        memory is accessed: index arrays may be out of bounds there.
      sem: "relaxed" (default); "release": the issuer's earlier accesses happen before
        what follows an "acquire" that reads the element afterwards, also behind atomic
        operations of others in between; "acquire"; "acq_rel": both. Copies by TMA are
        ordered by their waits and fences alone. PTX: .sem; a barrier of the issuer
        before a release and after an acquire.
      scope: whom the operation is atomic with, and ordered: "cta", "cluster", "gpu" or
        "sys". None (default): all who can access the memory on this GPU; "sys" for
        another device's memory. For memory that other devices update, too, pass "sys".
        PTX: .scope.
      optimized: a hint that this compiler does not use: each element is an instruction.

    Returns:
      The old elements; zeros where the mask is False. Not loaded unless they are used.

    Raises:
      MemorySpaceError: the reference is a barrier, or is in TMEM or registers.
      DTypeError: no such operation exists for the element type.
      ShapeError: the value or the mask does not fit the reference.
      KernelError: the reference is an input of the kernel.
      ArgumentError: the scope is too narrow for the memory.

    Example:
      >>> plgpu.atomic_add(histogram_ref.at[bins], 1)
    """
    return _bind("atomic_add", ref, {"value": val}, mask, sem, scope)


def _update[T: Callable[..., Any]](
    like: T, name: str, instruction: str, does: str, elements: str, more: str = ""
) -> T:
    """Returns another update with the parameters of `atomic_add`."""

    def update(
        ref: types.Ref,
        val: Any,
        *,
        mask: Any = None,
        sem: Order = "relaxed",
        scope: Scope = None,
        optimized: bool = True,
    ) -> jax.Array:
        return _bind(name, ref, {"value": val}, mask, sem, scope)

    update.__name__ = update.__qualname__ = name
    update.__doc__ = f"""{does}, at once.

    PTX: red.{instruction} or atom.{instruction}, relaxed by default, for each element.
    Since: sm_90.

    Issued and complete as `atomic_add`.{more}

    Args:
      ref: SMEM or GMEM reference, or a part of one, of {elements}
      val: as of `atomic_add`.
      mask, sem, scope: as of `atomic_add`.
      optimized: a hint, as of `atomic_add`.

    Returns:
      The old elements; zeros where the mask is False. Not loaded unless they are used.

    Raises:
      MemorySpaceError, DTypeError, ShapeError, KernelError, ArgumentError: as
        `atomic_add`.
    """
    made: Any = _PART(update)
    return made


_OF_INTEGERS = "int32, uint32, int64 or uint64."
_OF_NUMBERS = """int32, uint32, int64, uint64,
        float32 or float64. Floats are compared as integers: -0 is less than 0, a NaN in
        `val` is the {}, and a NaN in memory is so {}."""
atomic_max = _update(
    atomic_add, "atomic_max", "max",
    "Replaces elements of a reference by the larger of them and a value",
    _OF_NUMBERS.format("largest", "unless its sign bit is set"),
)  # fmt: skip
atomic_min = _update(
    atomic_add, "atomic_min", "min",
    "Replaces elements of a reference by the smaller of them and a value",
    _OF_NUMBERS.format("smallest", "only if its sign bit is set"),
)  # fmt: skip
atomic_and = _update(
    atomic_add, "atomic_and", "and",
    "Replaces elements of a reference by their bitwise AND with a value", _OF_INTEGERS,
)  # fmt: skip
atomic_or = _update(
    atomic_add, "atomic_or", "or",
    "Replaces elements of a reference by their bitwise OR with a value", _OF_INTEGERS,
    """ A static 0 is how to read what others update
    meanwhile: of 32 bits in GMEM, relaxed or acquired, it is a load, ld.relaxed or
    ld.acquire.""",
)  # fmt: skip
atomic_xor = _update(
    atomic_add, "atomic_xor", "xor",
    "Replaces elements of a reference by their bitwise XOR with a value", _OF_INTEGERS,
)  # fmt: skip


@_PART
def atomic_xchg(
    ref: types.Ref,
    val: Any,
    *,
    mask: Any = None,
    sem: Order = "relaxed",
    scope: Scope = None,
) -> jax.Array:
    """Stores values to elements of a reference and returns the old ones, at once.

    PTX: atom.exch, relaxed by default, for each element. Since: sm_90.

    Issued and complete as `atomic_add`.

    Args:
      ref: SMEM or GMEM reference, or a part of one, of int32, uint32, int64, uint64,
        float32 or float64.
      val: as of `atomic_add`.
      mask, sem, scope: as of `atomic_add`.

    Returns:
      The old elements; zeros where the mask is False.

    Raises:
      MemorySpaceError, DTypeError, ShapeError, KernelError, ArgumentError: as
        `atomic_add`.
    """
    return _bind("atomic_xchg", ref, {"value": val}, mask, sem, scope)


@expect.arguments()
def atomic_cas(
    ref: types.Ref,
    cmp: Any,
    val: Any,
    *,
    mask: Any = None,
    sem: Order = "relaxed",
    scope: Scope = None,
) -> jax.Array:
    """Stores values to elements of a reference that equal others, at once.

    PTX: atom.cas, relaxed by default, for each element. Since: sm_90.

    Issued and complete as `atomic_add`.

    Args:
      ref: SMEM or GMEM reference, or a part of one, `ref.at[idx]`, of elements of 16,
        32 or 64 bits. Floats are compared by their bits.
      cmp: what an element has to be, of the reference's shape and dtype or a scalar.
      val: what it then becomes, of the reference's shape and dtype or a scalar.
      mask, sem, scope: as of `atomic_add`. Where the element is another, nothing is
        released.

    Returns:
      The old elements, equal to `cmp` where `val` was stored; zeros where the mask is
      False.

    Raises:
      MemorySpaceError, DTypeError, ShapeError, KernelError, ArgumentError: as
        `atomic_add`.

    Example:
      >>> free = plgpu.atomic_cas(lock_ref.at[0], 0, 1, sem="acquire") == 0
    """
    return _bind("atomic_cas", ref, {"compare": cmp, "value": val}, mask, sem, scope)


# --- what the operations compute ------------------------------------------------------


def largest_nan(dtype: np.dtype, sign: bool) -> np.ndarray:
    """The bits, as a signed integer, of the NaN that orders beyond all floats.

    Args:
      dtype: of the float.
      sign: whether it is less than all others, rather than greater.
    """
    bits = 8 * dtype.itemsize
    return np.array(-1 if sign else (1 << bits - 1) - 1, f"int{bits}")
