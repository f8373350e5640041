# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: declarations, their layouts, and the columns that they occupy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import arch, errors, expect
from pallas_gpu.layouts import TmemKind, TmemLayout
from pallas_gpu.layouts.drawing.drawing import Drawable
from pallas_gpu.layouts.tmem.layout import COLUMN_BITS, LANES
from pallas_gpu.types.mesh import Mesh
from pallas_gpu.types.spaces.memory_space import (
    MemorySpace,
    ScratchType,
    declares,
    static_shape,
)
from pallas_gpu.types.spaces.resource import Storage
from pallas_gpu.types.transforms import itemsize_bits

_HALF_LANES = LANES // 2
# tcgen05.mma reads whole columns of these.
_FULL_COLUMNS = (
    TmemKind.SCALES,
    TmemKind.SCALES_M64_COLLECTIVE,
    TmemKind.SPARSE_METADATA,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TmemStorage(Storage):
    """How an array is stored in TMEM.

    Leading dimensions of an array of more than two are spread over the columns.

    Attributes:
      layout: where the elements of the last two dimensions lie.
      collective: the array is allocated by a pair of CTAs (PTX: cta_group::2).
    """

    layout: TmemLayout
    collective: bool

    @property
    def packed(self) -> bool:
        """Whether several elements share a column."""
        return self.layout.packing > 1

    def columns(self, shape: Sequence[int]) -> int:
        """Returns how many columns of 32 bits an array occupies.

        Raises:
          LayoutError: the layout does not fit the shape.
        """
        return math.prod(shape[:-2]) * self.layout.columns(shape[-2:])

    def __str__(self) -> str:
        return f"{self.layout}{', collective' if self.collective else ''}"


class Tmem(MemorySpace):
    """Tensor memory of one SM: 128 lanes by 512 columns of 32 bits.

    An array has 128 or 64 rows, or those of its layout; its minor dimension runs along
    the columns. A block allocates the columns of all its arrays at once.
    PTX: tcgen05.alloc. Since: sm_100a.

    Args:
      shape: positive static sizes, rows and columns last.
      dtype: element type.
      packed: whether elements narrower than 32 bits share a column.
      collective: whether a pair of CTAs allocates the array.
      layout: a TmemLayout, instead of `packed`.

    Raises:
      ShapeError, DTypeError, LayoutError: TMEM cannot store such an array.
      ArgumentError: `packed` besides `layout`, or not a bool.
    """

    name = "TMEM"
    unit = "columns"
    # As upstream aligns arrays within the one allocation of a kernel; the scales of 128
    # rows occupy as many columns.
    alignment = 4
    access_rank = 2
    feature = arch.Feature.TMEM
    has_unions = True
    declared_by = "declare it with plgpu.TMEM(shape, dtype)"

    @declares(
        packed=expect.anything, collective=expect.anything, layout=expect.anything
    )
    def __call__(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        packed: bool | None = None,
        collective: bool | None = None,
        layout: TmemLayout | None = None,
    ) -> ScratchType:
        sizes = static_shape(self, shape)
        _require_bool("packed", packed)
        _require_bool("collective", collective)
        bits = _element_bits(dtype)
        if layout is None:
            packing = _packing(dtype, bits, packed)
            layout = _layout(sizes, packing, bool(collective))
        elif packed is not None:
            raise errors.ArgumentError(
                "TMEM: packed and layout exclude each other",
                expected="one of them: a layout says how many elements share a column",
                got=f"packed={packed}, layout={layout}",
                hint="drop packed",
            )
        elif not isinstance(layout, TmemLayout):
            raise errors.ArgumentTypeError(
                "TMEM: layout is not a layout of tensor memory",
                expected="a TmemLayout, e.g. TmemLayout.default(packing=2)",
                got=repr(layout),
                hint="leave it out for the layout of an accumulator",
            )
        storage = TmemStorage(layout=layout, collective=bool(collective))
        return ScratchType(self, sizes, dtype, storage)

    def size(self, aval: Any) -> int:
        return aval.storage.columns(aval.shape)

    def drawn(self, declaration: ScratchType) -> tuple[Drawable, tuple[int, ...]]:
        assert isinstance(declaration.storage, TmemStorage)
        return declaration.storage.layout, declaration.shape[-2:]

    def budget(self, target: arch.GpuTarget) -> int:
        return target.tmem_columns

    def check(self, shape: tuple[int, ...], dtype: Any, storage: Storage) -> None:
        if not isinstance(storage, TmemStorage):
            raise errors.InternalError("an array in TMEM has no TMEM layout")
        _require_rank(shape)
        _require_fit(storage.layout, dtype)
        storage.columns(shape)

    def check_scope(self, declaration: ScratchType, mesh: Mesh) -> None:
        ctas = math.prod(mesh.cluster)
        storage = declaration.storage
        if not isinstance(storage, TmemStorage) or not storage.collective:
            return
        # PTX ISA, tcgen05 "CTA pair": two CTAs of a cluster whose ranks differ in the
        # last bit.
        if ctas % 2:
            raise errors.ArgumentError(
                "TMEM: a collective array needs pairs of CTAs",
                expected="a kernel whose cluster has an even number of CTAs",
                got=f"{ctas}, cluster={mesh.cluster}",
                hint="pass cluster=(2,) and cluster_names, or drop collective",
            )

    def describe(self, aval: Any, shape: Sequence[int]) -> str:
        return f"{super().describe(aval, shape)} in {aval.storage}"

    def check_beside(self, aval: Any, earlier: Sequence[Any]) -> None:
        # PTX ISA, tcgen05: all tcgen05 instructions of a kernel have one cta_group.
        for other in earlier:
            if other.storage.collective != aval.storage.collective:
                raise errors.ArgumentError(
                    "TMEM: a kernel mixes collective arrays with others",
                    expected="collective on all TMEM arrays of a kernel, or on none",
                    got=f"{self.describe(other, other.shape)}, then "
                    f"{self.describe(aval, aval.shape)}",
                    hint="pass the same collective to every declaration",
                )

    def check_union(self, members: Sequence[ScratchType]) -> None:
        if len({m.storage.collective for m in members}) > 1:  # type: ignore[attr-defined]
            raise errors.ArgumentError(
                "RefUnion: some arrays are collective",
                expected="collective on all of them, or on none",
                got="both",
                hint="pass the same collective to every declaration",
            )
        rows = sorted({member.shape[-2] for member in members})
        if len(rows) > 1:
            raise errors.ShapeError(
                "RefUnion: arrays in TMEM have different numbers of rows",
                expected=f"{rows[-1]} rows in each",
                got=", ".join(map(str, rows)),
                hint="pad the smaller ones",
            )


def _require_bool(name: str, value: Any) -> None:
    if not (value is None or isinstance(value, bool)):
        raise errors.ArgumentTypeError(
            f"TMEM: {name} is not a bool",
            expected="True or False",
            got=repr(value),
            hint="leave it out for False",
        )


def _element_bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer):
        bits = itemsize_bits(dtype)
        if bits <= COLUMN_BITS:
            return bits
    raise errors.DTypeError(
        "TMEM: an element does not fit a column",
        expected=f"floats or integers of at most {COLUMN_BITS} bits",
        got=jnp.dtype(dtype).name,
        hint="accumulate in float32",
    )


def _packing(dtype: Any, bits: int, packed: bool | None) -> int:
    """Returns how many elements share a column in the default layouts."""
    if packed is None and bits < COLUMN_BITS:
        raise errors.ArgumentError(
            "TMEM: an element type narrower than a column needs packed or layout",
            expected="packed=True (elements share a column), packed=False (one element "
            "a column) or a layout",
            got=f"{jnp.dtype(dtype).name} without either",
            hint="operands of tcgen05.mma are packed, accumulators are not",
        )
    return COLUMN_BITS // bits if packed else 1


def _require_rank(shape: tuple[int, ...]) -> None:
    if len(shape) < 2:
        raise errors.ShapeError(
            "TMEM: an array needs rows and columns",
            expected="at least two dimensions",
            got=shape,
            hint="add a dimension: (128, n)",
        )


def _layout(shape: tuple[int, ...], packing: int, collective: bool) -> TmemLayout:
    """Returns the layout of an accumulator or a left operand of this shape."""
    _require_rank(shape)
    rows, columns = shape[-2:]
    if rows == LANES:
        return TmemLayout.default(packing)
    if rows != _HALF_LANES:
        raise errors.ShapeError(
            "TMEM: an array has an unsupported number of rows",
            expected=f"{LANES} or {_HALF_LANES} rows, unless layout says otherwise",
            got=f"{rows} rows, shape {shape}",
            hint="declare an array of tiles of 128 rows, (tiles, 128, columns), or an "
            "array for each tile of 128 rows, or pad it",
        )
    if collective:
        return TmemLayout.m64_collective(columns, packing)
    return TmemLayout.half_lane(columns, packing)


def _require_fit(layout: TmemLayout, dtype: Any) -> None:
    bits = _element_bits(dtype)
    full = layout.kind in _FULL_COLUMNS
    used = layout.packing * bits
    if used > COLUMN_BITS or (full and used < COLUMN_BITS):
        raise errors.DTypeError(
            "TMEM: the element type does not fit the layout",
            expected=f"{'' if full else 'at most '}{COLUMN_BITS // layout.packing} "
            f"bits an element for {layout}",
            got=f"{jnp.dtype(dtype).name}, {bits} bits",
            hint="choose a layout with another packing",
        )
