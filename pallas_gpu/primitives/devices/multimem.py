# SPDX-License-Identifier: Apache-2.0
"""Accesses to the memory of all devices at once: NVLink SHARP's multimem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import arch, errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.copies import views
from pallas_gpu.primitives.devices.peers import collective_axes, multicast_ref

__all__ = ["multimem_load_reduce", "multimem_store"]

multimem_store_p = registry.define(
    "multimem_store", "multimem", writes=("dst",), multicast=("dst",)
)


def _needs_of_float8(op: Any) -> Iterator[tuple[arch.Feature, str]]:
    if op.results[0].dtype.itemsize == 1:
        yield arch.Feature.MULTIMEM_FLOAT8, "a multimem_load_reduce of float8"


multimem_load_reduce_p = registry.define(
    "multimem_load_reduce",
    "multimem",
    result=lambda operands, **_: operands["src"].array_type(),
    reads=("src",),
    multicast=("src",),
    needs=_needs_of_float8,
)

_INTEGERS = ("int32", "uint32", "int64", "uint64")
_HALVES = ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
# The element types of each reduction: PTX ISA, multimem.ld_reduce.
REDUCTIONS: dict[str, tuple[str, ...]] = {
    "add": (*_INTEGERS, *_HALVES, "float32"),
    "min": (*_INTEGERS, *_HALVES),
    "max": (*_INTEGERS, *_HALVES),
    "and": _INTEGERS,
    "or": _INTEGERS,
    "xor": _INTEGERS,
}
# The narrowest access of multimem.
WORD_BITS = 32


@expect.arguments(collective_axes=collective_axes)
def multimem_store(
    source: Any, ref: types.Ref, collective_axes: str | Sequence[str]
) -> None:
    """Stores an array to the memory of all devices; each gets the same.

    PTX: multimem.st.relaxed.sys.global.f32, of vectors of up to 128 bits. Since: sm_90,
    and devices that are connected by an NVSwitch with multicast.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns, for
    the issuer. `semaphore_signal` and `semaphore_signal_multicast` come after it, and
    who waits for them sees the stored values.

    Args:
      source: array in registers, of the reference's shape and dtype; a scalar is
        broadcast. Elements narrower than 32 bits are adjacent in the array's registers
        and in memory, in words of 32 bits.
      ref: GMEM reference, or a part of one.
      collective_axes: all axes of the mesh of the `jax.shard_map` around the call.

    Raises:
      MemorySpaceError: the reference is not in GMEM.
      ShapeError, DTypeError: the array does not fit the reference.
      KernelError, AxisNameError, UnsupportedError, ArgumentError: as `multicast_ref`.
      LayoutError: elements that do not fill words in registers.

    Example:
      >>> plgpu.multimem_store(x_ref[...], o_ref.at[i], "x")
    """
    who = "multimem_store"
    _require_gmem(ref, who)
    view = views.plain(multicast_ref(ref, collective_axes), who)
    _require_words(view, who)
    ops.bind(multimem_store_p, {"dst": view, "value": types.stored(source, view)})


@expect.arguments(
    collective_axes=collective_axes, reduction_op=expect.choice(*REDUCTIONS)
)
def multimem_load_reduce(
    ref: types.Ref, *, collective_axes: str | Sequence[str], reduction_op: str
) -> jax.Array:
    """Loads an array from the memory of all devices, and combines what they have.

    PTX: multimem.ld_reduce.relaxed.sys.global, of vectors of up to 128 bits of floats,
    and of single integers. Since: sm_90 (float8: sm_100a), and devices that are
    connected by an NVSwitch with multicast.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns. It
    reads what the devices have stored before signals that the issuer has waited for.

    Args:
      ref: GMEM reference, or a part of one.
      collective_axes: all axes of the mesh of the `jax.shard_map` around the call.
      reduction_op: "add": int32, uint32, int64, uint64, float32, float16, bfloat16,
        float8_e5m2, float8_e4m3fn. "min", "max": the same without float32. "and", "or",
        "xor": the integers. The order of a sum of floats is the hardware's.

    Returns:
      An array of the reference's shape and dtype. Under Lane its layout is that of
      `layout_cast` applied to it.

    Raises:
      MemorySpaceError: the reference is not in GMEM.
      DTypeError: the reduction does not exist for the elements.
      KernelError, AxisNameError, UnsupportedError, ArgumentError: as `multicast_ref`.
      LayoutError: elements that do not fill words in registers.

    Example:
      >>> total = plgpu.multimem_load_reduce(
      ...     x_ref.at[i], collective_axes="x", reduction_op="add"
      ... )
    """
    who = "multimem_load_reduce"
    _require_gmem(ref, who)
    view = views.plain(multicast_ref(ref, collective_axes), who)
    _require_words(view, who)
    name = jnp.dtype(view.dtype).name
    if name not in REDUCTIONS[reduction_op]:
        raise errors.DTypeError(
            f"{who}: no load combines these elements by {reduction_op!r}",
            expected=", ".join(REDUCTIONS[reduction_op]),
            got=types.describe(view),
            hint="load from each device with remote_ref, and combine in registers",
        )
    return ops.bind(multimem_load_reduce_p, {"src": view}, reduction_op=reduction_op)


def _require_gmem(ref: Any, who: str) -> None:
    ops.require_space(ref, types.GMEM, who, "the reference")


def _require_words(view: types.RefView, who: str) -> None:
    """Raises ShapeError unless the elements can fill words."""
    together = WORD_BITS // types.itemsize_bits(view.dtype)
    longer = [size for size in view.shape if size > 1]
    if together > 1 and (not longer or longer[-1] % together):
        raise errors.ShapeError(
            f"{who}: the elements do not fill words of {WORD_BITS} bits",
            expected=f"a last dimension that is a multiple of {together}",
            got=types.describe(view),
            hint="pad the last dimension",
        )
