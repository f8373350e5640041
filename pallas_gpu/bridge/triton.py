# SPDX-License-Identifier: Apache-2.0
"""JAX's Pallas for Triton: its names, for kernels that change their imports alone.

    # from jax.experimental.pallas import triton as plgpu
    from pallas_gpu import triton as plgpu

The blocks of such a kernel stay in GMEM, and the body loads what it needs of them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect, types
from pallas_gpu.primitives import atomics, inline, registers
from pallas_gpu.primitives.atomics import atomic_cas
from pallas_gpu.types import values as value_rules
from pallas_gpu.types.foreign import INSTEAD

__all__ = [
    "CompilerParams",
    "approx_tanh",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "debug_barrier",
    "dot",
    "elementwise_inline_asm",
    "load",
    "max_contiguous",
    "store",
]

_OPTIONAL_COUNT = expect.optional(expect.integer(1))
_OPTIONAL_WORD = expect.optional(expect.string)


@expect.arguments(num_warps=_OPTIONAL_COUNT, num_stages=_OPTIONAL_COUNT)
def CompilerParams(  # noqa: N802 - a class upstream
    num_warps: int | None = None, num_stages: int | None = None
) -> types.CompilerParams:
    """Returns parameters under which the blocks of a `pallas_call` stay in GMEM.

    Args:
      num_warps: a hint that this compiler does not use: a block has one warpgroup, or
        as many as `num_threads` of `pallas_call` says.
      num_stages: of loops with products: `pallas_gpu.CompilerParams.num_stages`.

    Raises:
      ArgumentError, ArgumentTypeError: not a positive integer.
    """
    del num_warps
    return types.CompilerParams(block_memory_space=types.GMEM, num_stages=num_stages)


@expect.arguments(
    cache_modifier=_OPTIONAL_WORD,
    eviction_policy=_OPTIONAL_WORD,
    volatile=expect.refused(False, "an atomic operation reads what others write"),
)
def load(
    ref: Any,
    *,
    mask: Any = None,
    other: Any = None,
    cache_modifier: str | None = None,
    eviction_policy: str | None = None,
    volatile: bool = False,
) -> jax.Array:
    """Loads a reference into registers, also under a mask: `pallas_gpu.load`.

    Args:
      ref: SMEM or GMEM reference, or a part of one.
      mask, other: as of `pallas_gpu.load`.
      cache_modifier, eviction_policy: hints that this compiler does not use.
      volatile: False; True is refused.

    Returns:
      An array of the reference's shape and dtype.

    Raises:
      KernelError and its classes: as `pallas_gpu.load`.
      UnsupportedError: a volatile load.
    """
    del cache_modifier, eviction_policy, volatile
    return registers.load(ref, mask=mask, other=other)


@expect.arguments(eviction_policy=_OPTIONAL_WORD)
def store(
    ref: Any, val: Any, *, mask: Any = None, eviction_policy: str | None = None
) -> None:
    """Stores an array to a reference, also under a mask: `pallas_gpu.store`.

    Args:
      ref: SMEM or GMEM reference, or a part of one.
      val: of its shape and dtype; a scalar is broadcast.
      mask: as of `pallas_gpu.store`.
      eviction_policy: a hint that this compiler does not use.

    Raises:
      KernelError and its classes: as `pallas_gpu.store`.
    """
    del eviction_policy
    registers.store(ref, (), val, mask=mask)


def _update(name: str) -> Any:
    operation = getattr(atomics, name)

    def update(x_ref_or_view: Any, idx: Any, val: Any, *, mask: Any = None) -> Any:
        ref = x_ref_or_view if idx is None else x_ref_or_view.at[idx]
        return operation(ref, val, mask=mask)

    update.__name__ = update.__qualname__ = name
    update.__doc__ = f"""Updates elements, each at once: `pallas_gpu.{name}`.

    Args:
      x_ref_or_view: SMEM or GMEM reference, or a part of one.
      idx: an index applied to it first; None: all of it.
      val: of the selected shape and dtype.
      mask: as of `pallas_gpu.{name}`.

    Returns:
      The old elements.

    Raises:
      KernelError and its classes: as `pallas_gpu.{name}`.
    """
    return update


atomic_add = _update("atomic_add")
atomic_and = _update("atomic_and")
atomic_max = _update("atomic_max")
atomic_min = _update("atomic_min")
atomic_or = _update("atomic_or")
atomic_xchg = _update("atomic_xchg")
atomic_xor = _update("atomic_xor")


def _precision(value: Any, what: str) -> Any:
    """Accepts what JAX takes for the precision of a product."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda a: jax.lax.dot(a, a, precision=value), one)
    except Exception:
        raise expect.wrong_type(
            what, "a precision", "None, a string or a member of jax.lax.Precision",
            value, 'write "highest" for the precision of float32',
        ) from None  # fmt: skip
    return value


@expect.arguments(precision=_precision)
def dot(
    a: value_rules.Array,
    b: value_rules.Array,
    trans_a: bool = False,
    trans_b: bool = False,
    allow_tf32: bool | None = None,
    precision: Any = None,
) -> jax.Array:
    """Multiplies two matrices: `jax.lax.dot_general`.

    Args:
      a, b: matrices.
      trans_a, trans_b: whether to multiply their transposes.
      allow_tf32: of float32: True for tf32, False for float32's precision.
      precision: as of `jax.lax.dot_general`, in place of `allow_tf32`.

    Returns:
      A matrix of float32; of int32 for integers, and of float64 for float64.

    Raises:
      ShapeError: not two matrices that fit.
      ArgumentError: both `allow_tf32` and `precision`.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1 - trans_a] != b.shape[trans_b]:
        raise errors.ShapeError(
            "dot: not two matrices that fit",
            expected="two dimensions, and one K",
            got=f"shapes {a.shape} and {b.shape}, {trans_a=}, {trans_b=}",
            hint="reshape them, or use jax.lax.dot_general",
        )
    if allow_tf32 is not None:
        if precision is not None:
            raise errors.ArgumentError(
                "dot: allow_tf32 and precision",
                expected="one of them",
                got=f"{allow_tf32=}, {precision=}",
                hint="leave allow_tf32 out",
            )
        precision = "high" if allow_tf32 else "highest"
    kind = jnp.promote_types(a.dtype, b.dtype)
    sums = jnp.float64 if kind == jnp.float64 else jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((1 - trans_a,), (int(trans_b),)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.int32 if jnp.issubdtype(kind, jnp.integer) else sums,
    )


@expect.arguments()
def approx_tanh(x: value_rules.Array) -> jax.Array:
    """Computes tanh; `pallas_gpu.CompilerParams(approx_math=True)` approximates it.

    Args:
      x: an array of float16, bfloat16 or float32.

    Returns:
      An array of the same shape and dtype.

    Raises:
      DTypeError: another dtype.
    """
    if x.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise errors.DTypeError(
            "approx_tanh: there is no approximation for this dtype",
            expected="float16, bfloat16 or float32",
            got=str(x.dtype),
            hint="use jnp.tanh",
        )
    return jnp.tanh(x)


def _arrays(value: Any, what: str) -> tuple[jax.Array, ...]:
    if not expect.is_sequence(value):
        raise expect.wrong_type(
            what, "a sequence", "a sequence of arrays", value, "write args=[x]"
        )
    return tuple(value_rules.array(x, what) for x in value)


def _types(value: Any, what: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    rule = expect.instance(jax.ShapeDtypeStruct, written="jax.ShapeDtypeStruct(...)")
    return tuple(rule(x, what) for x in (value if expect.is_sequence(value) else [0]))


@expect.arguments(args=_arrays, result_shape_dtypes=_types)
def elementwise_inline_asm(
    asm: str,
    *,
    args: Any,
    constraints: str,
    pack: int,
    result_shape_dtypes: Any,
) -> list[jax.Array]:
    """Executes PTX for the elements of arrays: `pallas_gpu.inline_ptx`.

    Args:
      asm: the template; registers of results come first.
      args: arrays of one shape.
      constraints: a hint that this compiler does not use: those of registers follow
        from the element types.
      pack: how many elements the template takes at once.
      result_shape_dtypes: the types of the results, of the shape of the arrays.

    Returns:
      The results.

    Raises:
      ArgumentError, DTypeError: as `pallas_gpu.inline_ptx`.
      ShapeError: the results have another shape than the arrays.
    """
    del constraints
    dtypes = tuple(x.dtype for x in result_shape_dtypes)
    results = list(inline.inline_ptx(asm, *args, dtype=dtypes, pack=pack))
    for x, declared in zip(results, result_shape_dtypes, strict=True):
        if x.shape != declared.shape:
            raise errors.ShapeError(
                "elementwise_inline_asm: a result has another shape than the arrays",
                expected=f"shape {x.shape}",
                got=f"shape {declared.shape}",
                hint="result_shape_dtypes are those of the elements' results",
            )
    return results


def debug_barrier() -> None:
    """Does nothing: a warpgroup synchronizes where operations exchange elements."""


@expect.arguments()
def max_contiguous(x: Any, values: Any) -> Any:
    """Returns `x`: which elements are adjacent is found in the index itself.

    Args:
      x: indices.
      values: a hint that this compiler does not use.

    Returns:
      `x`.
    """
    del values
    return x


# To a type checker this function would mean that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        known = INSTEAD.get(name)
        hint = "" if known is None else f"; instead: {known}"
        raise AttributeError(
            f"module 'pallas_gpu.triton' has no attribute {name!r}{hint}",
            name=name,
            obj=sys.modules[__name__],
        )
