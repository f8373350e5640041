# SPDX-License-Identifier: Apache-2.0
"""wgmma: Hopper's tensor core instruction, its groups, its accumulators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import arch, errors, expect, types
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives._engines import Side
from pallas_gpu.primitives.copies import views
from pallas_gpu.primitives.tensor_cores import products
from pallas_gpu.types import values

__all__ = ["wgmma", "wgmma_wait", "wgmma_accumulator_load"]

wgmma_p = registry.define(
    "wgmma",
    "wgmma",
    reads=("acc", "a", "b"),
    writes=("acc",),
    asynchronous=True,
    feature=arch.Feature.WGMMA,
    by_warp=False,
)
wgmma_wait_p = registry.define(
    "wgmma_wait", "wgmma", feature=arch.Feature.WGMMA, waits=True, by_warp=False
)
accumulator_load_p = registry.define(
    "wgmma_accumulator_load",
    "wgmma",
    result=lambda operands, **_: operands["acc"].array_type(),
    reads=("acc",),
    feature=arch.Feature.WGMMA,
    by_warp=False,
)

# PTX ISA, wgmma.mma_async: element types of A and B, and of D for each.
_FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
_INT8 = (jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8))
_ACCUMULATORS: dict[Any, tuple[Any, ...]] = {
    jnp.dtype(jnp.float16): (jnp.float32, jnp.float16),
    jnp.dtype(jnp.bfloat16): (jnp.float32,),
    jnp.dtype(jnp.float32): (jnp.float32,),
    **dict.fromkeys(_FLOAT8, (jnp.float32, jnp.float16)),
    **dict.fromkeys(_INT8, (jnp.int32,)),
}
# Bytes (PTX ISA, wgmma matrix descriptor): inference tiles an operand for one of them.
_SWIZZLES = (32, 64, 128)
_MAX_COLUMNS = 256


@expect.arguments()
def wgmma(acc: types.Ref, a: types.Ref | jax.Array, b: types.Ref) -> None:
    """Starts `acc += a @ b` on the tensor core.

    PTX: wgmma.fence, wgmma.mma_async.sync.aligned, wgmma.commit_group. Since: sm_90a.

    Issued by a warpgroup. It is asynchronous: `wgmma_wait(n)` or a read of the
    accumulator waits for it, and until then SMEM operands may not be overwritten. One
    call is one group. Values that threads stored to SMEM need a `commit_smem()` before.
    float32 operands are read as tf32 (10 bits of mantissa).

    Args:
      acc: accumulator (M, N), or a part of its columns.
      a: (M, K) SMEM reference, or an array in registers (16-bit types in
        `Layout.WGMMA`, 8-bit types in `Layout.WGMMA_8BIT`, float32 in
        `Layout.WGMMA_32BIT`).
      b: (K, N) SMEM reference. SMEM operands need TilingTransform((8, swizzle width))
        and a SwizzleTransform of 32, 64 or 128 bytes; Warpgroup semantics infers them
        for arrays declared without. A reference stored transposed is passed as `ref.T`;
        8-bit types and float32 require K in the minor dimension: `a` not transposed,
        `b` as the `.T` of an (N, K) reference.

    Raises:
      ArgumentTypeError: `acc` is not an accumulator.
      MemorySpaceError: an operand is in another space.
      ShapeError, DTypeError: the tensor core does not support the shapes or types.
      LayoutError: an SMEM operand without the tiling and swizzle.
    """
    who = "wgmma"
    _require_accumulator(acc, who)
    ops.require_space(b, types.SMEM, who, "b")
    a_is_ref = types.base_aval(a) is not None
    if a_is_ref:
        ops.require_space(a, types.SMEM, who, "a")
    else:
        a = values.array(a, f"{who}: a")
    _check_types(acc, a, b)
    _check_shapes(acc, a, b)
    a, b = views.plain(a, f"{who}: a") if a_is_ref else a, views.plain(b, f"{who}: b")
    for name, operand in (("a", a), ("b", b)) if a_is_ref else (("b", b),):
        check_storage(operand, name)
    ops.bind(wgmma_p, {"acc": acc, "a": a, "b": b})


def _require_accumulator(acc: Any, who: str) -> None:
    if isinstance(types.base_aval(acc), types.AccumulatorRef):
        return
    raise errors.ArgumentTypeError(
        f"{who}: not an accumulator",
        expected="a reference declared with plgpu.ACC((M, N), dtype)",
        got=types.describe(acc),
        hint="declare it in scratch_types (pallas_call: scratch_shapes), "
        "run_scoped or run_state",
    )


def _check_types(acc: Any, a: Any, b: Any) -> None:
    a_type, b_type = jnp.dtype(a.dtype), jnp.dtype(b.dtype)
    of_a_kind = any(a_type in k and b_type in k for k in (_FLOAT8, _INT8))
    if a_type != b_type and not of_a_kind:
        raise errors.DTypeError(
            "wgmma: the operands have different element types",
            expected="one type for both, or two 8-bit types, both floats or integers",
            got=f"{a_type.name} and {b_type.name}",
            hint="convert one of them before it is stored to SMEM",
        )
    accumulators = _ACCUMULATORS.get(a_type)
    if accumulators is None:
        raise errors.DTypeError(
            "wgmma: the tensor core does not support this operand type",
            expected=", ".join(d.name for d in _ACCUMULATORS),
            got=a_type.name,
            hint="convert the operands",
        )
    if jnp.dtype(acc.dtype) not in map(jnp.dtype, accumulators):
        raise errors.DTypeError(
            f"wgmma: {a_type.name} operands cannot accumulate in this type",
            expected=" or ".join(jnp.dtype(d).name for d in accumulators),
            got=jnp.dtype(acc.dtype).name,
            hint="declare the accumulator with that type: plgpu.ACC(shape, dtype)",
        )


def _check_shapes(acc: Any, a: Any, b: Any) -> None:
    products.require_shapes(acc, a, b, "wgmma")
    products.require_depth(a, "wgmma")
    m, n = acc.shape
    if m % types.WGMMA_ROWS or n % types.WGMMA_COLUMNS or n > _MAX_COLUMNS:
        raise errors.ShapeError(
            "wgmma: the tensor core has no instruction of this shape",
            expected=f"M a multiple of {types.WGMMA_ROWS}, N a multiple of "
            f"{types.WGMMA_COLUMNS} up to {_MAX_COLUMNS}",
            got=f"M = {m}, N = {n}",
            hint="split N into parts: acc.at[:, :n] and b.at[:, :n]",
        )


def check_storage(operand: Any, name: str) -> None:
    """Raises LayoutError for an SMEM operand that the tensor core does not read."""
    aval = types.base_aval(operand)
    side = Side.at(ops.RefOperand(aval, ops.operand(operand).transforms))
    window, layout = side.window, side.layout
    _require_matrix(window, name)
    if not aval.transforms:
        _check_inferable(aval, layout, window, name)
        _check_major(operand, window, name)
        return
    elements = layout.swizzle * 8 // layout.itemsize_bits
    if layout.tiling != (8, elements) or layout.swizzle == 16:
        raise storage_error(aval, name)
    if not _has_whole_tiles(window, (8, elements)):
        raise _cut_tiles(
            window,
            name,
            f"starts and sizes that are multiples of {(8, elements)}, the tiling",
            "slice at multiples, or store it with a narrower swizzle and its tiling",
        )
    _check_major(operand, window, name)


def _check_inferable(aval: Any, used: SmemLayout, window: Window, name: str) -> None:
    """Raises LayoutError where no tiling and swizzle fit an array without them."""
    bits = types.itemsize_bits(aval.dtype)
    tiles = [(8, 8 * swizzle // used.itemsize_bits) for swizzle in _SWIZZLES]
    for tile, swizzle in zip(tiles, _SWIZZLES, strict=True):
        try:
            stored = SmemLayout.of(aval.shape, bits, (8, 8 * swizzle // bits), swizzle)
            layout = stored.reinterpreted(used.shape, used.itemsize_bits)
        except errors.LayoutError:
            continue
        if layout.tiling == tile and _has_whole_tiles(window, tile):
            return
    raise _cut_tiles(
        window,
        name,
        "an array, and starts and sizes, that are multiples of "
        f"{' or '.join(map(str, tiles))}, tiles of the tensor core",
        "pad the array, or slice at multiples"
        if used.shape == aval.shape
        else "declare the array in that shape, or with transforms",
    )


def storage_error(aval: Any, name: str, who: str = "wgmma") -> errors.PallasGpuError:
    """Returns the error for an operand without the transforms of the tensor core.

    Under Lane semantics the author specifies them; under Warpgroup semantics they are
    inferred for an array that has none.
    """
    wanted = 128 * 8 // types.itemsize_bits(aval.dtype)
    return errors.LayoutError(
        f"{who}: {name} is not stored in a layout that the tensor core reads",
        expected="TilingTransform((8, n)) and SwizzleTransform(s), s = 32, 64 or 128 "
        "bytes and n elements s bytes wide",
        got=", ".join(t.describe() for t in aval.transforms) or "no transforms",
        hint=f"declare it with transforms=(plgpu.TilingTransform((8, {wanted})), "
        "plgpu.SwizzleTransform(128))",
    )


def _require_matrix(window: Window, name: str) -> None:
    rank = len(window.sizes)
    kept = sorted(window.axes)
    if kept == [rank - 2, rank - 1]:
        return
    raise errors.LayoutError(
        f"wgmma: {name} is not a matrix of the last two dimensions of its array",
        expected="an integer index in all dimensions before them",
        got=f"dimensions {kept} of {window.array_shape}",
        hint="declare the array with the matrix in its last two dimensions",
    )


def _ranges(window: Window) -> list[tuple[int, int]]:
    """Returns the ranges of the matrix; dynamic starts are multiples of a tile, as the
    author guarantees."""
    return [
        (start if isinstance(start, int) else 0, size)
        for start, size in zip(window.starts[-2:], window.sizes[-2:], strict=True)
    ]


def _has_whole_tiles(window: Window, tile: tuple[int, int]) -> bool:
    ranges = zip(_ranges(window), tile, strict=True)
    return all(start % t == 0 and size % t == 0 for (start, size), t in ranges)


def _cut_tiles(
    window: Window, name: str, expected: str, hint: str
) -> errors.LayoutError:
    ranges = _ranges(window)
    return errors.LayoutError(
        f"wgmma: {name} does not consist of whole tiles",
        expected=expected,
        got=f"starts {tuple(s for s, _ in ranges)}, sizes {tuple(n for _, n in ranges)}"
        f" of {window.array_shape}",
        hint=hint,
    )


def _check_major(operand: Any, window: Window, name: str) -> None:
    k_is_minor = window.is_transposed if name == "b" else not window.is_transposed
    if k_is_minor or jnp.dtype(operand.dtype).itemsize == 2:
        return
    raise errors.LayoutError(
        f"wgmma: {name} is stored with K in the major dimension",
        expected="K in the minor dimension: the hardware transposes 16-bit types only",
        got=f"{types.describe(operand)}, a part of {window.array_shape}",
        hint="store it as (N, K) and pass ref.T"
        if name == "b"
        else "store it as (M, K)",
    )


_PENDING = expect.integer(0, hint="0 waits for all")


@expect.arguments(n=_PENDING)
def wgmma_wait(n: int) -> None:
    """Waits until at most `n` calls of `wgmma` are pending.

    PTX: wgmma.wait_group.sync.aligned. Since: sm_90a.

    Issued by the warpgroup that started them; afterwards the SMEM operands of the older
    calls may be overwritten.

    Args:
      n: maximum number of pending calls.

    Raises:
      ArgumentError: `n` is negative.
    """
    ops.bind(wgmma_wait_p, {}, n=n, if_supported=False)


def wait_for_products() -> None:
    """Waits for all calls of `wgmma`, of which a target without it has none."""
    ops.bind(wgmma_wait_p, {}, n=0, if_supported=True)


@expect.arguments(wait_n=expect.optional(_PENDING))
def wgmma_accumulator_load(acc: types.Ref, *, wait_n: int | None = 0) -> jax.Array:
    """Reads an accumulator.

    PTX: wgmma.wait_group, then no instruction: the values are in registers.
    Since: sm_90a.

    Issued by a warpgroup. `acc[...]` is the same with `wait_n=0`.

    Args:
      acc: an accumulator, or a part of its columns.
      wait_n: maximum number of pending calls of `wgmma`, on other accumulators. None
        does not wait: the author has waited before.

    Returns:
      The values, in `Layout.WGMMA`.

    Raises:
      ArgumentTypeError: `acc` is not an accumulator.
      ArgumentError: `wait_n` is negative.
    """
    who = "wgmma_accumulator_load"
    _require_accumulator(acc, who)
    return ops.bind(accumulator_load_p, {"acc": acc}, wait_n=wait_n)


# --- parts of accumulators ------------------------------------------------------------

_GRANULE = (types.WGMMA_ROWS, types.WGMMA_COLUMNS)


def check_part(window: Window, *, stored: bool) -> None:
    """Raises unless the part consists of registers known at compile time."""
    if window.dynamic or window.axes != (0, 1):
        raise errors.UnsupportedError(
            "an accumulator is transposed or indexed dynamically",
            expected="static ranges, e.g. of columns: acc.at[:, 0:64]",
            got=_describe(window),
            hint="registers have no addresses: read it with acc[...], and store the "
            "value to SMEM to index or transpose it",
        )
    if stored and not window.is_whole:
        raise errors.UnsupportedError(
            "a store to a part of an accumulator",
            expected="a store of the whole accumulator: acc[...] = value",
            got=f"a part of shape {window.shape} of {window.array_shape}",
            hint="declare one accumulator for each part",
        )
    whole = all(
        start % granule == 0 and size % granule == 0
        for start, size, granule in zip(
            window.starts, window.sizes, _GRANULE, strict=True
        )
    )
    if not whole:
        raise errors.LayoutError(
            "a part of an accumulator does not consist of whole tiles",
            expected=f"starts and sizes that are multiples of {_GRANULE}",
            got=_describe(window),
            hint="read the whole accumulator and select with jnp.where, or store it to "
            "SMEM and slice that",
        )


def _describe(window: Window) -> str:
    parts = []
    for axis, (start, size) in enumerate(zip(window.starts, window.sizes, strict=True)):
        if not isinstance(start, int):
            parts.append("a value")
        elif axis in window.axes:
            parts.append(f"{start} to {start + size}")
        else:
            parts.append(f"{start}")
    turned = ", transposed" if window.is_transposed else ""
    return f"[{', '.join(parts)}] of {window.array_shape}{turned}"
