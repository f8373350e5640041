# SPDX-License-Identifier: Apache-2.0
"""The layouts of arrays in SMEM and TMEM, and what each use of one requires.

An array is stored row-major or in tiles of (8, swizzle bytes), which TMA writes, wgmma
reads, and registers access without bank conflicts. Operations that use an array's
address require it row-major. The user's transforms are binding. In TMEM an array has
the layout of its declaration, which the check pass has compared with what instructions
support.
"""

from __future__ import annotations

from typing import Any

from pallas_gpu import errors, types
from pallas_gpu.layouts import (
    LinearLayout,
    SmemLayout,
    TmaPlan,
    TmemLayout,
    plan_copy,
)
from pallas_gpu.layouts.gmem.im2col import require_adjacent
from pallas_gpu.layouts.gmem.line import line_bytes
from pallas_gpu.layouts.gmem.tma_order import paired_axes
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.layouts.smem.swizzle import NO_SWIZZLE
from pallas_gpu.layouts.smem.wgmma_descriptor import ATOM_ROWS, plan_operand
from pallas_gpu.layouts.smem.window import check_window, contiguous_layout
from pallas_gpu.layouts.window import Window
from pallas_gpu.lowering.inference.network import Array, Use

# SmemLayout for an array in SMEM, TmemLayout for one in TMEM.
type Storage = Any

# Uses that may give each element an address of its own, in any layout.
_BY_ELEMENT = ("load", "store", "indexed")
# The role of an array that tcgen05.cp copies to TMEM.
COPIED = "the source"
# Widest first: the wider a row of a tile, the fewer instructions move the array.
_SWIZZLES = (128, 64, 32)


def storages(array: Array) -> list[Storage]:
    """The candidate layouts of an array, in order of preference."""
    shape, bits = array.base.shape, array.base.bits
    if array.base.given is not None:
        return [array.base.given]
    result = [SmemLayout(shape, bits)]
    for swizzle in _SWIZZLES if len(shape) > 1 else ():
        tile = (ATOM_ROWS, swizzle * 8 // bits)
        if shape[-2] % tile[0] == 0 and shape[-1] % tile[1] == 0:
            result.append(SmemLayout(shape, bits, tile, swizzle))
    required = (use.stored for use in array.uses if use.stored is not None)
    return list(dict.fromkeys([*result, *required]))


def refusal(
    use: Use, storage: Storage, *, free: bool = False
) -> errors.LayoutError | None:
    """The error for a use that does not support a layout of its array, or None.

    If the user chose it, an operation that inference does not know is assumed to
    support it.

    Args:
      free: whether to find it as if the user had not.
    """
    given = use.part.base.given is not None and not free
    if use.part.space is types.TMEM:
        return _tmem_refusal(use, storage)
    if use.stored not in (None, storage):
        return errors.LayoutError(
            "inline code is given an array that is stored in another way than declared",
            expected=use.stored.description,
            got=storage.description,
            hint="declare the array's own transforms in RefType, or use another array",
        )
    try:
        storage = as_used(use, storage)
        if not given and use.kind not in _BY_ELEMENT:
            _check_dynamic_starts(use, storage)
        match use.kind:
            case "pointer":
                if use.stored is not None:
                    _check_part(use, storage)
                elif not given and not storage.is_plain:
                    raise errors.LayoutError(
                        "an operation that uses its address needs an array that is "
                        "stored row-major",
                        expected="no tiling and no swizzle",
                        got=storage.description,
                        hint="access a slice of whole tiles, or use a separate array",
                    )
            case "a" | "b":
                if _is_matrix(use.part.window) and storage.swizzle == NO_SWIZZLE:
                    raise _untiled("wgmma reads", storage, storage.description)
                plan_operand(storage, use.part.window, use.kind)
            case "mma":
                _check_tiles(use, storage)
            case "copy":
                copy_plan(use, storage)
            case "im2col":
                require_adjacent(storage, use.part.window)
            case _ if use.kind in _BY_ELEMENT:
                pass
            case _:
                _check_part(use, storage)
    except errors.LayoutError as error:
        return error
    except errors.UnsupportedError as error:
        return errors.LayoutError(
            error.what, expected=error.expected, got=error.got, hint=error.hint
        )
    return None


def _tmem_refusal(use: Use, storage: TmemLayout) -> errors.LayoutError | None:
    """The error for a use of a part that may start inside a tile, or None."""
    tile, known = storage.base_tile_shape[1], use.part.window.multiples[1]
    if known % tile == 0:
        return None
    return errors.LayoutError(
        f"a part of an array in TMEM may start inside a tile of {tile} columns",
        expected=f"a start known to be a multiple of {tile}, in {storage}",
        got=f"a column known to be a multiple of {known}",
        hint="write the start as a product with the columns of a tile, or promise it "
        "with plgpu.multiple_of",
    )


def as_used(use: Use, storage: SmemLayout) -> SmemLayout:
    """A layout of an array in the shape and type in which an operation uses it.

    Raises:
      LayoutError: its elements have no order of their own in that layout.
    """
    return storage.reinterpreted(use.part.window.array_shape, use.part.bits)


def _check_part(use: Use, storage: SmemLayout) -> None:
    """A part of a tiled array consists of whole tiles."""
    window = use.part.window
    check_window(storage, window.sizes)
    starts = [s if isinstance(s, int) else None for s in window.starts]
    tiled = zip(starts[len(starts) - len(storage.tile) :], storage.tile, strict=True)
    if any(s is not None and s % t for s, t in tiled):
        raise errors.LayoutError(
            "a slice of a tiled reference must start at a tile",
            expected=f"starts that are multiples of tile {storage.tile}",
            got=f"starts {tuple('?' if s is None else s for s in starts)}",
            hint="slice at multiples of the tile, or leave the transforms out",
        )


def _check_dynamic_starts(use: Use, storage: SmemLayout) -> None:
    """Refuses a dynamic start that is not known to be the start of a tile.

    An author who specifies transforms guarantees that it is; so does one who slices an
    operand of wgmma at an index of which nothing is known, because only whole tiles can
    be multiplied.
    """
    window = use.part.window
    lead = len(window.sizes) - len(storage.tile)
    for axis, tile in enumerate(storage.tile, lead):
        known = window.multiples[axis]
        promised = use.kind in ("a", "b", "mma") and known == 1
        if axis in window.dynamic and known % tile and not promised:
            raise errors.LayoutError(
                f"a slice may start inside a tile of {tile}",
                expected=f"a start along axis {axis} known to be a multiple of {tile}",
                got=f"an index known to be a multiple of {known}",
                hint="write the index as a product with the tile size, or specify the "
                "array's transforms, which guarantees it",
            )


def _untiled(who: str, storage: SmemLayout, got: str) -> errors.LayoutError:
    return errors.LayoutError(
        f"{who} tiled and swizzled arrays",
        expected="TilingTransform((8, n)) and SwizzleTransform(s), s = 32, 64 or "
        "128 bytes and n elements s bytes wide",
        got=got,
        hint="pad the array's last two dimensions to multiples of 8 and "
        f"{_SWIZZLES[-1] * 8 // storage.itemsize_bits}, so that tiles fit",
    )


def _check_tiles(use: Use, storage: SmemLayout) -> None:
    """What tcgen05 requires of an array in SMEM: a matrix of swizzled tiles.

    Its copies to TMEM, where the author asks for that, also of tiles without a swizzle.
    """
    row = storage.swizzle * 8 // storage.itemsize_bits
    window = use.part.window
    if (
        not _is_matrix(window)
        or (storage.swizzle == NO_SWIZZLE and use.role != COPIED)
        or storage.tile != (ATOM_ROWS, row)
    ):
        got = f"{storage.description}, axes {window.axes} of the array"
        raise _untiled("tcgen05 reads matrices in", storage, got)
    _check_part(use, storage)
    along_n = use.role == "right operand" and not window.is_transposed
    if use.pieces > 1 and along_n and window.shape[1] // use.pieces % row:
        raise errors.LayoutError(
            "tcgen05 multiplies the halves of the columns apart",
            expected=f"tiles of at most {window.shape[1] // use.pieces} columns",
            got=storage.description,
            hint="pad the columns, or store the operand transposed",
        )


def _is_matrix(window: Window) -> bool:
    """Whether a part has the last two axes of its array and no others."""
    rank = len(window.sizes)
    return sorted(window.axes) == [rank - 2, rank - 1]


def copy_plan(use: Use, storage: SmemLayout) -> TmaPlan | None:
    """The tensor copies of a TMA copy; None of adjacent bytes, without a tensor map.

    Raises:
      LayoutError: TMA does not support it.
      UnsupportedError: it would transpose.
    """
    assert use.other is not None
    smem, gmem = use.part.window, use.other.window
    axes = paired_axes(gmem, smem, use.pieces)
    check_window(storage, smem.sizes)
    part = contiguous_layout(storage, smem)
    try:
        return plan_copy(
            gmem.array_shape,
            use.other.bits,
            gmem.sizes,
            gmem.squeezed,
            part,
            start_multiples=gmem.multiples,
            inside=gmem.known_inside(),
            pieces=use.pieces,
            axes=axes,
        )
    except errors.LayoutError:
        line = None
        if use.allow_line:
            line = line_bytes(gmem, storage, smem, in_bounds=use.in_bounds)
        if line is None:
            raise
        return None


def in_memory_order(order: tuple[int, ...], placement: Placement) -> Placement | None:
    """The placement in the array's order of axes; None if it is not expressible."""
    inverse = [order.index(i) for i in range(len(order))]
    if inverse == sorted(inverse):
        return placement
    return placement.transpose(inverse) if isinstance(placement, LinearLayout) else None
