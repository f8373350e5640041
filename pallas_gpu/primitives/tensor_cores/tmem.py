# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: loads to registers, stores from them, and their waits.

Copies from SMEM to TMEM (`tcgen05.cp`) are in `operand_copy` and `scales`: they are
asynchronous like an MMA, and `tcgen05_commit_arrive` tracks them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import arch, errors, expect, types
from pallas_gpu.layouts import Replicated
from pallas_gpu.layouts.registers.placement import place_registers
from pallas_gpu.layouts.tmem.access import register_layouts, transfers
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.registers import check_layout

__all__ = ["async_load_tmem", "async_store_tmem", "wait_load_tmem", "commit_tmem"]

async_load_tmem_p = registry.define(
    "async_load_tmem",
    "tmem",
    result=lambda operands, **_: operands["src"].array_type(),
    reads=("src",),
    asynchronous=True,
    feature=arch.Feature.TMEM,
    by_warp=False,
)
async_store_tmem_p = registry.define(
    "async_store_tmem",
    "tmem",
    writes=("ref",),
    asynchronous=True,
    feature=arch.Feature.TMEM,
    by_warp=False,
)
wait_load_tmem_p = registry.define(
    "wait_load_tmem", "tmem", feature=arch.Feature.TMEM, waits=True, by_warp=False
)
commit_tmem_p = registry.define(
    "commit_tmem", "tmem", feature=arch.Feature.TMEM, by_warp=False
)

# The lowering emits `tcgen05.ld.red` for what these make of a load, where it can.
_REDUCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "max": lambda x: jnp.max(x, axis=-1),
    "min": lambda x: jnp.min(x, axis=-1),
    "absmax": lambda x: jnp.max(jnp.abs(x), axis=-1),
    "absmin": lambda x: jnp.min(jnp.abs(x), axis=-1),
}


@expect.arguments(reduce=expect.choice(None, *_REDUCTIONS))
def async_load_tmem(
    src: types.Ref, *, layout: Any = None, reduce: str | None = None
) -> Any:
    """Starts a load from tensor memory; its values can be used at once.

    PTX: tcgen05.ld.sync.aligned; for the target sm_103a tcgen05.ld.red, where a maximum
    or minimum along the columns of what is loaded is computed and each thread loads a
    row (`Layout.TCGEN05_TMEM_NATIVE`, elements of 32 bits). Since: sm_100a.

    Issued by a warpgroup. Uses of the values wait for them by themselves, and it is in
    order with stores of the warpgroup; whoever else overwrites the columns afterwards,
    a `tcgen05_mma`, a copy or another warpgroup, needs a `wait_load_tmem()` before.
    `ref[...]` is the same with that wait.

    Args:
      src: TMEM reference, or a part of its columns. Of one with leading dimensions the
        matrices are loaded one after another.
      layout: register layout of a matrix, one that an instruction leaves: of 128 rows
        `Layout.TCGEN05` or `Layout.TCGEN05_TMEM_NATIVE`, of 64 `Layout.WGMMA` or
        `Layout.TCGEN05_M64_COLLECTIVE`. None: the compiler chooses.
      reduce: "max", "min", "absmax" or "absmin": also returns what that makes of the
        loaded elements along the last dimension, NaN if one of them is; as
        `jnp.max(loaded, axis=-1)` and the like do.

    Returns:
      The elements, in the reference's dtype; with `reduce`, they and the reduced ones.

    Raises:
      MemorySpaceError: the reference is not in TMEM.
      LayoutError: no instruction loads the array to the layout, or the part does not
        consist of whole columns.
      ArgumentError: there is no such `reduce`.

    Example:
      >>> plgpu.barrier_wait(mma_done)
      >>> out_smem[...] = plgpu.async_load_tmem(acc).astype(jnp.float16)
    """
    who = "async_load_tmem"
    ops.require_space(src, types.TMEM, who, "the source")
    layout = check_layout(layout, who)
    loaded = _load(types.as_view(src), layout)
    if reduce is None:
        return loaded
    return loaded, _REDUCTIONS[reduce](loaded)


@expect.arguments()
def async_store_tmem(ref: types.Ref, value: jax.Array) -> None:
    """Starts a store to tensor memory.

    PTX: tcgen05.st.sync.aligned. Since: sm_100a.

    Issued by a warpgroup. It is in order with the loads and stores of the warpgroup.
    `commit_tmem()` waits for it: before that, nothing else is ordered after it, no
    `tcgen05_mma`, no copy and no arrival of a barrier. `ref[...] = value` is the same
    with that wait.

    Args:
      ref: TMEM reference, or a part of its columns. Of one with leading dimensions the
        matrices are stored one after another.
      value: array of its shape and dtype.

    Raises:
      MemorySpaceError: the reference is not in TMEM.
      ShapeError, DTypeError: the value does not have its shape or dtype.
      LayoutError: the part does not consist of whole columns.
    """
    who = "async_store_tmem"
    ops.require_space(ref, types.TMEM, who, "the destination")
    view = types.as_view(ref)
    _store(view, types.stored(value, view))


def _load(view: types.RefView, layout: Any) -> jax.Array:
    if types.has_parts(view):
        return jnp.stack([_load(view.at[i], layout) for i in range(len(view))])
    return ops.bind(async_load_tmem_p, {"src": view}, layout=layout)


def _store(view: types.RefView, value: jax.Array) -> None:
    if types.has_parts(view):
        for i in range(len(view)):
            _store(view.at[i], value[i])
        return
    ops.bind(async_store_tmem_p, {"ref": view, "value": value})


def places(view: types.RefView) -> dict[str, jax.Array]:
    """Where the elements of a part of an array lie, from the array's first column.

    Returns:
      The lane, the column, and where elements share columns the bit in it: int32 arrays
      of the part's shape.
    """
    aval = types.base_aval(view)
    layout, window = aval.storage.layout, types.resolve(aval.shape, view.transforms)
    coordinates = []
    for axis, start in enumerate(window.starts):
        index = start if isinstance(start, int) else start.total(operator.add)
        if axis in window.axes:
            index += lax.broadcasted_iota(
                jnp.int32, window.shape, window.axes.index(axis)
            )
        coordinates.append(index)

    def number(digits: Sequence[Any]) -> jax.Array:
        result = jnp.zeros(window.shape, jnp.int32)
        for digit in digits:
            if isinstance(digit, Replicated):
                result = result * digit.times
                continue
            index = lax.div(coordinates[digit.axis], jnp.int32(digit.stride))
            result = result * digit.size + lax.rem(index, jnp.int32(digit.size))
        return result

    matrix = tuple(aval.shape[-2:])
    digits = layout.digits(matrix)
    earlier = 0
    for size, index in zip(aval.shape[:-2], coordinates, strict=False):
        earlier = earlier * size + index
    column = number(digits.column) + earlier * layout.columns(matrix)
    found = {"lane": number(digits.lane), "column": column}
    if layout.packing > 1:
        found["bit"] = number(digits.position) * types.itemsize_bits(aval.dtype)
    return found


def wait_load_tmem() -> None:
    """Waits until the loads of the warpgroup have read tensor memory.

    PTX: tcgen05.wait::ld, and a barrier of the warpgroup between
    tcgen05.fence::before_thread_sync and tcgen05.fence::after_thread_sync.
    Since: sm_100a.

    Issued by the warpgroup that has loaded; afterwards it may overwrite the columns, as
    may those that it signals by a barrier with `orders_tensor_core`.

    Raises:
      KernelError: called outside a kernel.
    """
    ops.bind(wait_load_tmem_p, {})


def commit_tmem() -> None:
    """Waits until the stores of the warpgroup to tensor memory are complete.

    PTX: tcgen05.wait::st, and a barrier of the warpgroup between
    tcgen05.fence::before_thread_sync and tcgen05.fence::after_thread_sync.
    Since: sm_100a.

    Issued by the warpgroup that has stored; afterwards it may load the values or
    multiply them, as may those that it signals by a barrier with `orders_tensor_core`.

    Raises:
      KernelError: called outside a kernel.
    """
    ops.bind(commit_tmem_p, {})


# --- the complete kernel --------------------------------------------------------------


@registry.checks(async_load_tmem_p, async_store_tmem_p)
def _check_transfer(op: Any, mesh: types.Mesh) -> None:
    for access in op.accesses:
        check_transfer(access.buffer.aval, access.window, op.params.get("layout"))


def check_part(aval: Any, window: Window) -> None:
    """Raises unless a part is all rows and a range of columns, of whole tiles."""
    rank = len(window.array_shape)
    if (
        window.axes != (rank - 2, rank - 1)
        or window.sizes[-2] != window.array_shape[-2]
    ):
        raise errors.UnsupportedError(
            "an array in TMEM is indexed by rows, by a single column, or transposed",
            expected="all rows and a range of columns: ref.at[:, 0:64], behind any "
            "part of the dimensions before them",
            got=f"sizes {window.sizes} of {window.array_shape}, axes {window.axes}",
            hint="load it, and index or transpose the value",
        )
    tile = aval.storage.layout.base_tile_shape[1]
    start, size = window.starts[-1], window.sizes[-1]
    if size % tile or (isinstance(start, int) and start % tile):
        raise errors.LayoutError(
            "a part of an array in TMEM does not consist of whole tiles",
            expected=f"a start and a size that are multiples of {tile} columns, in "
            f"{aval.storage.layout}",
            got=f"{size} columns from {start if isinstance(start, int) else 'a value'}",
            hint="slice at multiples of the tile, or declare an array for each part",
        )


def check_transfer(aval: Any, window: Window, layout: Any) -> None:
    """Raises LayoutError unless an instruction transfers a part; None: any layout."""
    stored, bits = aval.storage.layout, types.itemsize_bits(aval.dtype)
    shape = window.shape
    if layout is None:
        if next(register_layouts(stored, shape, bits), None) is not None:
            return
        raise errors.LayoutError(
            "no instruction transfers an array with this layout in TMEM",
            expected="elements that fill 32-bit columns, or one of 16 bits to a column",
            got=f"{stored}, elements of {bits} bits",
            hint="pack the array's elements, or copy it from SMEM",
        )
    if transfers(place_registers(layout, shape), stored, bits):
        return
    raise errors.LayoutError(
        "async_load_tmem: no instruction loads the array to this register layout",
        expected="Layout.TCGEN05 or TCGEN05_TMEM_NATIVE for 128 rows, Layout.WGMMA or "
        "TCGEN05_M64_COLLECTIVE for 64",
        got=f"{layout} from {stored}, elements of {bits} bits",
        hint="omit the layout, and apply layout_cast to the result",
    )
