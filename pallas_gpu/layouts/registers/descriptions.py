# SPDX-License-Identifier: Apache-2.0
"""Descriptions of register layouts by users: tiled, strided or splat.

Each description is a frozen value; `.linear(shape)` turns it into the canonical
`LinearLayout`. Two descriptions of the same placement have equal linear forms.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from pallas_gpu import expect
from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts.drawing.drawing import Drawable
from pallas_gpu.layouts.registers.linear import THREADS, WARP_LANES, WARPS, LinearLayout


class TiledDim(NamedTuple):
    """One dimension of the tiled shape: `size` steps of `stride` elements
    along logical axis `axis` (negative, counted from the minor one)."""

    axis: int
    size: int
    stride: int


def _tiles(value: Any, what: str) -> tuple[tuple[int, ...], ...]:
    if not expect.is_sequence(value):
        raise expect.wrong_type(
            what, "a sequence of tiles", "tiles such as ((64, 8), (2,))", value,
            "write a tuple of tuples of sizes",
        )  # fmt: skip
    return tuple(expect.integers()(tile, f"{what}: a tile") for tile in value)


@expect.arguments(tiles=_tiles)
@dataclasses.dataclass(frozen=True)
class Tiling:
    """Splits the trailing dimensions by a sequence of tiles.

    A tile of rank k replaces the k minor dimensions by their tile counts followed by
    the tile itself; the next tile then splits that tile.

      >>> Tiling(((64, 8), (2,))).tile_shape((128, 32))
      (2, 4, 64, 4, 2)

    Raises:
      LayoutError: no tile, an empty one, a size below 1, ranks that grow, or a tile
        that does not divide the one before.
    """

    tiles: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        tiles = self.tiles
        ranks = [len(tile) for tile in tiles]
        if not tiles or min(ranks) == 0 or ranks != sorted(ranks, reverse=True):
            raise LayoutError(
                "a tiling needs at least one tile, and ranks that do not grow",
                expected="non-empty tiles such as ((64, 8), (8, 8), (2,))",
                got=tiles,
            )
        if any(size < 1 for tile in tiles for size in tile):
            raise LayoutError("tile sizes must be positive", got=tiles)
        for outer, inner in itertools.pairwise(tiles):
            tail = outer[len(outer) - len(inner) :]
            if any(o % i for o, i in zip(tail, inner, strict=True)):
                raise LayoutError(
                    "each tile must divide the one before it",
                    expected=f"a divisor of {tail}",
                    got=inner,
                )

    def __repr__(self) -> str:
        return "Tiling" + "".join(f"({', '.join(map(str, t))})" for t in self.tiles)

    @property
    def rank(self) -> int:
        """The number of trailing dimensions that the tiling splits."""
        return len(self.tiles[0])

    @expect.arguments(shape=expect.integers(0))
    def tile_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape after tiling.

        Raises:
          LayoutError: the first tile does not divide the trailing dimensions.
        """
        shape = tuple(shape)
        grid = self.grid(shape)
        return (*grid, *(dim.size for dim in self.dims))

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The untiled leading dimensions, then the counts of first tiles."""
        shape = tuple(shape)
        lead = len(shape) - self.rank
        base = self.tiles[0]
        if lead < 0 or any(s % t for s, t in zip(shape[lead:], base, strict=False)):
            raise LayoutError(
                "the tiling does not divide the shape",
                expected=f"trailing dimensions that are multiples of {base}",
                got=f"shape {shape}",
                hint="pad the array or choose another layout",
            )
        counts = tuple(s // t for s, t in zip(shape[lead:], base, strict=True))
        return shape[:lead] + counts

    @functools.cached_property
    def dims(self) -> tuple[TiledDim, ...]:
        """The dimensions that make up one first tile, major to minor."""
        base = self.tiles[0]
        dims = [TiledDim(i - self.rank, size, 1) for i, size in enumerate(base)]
        for tile in self.tiles[1:]:
            head, tail = dims[: -len(tile)], dims[-len(tile) :]
            counts = [
                TiledDim(d.axis, d.size // t, d.stride * t)
                for d, t in zip(tail, tile, strict=True)
            ]
            inner = [
                TiledDim(d.axis, t, d.stride) for d, t in zip(tail, tile, strict=True)
            ]
            dims = head + counts + inner
        return tuple(dims)


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class Replicated:
    """A warp or lane dim along which threads hold copies of the same data.

    Args:
      times: number of copies, a power of two.

    Raises:
      LayoutError: it is not.
    """

    times: int

    def __post_init__(self) -> None:
        if self.times < 1 or self.times & (self.times - 1):
            raise LayoutError(
                "a replication count must be a power of two", got=self.times
            )

    def __repr__(self) -> str:
        return f"Replicated({self.times})"


PartitionDim = int | Replicated


def _dims(value: Any, what: str) -> tuple[PartitionDim, ...]:
    dims = value if expect.is_sequence(value) else ()
    static = [d if isinstance(d, Replicated) else expect.index(d) for d in dims]
    found = tuple(d for d in static if d is not None)
    if expect.is_sequence(value) and len(found) == len(static):
        return found
    raise expect.wrong_type(
        what,
        "a sequence of dims",
        "negative integers and Replicated(n)",
        value,
        "write e.g. (-3, -2)",
    )


class Description(Drawable):
    """A description of a layout; inline code has them, too."""

    def to_mgpu(self) -> Self:
        """The layout of `mosaic.FragmentedArray`s in inline code: the same."""
        return self


@expect.arguments(
    tiling=expect.instance(Tiling, written="plgpu.Tiling(((64, 8), (2,)))"),
    warp_dims=_dims,
    lane_dims=_dims,
)
@dataclasses.dataclass(frozen=True)
class TiledLayout(Description):
    """Distributes the dimensions of a tiling over warps, lanes and one register.

    Dimensions of the tiled shape are given by negative index. The remaining dimensions
    enumerate the registers.

    Args:
      tiling: the tiles.
      warp_dims: dims partitioned over the 4 warps, major to minor, or `Replicated(n)`.
      lane_dims: dims partitioned over the 32 lanes, major to minor, or `Replicated(n)`.
      vector_dim: the dim whose elements share a register.

    Raises:
      LayoutError: a dim is repeated, not negative or out of range, or the products are
        not 4 and 32.

      >>> wgmma = TiledLayout(Tiling(((64, 8), (16, 8), (8, 8), (2,))),
      ...                     warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)
    """

    tiling: Tiling
    warp_dims: tuple[PartitionDim, ...]
    lane_dims: tuple[PartitionDim, ...]
    vector_dim: int

    def __post_init__(self) -> None:
        named = [d for d in self._partition if isinstance(d, int)]
        count = len(self.tiling.dims)
        if any(not -count <= d < 0 for d in named) or len(set(named)) != len(named):
            raise LayoutError(
                "dims of a layout must be negative, distinct and inside the tiles",
                expected=f"distinct dims from {-count} to -1",
                got=f"warp {self.warp_dims}, lane {self.lane_dims}, "
                f"vector {self.vector_dim}",
            )
        for name, dims, total in (
            ("warp", self.warp_dims, WARPS),
            ("lane", self.lane_dims, WARP_LANES),
        ):
            product = math.prod(self._size(d) for d in dims)
            if product != total:
                raise LayoutError(
                    f"{name} dims must cover all {total} {name}s of a "
                    f"{'warpgroup' if name == 'warp' else 'warp'}",
                    expected=f"a product of {total}",
                    got=f"{product} from {dims} in {self.tiling.dims}",
                )
        vector = self.tiling.dims[self.vector_dim]
        if vector.size > 1 and vector.stride != 1:
            raise LayoutError(
                "the elements of a register must be adjacent",
                expected="a vector dim of stride 1",
                got=f"stride {vector.stride}",
                hint="use the innermost dim of an axis as the vector dim",
            )

    @property
    def _partition(self) -> tuple[PartitionDim, ...]:
        return (*self.warp_dims, *self.lane_dims, self.vector_dim)

    def _size(self, dim: PartitionDim) -> int:
        return dim.times if isinstance(dim, Replicated) else self.tiling.dims[dim].size

    @property
    def vector_length(self) -> int:
        """Elements per register."""
        return self.tiling.dims[self.vector_dim].size

    @property
    def base_tile_shape(self) -> tuple[int, ...]:
        """The trailing dimensions of an array must be multiples of this."""
        return self.tiling.tiles[0]

    @expect.arguments(shape=expect.integers(0))
    def linear(self, shape: Sequence[int]) -> LinearLayout:
        """The placement of an array of `shape`.

        Raises:
          LayoutError: the tiles do not divide the shape.
        """
        return _tiled_linear(self, tuple(shape))

    @expect.arguments()
    def reduce(self, axes: int | Sequence[int]) -> TiledLayout:
        """The layout of the array after a reduction over `axes` of the tiled shape.

        Threads that differed along a dropped axis hold copies.

        Raises:
          LayoutError: an axis is outside of the tiles, or no axis would remain.
        """
        rank = self.tiling.rank
        given = (axes,) if isinstance(axes, int) else tuple(axes)
        dropped = {a if a < 0 else a - rank for a in given}
        if any(not -rank <= a < 0 for a in dropped) or len(dropped) == rank:
            raise LayoutError(
                "a reduction of a tiled layout must keep at least one of its axes",
                expected=f"fewer than {rank} axes of rank {rank}",
                got=given,
            )
        return _reduce_tiled(self, frozenset(dropped))


@functools.lru_cache(maxsize=1024)
def _tiled_linear(layout: TiledLayout, shape: tuple[int, ...]) -> LinearLayout:
    tiling = layout.tiling
    rank = len(shape)
    grid = tiling.grid(shape)
    strides = (1,) * (rank - tiling.rank) + tiling.tiles[0]
    outer = [
        TiledDim(i - rank, n, s)
        for i, (n, s) in enumerate(zip(grid, strides, strict=True))
    ]
    count = len(tiling.dims)
    taken = {d + count for d in layout._partition if isinstance(d, int)}
    free = [dim for i, dim in enumerate(tiling.dims) if i not in taken]
    origins = np.zeros((1, rank), dtype=np.int64)
    for dim in (*outer, *free):
        steps = np.arange(dim.size)[:, None] * np.array(_column(dim, rank))
        origins = (origins[:, None] + steps[None]).reshape(-1, rank)
    columns = [
        column
        for dims in (layout.lane_dims, layout.warp_dims)
        for dim in reversed(dims)
        for column in _bit_columns(layout, dim, rank)
    ]
    vector = tiling.dims[layout.vector_dim]
    return LinearLayout.create(
        shape, columns, origins.tolist(), vector.size, vector.axis + rank
    )


def _column(dim: TiledDim, rank: int, scale: int = 1) -> tuple[int, ...]:
    column = [0] * rank
    column[dim.axis] = dim.stride * scale
    return tuple(column)


def _bit_columns(
    layout: TiledLayout, dim: PartitionDim, rank: int
) -> list[tuple[int, ...]]:
    bits = layout._size(dim).bit_length() - 1
    if isinstance(dim, Replicated):
        return [(0,) * rank] * bits
    return [_column(layout.tiling.dims[dim], rank, 1 << b) for b in range(bits)]


def _reduce_tiled(layout: TiledLayout, dropped: frozenset[int]) -> TiledLayout:
    dims = layout.tiling.dims
    tiles = []
    for tile in layout.tiling.tiles:
        rest = tuple(s for i, s in enumerate(tile) if i - len(tile) not in dropped)
        if rest:
            tiles.append(rest)
    kept = [i for i, dim in enumerate(dims) if dim.axis not in dropped]
    vector = layout.vector_dim + len(dims)
    if vector not in kept:
        # The register keeps one element, which needs a dim of its own as vector dim.
        tiles.append((1,))
        kept.append(vector)
    new_index = {old: position - len(kept) for position, old in enumerate(kept)}

    def rename(partition: tuple[PartitionDim, ...]) -> tuple[PartitionDim, ...]:
        result: list[PartitionDim] = []
        for dim in partition:
            if isinstance(dim, int) and dim + len(dims) in new_index:
                result.append(new_index[dim + len(dims)])
                continue
            times = layout._size(dim)
            if result and isinstance(result[-1], Replicated):
                times *= result.pop().times  # type: ignore[union-attr]
            if times > 1:
                result.append(Replicated(times))
        return tuple(result)

    return _drop_idle_tiles(
        tiles, rename(layout.warp_dims), rename(layout.lane_dims), new_index[vector]
    )


def _drop_idle_tiles(
    tiles: list[tuple[int, ...]],
    warp_dims: tuple[PartitionDim, ...],
    lane_dims: tuple[PartitionDim, ...],
    vector_dim: int,
) -> TiledLayout:
    """Removes tiles equal to the end of the preceding one: they only add unit dims."""
    for i in range(1, len(tiles)):
        tile, before = tiles[i], tiles[i - 1]
        if before[len(before) - len(tile) :] != tile:
            continue
        inner = len(Tiling(tuple(tiles[i:])).dims)
        idle = range(-inner - len(tile), -inner)
        named = [d for d in (*warp_dims, *lane_dims, vector_dim) if isinstance(d, int)]
        if any(d in idle for d in named):
            continue

        def shift(dim: PartitionDim, idle=idle) -> PartitionDim:
            return dim + len(idle) if isinstance(dim, int) and dim < idle.start else dim

        return _drop_idle_tiles(
            tiles[:i] + tiles[i + 1 :],
            tuple(shift(d) for d in warp_dims),
            tuple(shift(d) for d in lane_dims),
            int(shift(vector_dim)),  # type: ignore[arg-type]
        )
    return TiledLayout(Tiling(tuple(tiles)), warp_dims, lane_dims, vector_dim)


@expect.arguments(shape=expect.integers(0))
@dataclasses.dataclass(frozen=True)
class WGStridedLayout(Description):
    """Distributes the row-major elements cyclically over threads, `vec_size` at a time.

    Element i is in thread `(i // vec_size) % 128`. It is the default layout of loads
    from untiled references.

    Args:
      shape: the array's shape.
      vec_size: elements per register.

    Raises:
      LayoutError: the array's size is not a multiple of `128 * vec_size`.
    """

    shape: tuple[int, ...]
    vec_size: int

    def __post_init__(self) -> None:
        if self.vec_size < 1 or math.prod(self.shape) % (THREADS * self.vec_size):
            raise LayoutError(
                "a strided layout requires equally many whole vectors per thread",
                expected=f"a multiple of {THREADS} * {self.vec_size} elements",
                got=f"{math.prod(self.shape)} elements in shape {self.shape}",
                hint=_STRIDED_HINT,
            )

    @classmethod
    @expect.arguments(shape=expect.integers(0), bits=expect.integer(1))
    def default(cls, shape: Sequence[int], bits: int) -> WGStridedLayout:
        """Vectors of four elements, or fewer if the size requires it.

        It is the same for all element types of at most 32 bits, so that arrays of equal
        shapes and different types, loaded without a layout, have equal layouts.

        Args:
          shape: the array's shape.
          bits: width of an element.

        Raises:
          LayoutError: the size is not a multiple of 128.
        """
        size = math.prod(shape)
        if size % THREADS:
            raise LayoutError(
                "a strided layout requires equally many elements per thread",
                expected=f"a multiple of {THREADS} elements",
                got=f"{size} elements in shape {tuple(shape)}",
                hint=_STRIDED_HINT,
            )
        return cls(tuple(shape), vector_length(size, bits, THREADS))

    @property
    def vector_length(self) -> int:
        """Elements per register."""
        return self.vec_size

    @property
    def num_registers(self) -> int:
        """Registers per thread."""
        return math.prod(self.shape) // (THREADS * self.vec_size)

    def flat_offset(self, thread: int, register: int) -> int:
        """Row-major index of the first element of a register."""
        return (register * THREADS + thread) * self.vec_size

    def all_coordinates(self) -> np.ndarray:
        """The coordinates of all elements: int64 [128, registers, vector, rank]."""
        vector = np.arange(self.vec_size)
        register = np.arange(self.num_registers) * THREADS * self.vec_size
        thread = np.arange(THREADS) * self.vec_size
        flat = thread[:, None, None] + register[None, :, None] + vector
        return np.stack(np.unravel_index(flat, self.shape), axis=-1)

    @property
    def is_linear(self) -> bool:
        """Whether `linear` succeeds."""
        return _strided_linear(self) is not None

    def linear(self, shape: Sequence[int] | None = None) -> LinearLayout:
        """The placement in canonical form.

        Raises:
          LayoutError: rows and threads are not aligned at powers of two, or `shape` is
            not the layout's.
        """
        _check_same_shape(self, shape)
        layout = _strided_linear(self)
        if layout is None:
            raise LayoutError(
                "this strided layout has no linear form",
                expected="rows and threads that are aligned at powers of two",
                got=f"shape {self.shape}, vectors of {self.vec_size}",
                hint="use it for elementwise work, or choose a tiled layout",
            )
        return layout


def vector_length(size: int, bits: int, threads: int = 1) -> int:
    """The most elements of a register, if threads have equally many whole registers.

    They are at most four, which one access transfers: 16 bytes (PTX ISA, ld).
    """
    length = 1
    while 2 * length <= min(4, 128 // bits) and size % (2 * length * threads) == 0:
        length *= 2
    return length


_STRIDED_HINT = "pad the array, or keep it in a splat or tiled layout"


@functools.lru_cache(maxsize=1024)
def _strided_linear(layout: WGStridedLayout) -> LinearLayout | None:
    try:
        return LinearLayout.from_coordinates(layout.shape, layout.all_coordinates())
    except LayoutError:
        return None


@expect.arguments(shape=expect.integers(0))
@dataclasses.dataclass(frozen=True)
class WGSplatLayout(Description):
    """One register per thread that represents all elements: they are equal.

    Args:
      shape: of the array.

    Raises:
      LayoutError: a placement of more than one element is asked for.
    """

    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(s) for s in self.shape))

    @property
    def vector_length(self) -> int:
        """Elements per register."""
        return 1

    @property
    def num_registers(self) -> int:
        """Registers per thread."""
        return 1

    def linear(self, shape: Sequence[int] | None = None) -> LinearLayout:
        """The placement in canonical form, for a single element.

        Raises:
          LayoutError: there is more than one element. A register that represents
            several has no placement: give the splat the layout it is used with.
        """
        _check_same_shape(self, shape)
        if math.prod(self.shape) != 1:
            raise LayoutError(
                "a splat of several elements does not have a placement",
                expected="one element",
                got=f"shape {self.shape}",
                hint="omit the layout: a splat is broadcast to any layout",
            )
        zero = (0,) * len(self.shape)
        return LinearLayout.create(self.shape, [zero] * 7, [zero])


RegisterLayout = TiledLayout | WGStridedLayout | WGSplatLayout


def _check_same_shape(
    layout: WGStridedLayout | WGSplatLayout, shape: Sequence[int] | None
) -> None:
    if shape is not None and tuple(shape) != layout.shape:
        raise LayoutError(
            "the layout is for a different shape",
            expected=f"shape {layout.shape}",
            got=f"shape {tuple(shape)}",
        )
