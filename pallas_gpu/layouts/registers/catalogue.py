# SPDX-License-Identifier: Apache-2.0
"""The named register layouts, as data.

Hardware layouts are those of the PTX ISA's figures: wgmma fragments ("Asynchronous
Warpgroup Level Matrix Multiply-Accumulate"), `mma` fragments ("Matrix multiply-
accumulate operation using mma instruction"), `tcgen05.ld` shapes ("Tensor Memory").
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import numpy as np

from pallas_gpu import expect
from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.drawing.drawing import Drawable
from pallas_gpu.layouts.registers.descriptions import (
    RegisterLayout,
    Replicated,
    TiledLayout,
    Tiling,
    WGSplatLayout,
    WGStridedLayout,
)


def _tiled(*tiles: tuple[int, ...], warp, lane, vector: int = -1) -> TiledLayout:
    return TiledLayout(Tiling(tiles), warp, lane, vector)


# Rows 16*warp + lane//4 + 8*i, columns 8*j + 2*(lane%4) + v: the D fragment of
# wgmma.m64nNk16 (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts").
WGMMA = _tiled((64, 8), (16, 8), (8, 8), (2,), warp=(-7,), lane=(-3, -2))
# The same placement in registers of one 32-bit element.
WGMMA_ACC_32BIT = _tiled(
    (64, 8), (16, 8), (8, 8), (2,), (1,), warp=(-8,), lane=(-4, -3)
)
# The A fragment of wgmma with 8-bit elements: four adjacent elements per register.
WGMMA_8BIT = _tiled((64, 16), (16, 16), (8, 16), (4,), warp=(-7,), lane=(-3, -2))
# The A fragment of wgmma with 32-bit elements: one element per register.
WGMMA_32BIT = _tiled((64, 4), (16, 4), (8, 4), (1,), warp=(-7,), lane=(-3, -2))
# 8-bit data such that widening to 16 bits yields WGMMA after one exchange of lanes.
WGMMA_UPCAST_2X = _tiled(
    (64, 16), (16, 16), (8, 16), (8,), (4,), warp=(-8,), lane=(-4, -2, -3)
)
# 4-bit data to be widened twice.
WGMMA_UPCAST_4X = _tiled((64, 32), (16, 32), (8, 32), (8,), warp=(-7,), lane=(-3, -2))
# Vectors run along rows: for loads and stores of the transposed array.
WGMMA_TRANSPOSED = _tiled(
    (64, 8), (16, 8), (8, 8), (2, 2), (2, 1), warp=(-10,), lane=(-6, -3, -5), vector=-2
)
WGMMA_ROW = WGMMA.reduce(1)
WGMMA_COL = WGMMA.reduce(0)

# As WGMMA, with 32 rows per warp: tcgen05.ld.16x256b, twice.
TCGEN05 = _tiled((128, 8), (32, 8), (8, 8), (2,), warp=(-7,), lane=(-3, -2))
TCGEN05_TRANSPOSED = _tiled(
    (128, 8), (32, 8), (8, 8), (2, 2), (2, 1), warp=(-10,), lane=(-6, -3, -5), vector=-2
)
TCGEN05_ROW = TCGEN05.reduce(1)
TCGEN05_COL = TCGEN05.reduce(0)

# Row indices of gather4 and scatter4: four per warp, or the same four in each.
TMA_INDICES = _tiled((16,), (4,), warp=(-2,), lane=(Replicated(32),))
TMA_INDICES_4 = _tiled((4,), warp=(Replicated(4),), lane=(Replicated(32),))


@expect.arguments("Layout.WG_STRIDED", shape=expect.integers(0))
def wg_strided(shape: Sequence[int], vec_size: int) -> WGStridedLayout:
    """Row-major element i is in thread `(i // vec_size) % 128`."""
    return WGStridedLayout(tuple(shape), vec_size)


@expect.arguments("Layout.WG_SPLAT", shape=expect.integers(0))
def wg_splat(shape: Sequence[int] = ()) -> WGSplatLayout:
    """All elements are equal, and every thread holds them."""
    return WGSplatLayout(tuple(shape))


@expect.arguments("Layout.TCGEN05_TMEM_NATIVE", vector_length=expect.integer(1))
def tcgen05_tmem_native(vector_length: int = 2) -> TiledLayout:
    """One row per thread, as loaded by `tcgen05.ld.32x32b`."""
    v = vector_length
    return _tiled((128, v), (32, v), warp=(-4,), lane=(-2,))


@expect.arguments("Layout.TCGEN05_M64_COLLECTIVE")
def tcgen05_m64_collective(columns: int) -> TiledLayout:
    """One CTA's half (64 rows) of an M=128 accumulator of two CTAs."""
    _check_columns(columns)
    return _tiled(
        (64, columns), (32, columns // 2), (8, 8), (2,), warp=(-6, -7), lane=(-3, -2)
    )


@expect.arguments(
    "Layout.TCGEN05_M64_COLLECTIVE_NATIVE", vector_length=expect.integer(1)
)
def tcgen05_m64_collective_native(columns: int, vector_length: int = 2) -> TiledLayout:
    """The same half with one row per thread."""
    _check_columns(columns)
    tiles = ((64, columns), (32, columns // 2), (vector_length,))
    return _tiled(*tiles, warp=(-4, -5), lane=(-3,))


def _element(value: Any, what: str) -> Any:
    """Accepts an element type, or its width in bits."""
    width = expect.index(value)
    if width is not None and width not in (2, 4, 8, 16, 32, 64):
        width, value = None, None
    try:
        known = width is not None or (value is not None and np.dtype(value) is not None)
    except Exception:
        known = False
    if known and not hasattr(value, "shape"):
        return value if width is None else width
    raise expect.wrong_type(
        what, "an element type", "an element type, or its width in bits", value,
        "write e.g. jnp.float16, or 16",
    )  # fmt: skip


@expect.arguments("Layout.MMA_LHS", dtype=_element)
def mma_lhs(dtype: Any, m_warps: int = 4) -> TiledLayout:
    """The A fragment of `mma.sync.m16n8kK`, `m_warps` warps along the rows.

    Args:
      dtype: element type, or its width in bits: 4, 8, 16 or 32 (tf32). A register
        holds 32 bits.
      m_warps: 1, 2 or 4; the array is replicated over the remaining factor of warps.
    """
    e, rest = _elements_per_word(dtype), _other_warps(m_warps)
    k = 8 * e
    copies = (Replicated(rest),) if rest > 1 else ()
    warp = (-7, *copies) if m_warps > 1 else copies
    tiles = ((16 * m_warps, k), (16, k // 2), (8, k // 2), (e,))
    return _tiled(*tiles, warp=warp, lane=(-3, -2))


@expect.arguments("Layout.MMA_RHS", dtype=_element)
def mma_rhs(dtype: Any, m_warps: int = 4) -> TiledLayout:
    """The B fragment of `mma.sync.m16n8kK` for an array of shape (K, N)."""
    e, n = _elements_per_word(dtype), _other_warps(m_warps)
    k = 8 * e
    copies = (Replicated(m_warps),) if m_warps > 1 else ()
    warp = (*copies, -5) if n > 1 else copies
    tiles = ((k, 8 * n), (k // 2, 8), (e, 1))
    return _tiled(*tiles, warp=warp, lane=(-3, -4), vector=-2)


def _element_or_warps(value: Any, what: str) -> Any:
    """Accepts an element type, or a number of warps along the rows."""
    warps = expect.index(value)
    return _element(value, what) if warps not in (1, 2, 4) else warps


@expect.arguments("Layout.MMA_ACC", dtype=expect.optional(_element_or_warps))
def mma_acc(dtype: Any = None, m_warps: int | None = None) -> TiledLayout:
    """The C and D fragment of `mma.sync.m16n8kK` with 32-bit accumulators.

    Args:
      dtype: element type of the operands, whose width `mma.sync` must have; the layout
        is the same for all. A single integer, as in `MMA_ACC(2)`, is `m_warps`.
      m_warps: 1, 2 or 4, 4 by default: the number of warps along the rows.
    """
    if m_warps is None:
        dtype, m_warps = (None, dtype) if isinstance(dtype, int) else (dtype, 4)
    if dtype is not None:
        _elements_per_word(dtype)
    n = _other_warps(m_warps)
    tiles = ((16 * m_warps, 8 * n), (16, 8), (8, 8), (2,))
    return _tiled(*tiles, warp=(-7, -6), lane=(-3, -2))


@expect.arguments(
    "Layout.SMEM_GMEM_COPY",
    shape=expect.integers(1),
    dtype=_element,
    swizzle=expect.choice_of(16, 32, 64, 128),
)
def smem_gmem_copy(shape: Sequence[int], dtype: Any, swizzle: int) -> TiledLayout:
    """A layout for copies through registers between GMEM and tiled SMEM.

    The tile is 8 rows of `swizzle` bytes. Each warp accesses whole tiles, each thread
    at most 16 bytes at a time, so accesses on both sides are runs of `swizzle` bytes.
    The warps are arranged 4x1, 2x2 or 1x4 over the tiles.

    Raises:
      LayoutError: the tiles do not divide the shape.
    """
    bits = element_bits(dtype)
    if len(shape) < 2:
        raise LayoutError("a tiled array has rows and columns", got=f"shape {shape}")
    rows, columns = tuple(shape)[-2:]
    minor = swizzle * 8 // bits
    # 8 rows of `swizzle` bytes over 32 lanes, capped at one 16-byte access.
    vector = min(8 * minor // 32, 128 // bits)
    chunks = minor // vector
    lane_rows = 32 // chunks
    for warp_rows in (4, 2, 1):
        warp_columns = 4 // warp_rows
        if rows % (8 * warp_rows) == 0 and columns % (minor * warp_columns) == 0:
            tiles = (
                (8 * warp_rows, minor * warp_columns),
                (8, minor),
                (lane_rows, minor),
                (vector,),
            )
            return _tiled(*tiles, warp=(-7, -6), lane=(-3, -2))
    raise LayoutError(
        "no arrangement of four warps over the SMEM tiles fits the shape",
        expected=f"four tiles of (8, {minor}) in a row, a square or a column",
        got=f"shape {tuple(shape)}",
        hint="choose a smaller swizzle or a larger array",
    )


def element_bits(dtype: Any) -> int:
    """The width of an element type in bits; an int is the width itself."""
    if isinstance(dtype, int) and not isinstance(dtype, bool):
        return dtype
    name = np.dtype(dtype).name
    digits = re.search(r"\d+", name)
    # NumPy and XLA store a bool in a byte, and its name does not state a width.
    return int(digits.group()) if digits else 8


def _elements_per_word(dtype: Any) -> int:
    bits = element_bits(dtype)
    if bits not in (4, 8, 16, 32):
        raise LayoutError(
            "mma.sync has no fragment of 32-bit registers with such elements",
            expected="elements of 4, 8, 16 or 32 bits",
            got=f"{bits} bits",
            hint="convert the array to a narrower type first",
        )
    return 32 // bits


def _other_warps(m_warps: int) -> int:
    if m_warps not in (1, 2, 4):
        raise LayoutError(
            "the warps along the rows must divide a warpgroup",
            expected="1, 2 or 4",
            got=m_warps,
        )
    return 4 // m_warps


def _check_columns(columns: int) -> None:
    if columns < 16 or columns % 16:
        raise LayoutError(
            "this layout requires whole 8-column tiles in both halves",
            expected="a multiple of 16 columns",
            got=columns,
        )


class Layout(Drawable, enum.Enum):
    """The layouts by name. Those that need parameters are called.

    >>> plgpu.layout_cast(x, plgpu.Layout.WGMMA)
    >>> plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED((64, 64), vec_size=2))
    """

    WGMMA = enum.auto()
    WGMMA_ROW = enum.auto()
    WGMMA_COL = enum.auto()
    WGMMA_8BIT = enum.auto()
    WGMMA_32BIT = enum.auto()
    WGMMA_UPCAST_2X = enum.auto()
    WGMMA_UPCAST_4X = enum.auto()
    WGMMA_TRANSPOSED = enum.auto()
    WGMMA_ACC_32BIT = enum.auto()

    WG_STRIDED = enum.auto()
    WG_SPLAT = enum.auto()
    TILED = enum.auto()
    SMEM_GMEM_COPY = enum.auto()

    TCGEN05 = enum.auto()
    TCGEN05_ROW = enum.auto()
    TCGEN05_COL = enum.auto()
    TCGEN05_TRANSPOSED = enum.auto()
    TCGEN05_TMEM_NATIVE = enum.auto()
    TCGEN05_M64_COLLECTIVE = enum.auto()
    TCGEN05_M64_COLLECTIVE_NATIVE = enum.auto()

    MMA_LHS = enum.auto()
    MMA_RHS = enum.auto()
    MMA_ACC = enum.auto()

    TMA_INDICES = enum.auto()
    TMA_INDICES_4 = enum.auto()

    @expect.arguments(lambda self, *_, **__: f"Layout.{self.name}")
    def __call__(self, *args: Any, **kwargs: Any) -> RegisterLayout:
        """The layout with parameters.

        Raises:
          LayoutError: the layout does not have these parameters.
        """
        make = definitions()[self.name]
        if not callable(make):
            raise LayoutError(
                f"Layout.{self.name} has no parameters", got=f"{args} {kwargs}"
            )
        try:
            return make(*args, **kwargs)
        except TypeError as error:
            raise LayoutError(
                f"Layout.{self.name} was called with the wrong parameters", got=error
            ) from None

    def to_layout(self) -> RegisterLayout:
        """The description with this name.

        Raises:
          LayoutError: the layout has parameters without defaults.
        """
        definition = definitions()[self.name]
        return self() if callable(definition) else definition

    def to_mgpu(self, *args: Any, **kwargs: Any) -> RegisterLayout:
        """The layout of `mosaic.FragmentedArray`s in inline code.

        Args:
          *args, **kwargs: the parameters of the layout, if it has any.

        Raises:
          LayoutError: the layout has other parameters.
        """
        return self(*args, **kwargs) if args or kwargs else self.to_layout()

    @expect.arguments()
    def reduce(self, axes: int | Sequence[int]) -> TiledLayout:
        """The layout after a reduction over `axes`; see `TiledLayout.reduce`.

        Raises:
          LayoutError: the layout is not a tiled one.
        """
        layout = self.to_layout()
        if not isinstance(layout, TiledLayout):
            raise LayoutError(
                "only tiled layouts can be reduced",
                expected="a tiled layout, e.g. Layout.WGMMA",
                got=f"Layout.{self.name}",
            )
        return layout.reduce(axes)


@functools.cache
def definitions() -> dict[str, RegisterLayout | Callable[..., RegisterLayout]]:
    """Layouts without parameters, and functions for the others, by name."""
    makers: dict[str, RegisterLayout | Callable[..., RegisterLayout]] = {
        "TILED": TiledLayout,
        "WG_STRIDED": wg_strided,
        "WG_SPLAT": wg_splat,
        "SMEM_GMEM_COPY": smem_gmem_copy,
        "TCGEN05_TMEM_NATIVE": tcgen05_tmem_native,
        "TCGEN05_M64_COLLECTIVE": tcgen05_m64_collective,
        "TCGEN05_M64_COLLECTIVE_NATIVE": tcgen05_m64_collective_native,
        "MMA_LHS": mma_lhs,
        "MMA_RHS": mma_rhs,
        "MMA_ACC": mma_acc,
    }
    fixed = {m.name: globals()[m.name] for m in Layout if m.name not in makers}
    return {**fixed, **makers}


def to_layout(layout: Layout | RegisterLayout) -> RegisterLayout:
    """Resolves a name of the catalogue; returns a description unchanged."""
    match layout:
        case Layout():
            return layout.to_layout()
        case TiledLayout() | WGStridedLayout() | WGSplatLayout():
            return layout
        case _:
            assert_never(layout)
