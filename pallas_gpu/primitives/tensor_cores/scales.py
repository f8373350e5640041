# SPDX-License-Identifier: Apache-2.0
"""Scales of blocks of tcgen05's operands: copies to TMEM, and what is admitted."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_gpu import arch, errors, expect, types
from pallas_gpu.layouts.tmem import scaled_instruction as instructions
from pallas_gpu.layouts.tmem.layout import TmemKind
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import pairs

__all__ = ["async_copy_scales_to_tmem"]

async_copy_scales_to_tmem_p = registry.define(
    "async_copy_scales_to_tmem",
    "scales",
    reads=("smem",),
    writes=("tmem",),
    asynchronous=True,
    feature=arch.Feature.TCGEN05,
)

# JAX's names of element types, and PTX's.
OPERANDS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1"}
_SCALES = {"float8_e8m0fnu": "ue8m0", "float8_e4m3fn": "ue4m3"}
_ROWS, _GROUP = instructions.ROWS, instructions.SCALES_PER_COLUMN
# Of a tile of 128 rows by 4 scales in SMEM, and of one of two halves of the columns.
_TILE, _HALVES = (32, 16), (64, 16)


@expect.arguments()
def async_copy_scales_to_tmem(
    smem_ref: types.Ref, tmem_ref: types.Ref, collective_axis: str | None = None
) -> None:
    """Starts a copy of the scales of blocks from SMEM to tensor memory.

    PTX: tcgen05.cp.cta_group::1.32x128b.warpx4, with collective_axis cta_group::2.
    Since: sm_100a.

    Issued by a warpgroup, or inside `warp_map` by a warp; one elected lane issues it.
    It is asynchronous: a later `tcgen05_mma` of the same issuer, or of one behind a
    barrier with `orders_tensor_core`, reads the copied scales; for everyone else,
    and before `smem_ref` is overwritten, a later `tcgen05_commit_arrive`, or the
    barrier of a later `tcgen05_mma`, completes it.

    Args:
      smem_ref: (rows / 128, scales / 4, 32, 16) contiguous SMEM reference: element
        [i, j, r, 4 * q + s] is the scale of row 128 * i + 32 * q + r and block
        4 * j + s along K. Of `b` of a pair of CTAs with 64 rows each (1, scales / 4,
        64, 16): [0, j, 32 * h + r, 4 * q + s] is that of column h * N / 2 + 32 * q + r.
      tmem_ref: (rows, scales) TMEM reference declared with layout
        `layouts.TmemLayout.scales()`; float8_e8m0fnu or float8_e4m3fn, as `smem_ref`.
        Of such a pair (256, scales) with `TmemLayout.scales_m64_collective()`.
      collective_axis: that of a pair of CTAs, the last axis of the cluster: the CTA of
        index 0 starts the copy in both, each from its own SMEM to its own TMEM, which
        is declared with collective=True; in the other one the call does nothing.

    Raises:
      MemorySpaceError: an operand is in another space.
      ShapeError, DTypeError: the shapes or types do not correspond.
      LayoutError: the scales are tiled, swizzled or not contiguous in SMEM, or do not
        have the layout of scales in TMEM.
      ArgumentError: the array in TMEM is that of one CTA and the copy that of two, or
        the other way round.
      AxisNameError: the cluster has no such axis.
      UnsupportedError: the CTAs along the axis are not a pair.

    Example:
      >>> plgpu.async_copy_scales_to_tmem(a_scale_smem, a_scale)
      >>> plgpu.tcgen05_mma(acc, a, b, done, a_scale=a_scale, b_scale=b_scale)
    """
    who = "async_copy_scales_to_tmem"
    collective = pairs.require_copy(smem_ref, tmem_ref, collective_axis, who)
    layout = types.base_aval(tmem_ref).storage.layout
    halved = collective and layout.kind is TmemKind.SCALES_M64_COLLECTIVE
    _require_copied(smem_ref, tmem_ref, who, halved=halved)
    if not halved:
        _require_scales_layout(tmem_ref, f"{who}: the destination")
    require_plain(smem_ref, who)
    ops.bind(
        async_copy_scales_to_tmem_p,
        {"smem": smem_ref, "tmem": tmem_ref},
        collective_axis=collective_axis,
    )


def _require_copied(source: Any, target: Any, who: str, *, halved: bool) -> None:
    dtype = jnp.dtype(target.dtype)
    if jnp.dtype(source.dtype) != dtype or dtype.name not in _SCALES:
        raise errors.DTypeError(
            f"{who}: the types are not those of scales",
            expected=f"one of {', '.join(_SCALES)} in both",
            got=f"{jnp.dtype(source.dtype).name} to {dtype.name}",
            hint="declare both with the type of the scales",
        )
    shape = tuple(target.shape)
    fits = len(shape) == 2 and not shape[0] % _ROWS and not shape[1] % _GROUP
    form = "smem (rows / 128, scales / 4, 32, 16) and tmem (rows, scales)"
    expected = (shape[0] // _ROWS, shape[1] // _GROUP, *_TILE) if fits else None
    if halved:
        fits = fits and shape[0] == 2 * _ROWS
        form = f"smem (1, scales / 4, {_HALVES[0]}, 16) and tmem ({2 * _ROWS}, scales)"
        expected = (1, shape[1] // _GROUP, *_HALVES) if fits else None
    if tuple(source.shape) != expected:
        raise errors.ShapeError(
            f"{who}: the shapes do not correspond",
            expected=form + (f": {expected} for {shape}" if fits else ""),
            got=f"smem {tuple(source.shape)} and tmem {shape}",
            hint="store the scales in tiles of 128 rows by 4 scales",
        )


def _require_scales_layout(ref: Any, what: str) -> None:
    require_layout(ref, what, TmemKind.SCALES, "scales", "dtype", "scales")


def require_layout(
    ref: Any, what: str, kind: TmemKind, of: str, dtype: str, maker: str
) -> None:
    """Raises LayoutError unless a TMEM reference has the layout of an operand.

    Args:
      ref: the reference.
      what: the argument, for messages.
      kind: the layout's.
      of: the operand; dtype: its type as written in a declaration; maker: the method of
        `TmemLayout` that makes the layout.
    """
    layout = types.base_aval(ref).storage.layout
    if layout.kind is kind:
        return
    raise errors.LayoutError(
        f"{what} does not have the layout of {of}",
        expected=f"TmemLayout.{maker}()",
        got=str(layout),
        hint=f"declare it with plgpu.TMEM(shape, {dtype}, "
        f"layout=plgpu.layouts.TmemLayout.{maker}())",
    )


def require_plain(source: Any, who: str) -> None:
    """Raises LayoutError unless an SMEM reference is contiguous, without transforms."""
    aval = types.base_aval(source)
    window = types.resolve(aval.shape, ops.operand(source).transforms)
    rank, last = len(aval.shape), len(source.shape)
    inner = tuple(range(rank - last, rank))
    # Only the first dimension of a contiguous part is a range of several.
    whole = all(window.sizes[i] == aval.shape[i] for i in inner[1:])
    if not aval.transforms and window.axes == inner and whole:
        return
    raise errors.LayoutError(
        f"{who}: the source is not contiguous in SMEM",
        expected="an array without transforms, or a range of its first dimension",
        got=types.describe(source),
        hint="declare it with plgpu.SMEM(shape, dtype), and pass all of it",
    )


# --- operands of tcgen05_mma ----------------------------------------------------------


def require(
    acc: Any, a: Any, b: Any, a_scale: Any, b_scale: Any, *, collective: bool
) -> None:
    """Raises unless an instruction multiplies blocks with these scales.

    The shapes of acc, a and b form a product.
    """
    who = "tcgen05_mma"
    if a_scale is None or b_scale is None:
        raise errors.ArgumentError(
            f"{who}: only one operand has scales",
            expected="both a_scale and b_scale, or neither",
            got="a_scale" if b_scale is None else "b_scale",
            hint="pass scales of 1 for the other operand",
        )
    halved = collective and acc.shape[0] == instructions.HALF_ROWS
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        ops.require_space(scale, types.TMEM, who, name)
        if halved and scale is b_scale:
            kind, maker = TmemKind.SCALES_M64_COLLECTIVE, "scales_m64_collective"
            require_layout(scale, f"{who}: {name}", kind, "scales", "dtype", maker)
        else:
            _require_scales_layout(scale, f"{who}: {name}")
    block = _require_scale_shapes(acc, a, a_scale, b_scale, halved=halved)
    _require_types(acc, (a, b), (a_scale, b_scale), block)


def _require_scale_shapes(
    acc: Any, a: Any, a_scale: Any, b_scale: Any, *, halved: bool
) -> int:
    """Returns the elements of a block."""
    (m, n), k = acc.shape, a.shape[1]
    known = m == _ROWS or (halved and n % instructions.HALVES_STEP == 0)
    if not known or n > instructions.MAX_N:
        raise errors.ShapeError(
            "tcgen05_mma: no block-scaled instruction has this shape",
            expected=f"M = {_ROWS}, N up to {instructions.MAX_N}; of a pair of CTAs "
            f"also M = {instructions.HALF_ROWS} in each, N a multiple of "
            f"{instructions.HALVES_STEP}",
            got=f"M = {m}, N = {n}",
            hint="split N into parts, each with its own scales of b",
        )
    shapes = tuple(a_scale.shape), tuple(b_scale.shape)
    blocks = shapes[0][-1]
    rows = 2 * _ROWS if halved else -(-n // _ROWS) * _ROWS
    if shapes == ((_ROWS, blocks), (rows, blocks)) and not k % blocks:
        return k // blocks
    raise errors.ShapeError(
        "tcgen05_mma: the shapes of the scales do not fit the operands",
        expected=f"a_scale ({_ROWS}, K / block) and b_scale ({rows}, K / block) for "
        f"N = {n}",
        got="a_scale {}, b_scale {}, K = {}".format(*shapes, k),
        hint="round the rows of b_scale up to a multiple of 128",
    )


def _require_types(
    acc: Any, operands: tuple[Any, Any], scales: tuple[Any, Any], block: int
) -> None:
    a, b = (jnp.dtype(x.dtype).name for x in operands)
    sa, sb = (jnp.dtype(x.dtype).name for x in scales)
    into = jnp.dtype(acc.dtype).name
    got = f"{a} @ {b} into {into}, scales {sa} and {sb} of {block} elements each"
    expected: Any = "equal types of scales, and a float32 accumulator"
    if sa == sb and into == "float32":
        try:
            names = OPERANDS.get(a, a), OPERANDS.get(b, b)
            instructions.require_types(*names, _SCALES.get(sa, sa), block)
        except errors.DTypeError as error:
            expected = error.expected
        else:
            return
    raise errors.DTypeError(
        "tcgen05_mma: no block-scaled instruction has these element types",
        expected=expected,
        got=got,
        hint="8-bit floats have float8_e8m0fnu scales of 32 elements; float4_e2m1fn "
        "also of 16, or float8_e4m3fn of 16",
    )
