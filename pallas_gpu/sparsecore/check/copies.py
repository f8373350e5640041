# SPDX-License-Identifier: Apache-2.0
"""Checks of copies: pairs of memories, rows that indices name, offsets in HBM."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from pallas_gpu import errors
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import Access, Op
from pallas_gpu.sparsecore.check.kernel import Kernel
from pallas_gpu.sparsecore.primitives.copies import copy_start_p, copy_wait_p
from pallas_gpu.sparsecore.primitives.debug import print_reference_p
from pallas_gpu.sparsecore.types import (
    HBM,
    MACHINE,
    SMEM,
    VMEM,
    VMEM_SHARED,
    WORD_BYTES,
)

# Source and destination of copies that libtpu 0.0.48 compiles, by who issues them.
_OF_VECTOR = {
    HBM: (HBM, VMEM, VMEM_SHARED),
    VMEM: (HBM, VMEM_SHARED),
    VMEM_SHARED: (HBM, VMEM, VMEM_SHARED, SMEM),
    SMEM: (),
}
_OF_SCALAR = {
    HBM: (HBM, VMEM_SHARED, SMEM),
    VMEM_SHARED: (HBM, VMEM_SHARED, SMEM),
    SMEM: (HBM, SMEM),
}
# Offsets in HBM: the code that libtpu generates ends in an error interrupt at others.
HBM_ALIGNMENT_BYTES = 32
# Elements of a row of a tile under compact tiling, and rows.
COMPACT_ROW, COMPACT_ROWS = 128, 8
_TILED = (HBM, VMEM, VMEM_SHARED)


@registry.checks(copy_start_p, copy_wait_p, machine=MACHINE)
def _check_copy(op: Op, kernel: Kernel) -> None:
    src, dst = op.operands["src"], op.operands["dst"]
    _require_pair(src, dst, kernel)
    if op.params["indexed"] is not None:
        _check_rows(op, kernel)
    for access in (src, dst):
        if access.space is HBM:
            _require_aligned(access)
        if kernel.tiling_of(access) == "compact":
            _require_tiles(access, kernel)
    _require_equal_tilings(src, dst, kernel)


def _require_pair(src: Access, dst: Access, kernel: Kernel) -> None:
    pairs: dict[Any, Any] = _OF_VECTOR if kernel.is_vector else _OF_SCALAR
    possible = pairs.get(src.space, ())
    if dst.space in possible:
        return
    names = ", ".join(space.name for space in possible)
    raise errors.MemorySpaceError(
        f"{kernel.subcore} cannot copy from {src.space.name} to {dst.space.name}",
        expected=f"a destination in {names}" if names else "another source",
        got=_shown(src) + " to " + _shown(dst),
        hint=_around(src, dst),
    )


def _require_equal_tilings(src: Access, dst: Access, kernel: Kernel) -> None:
    """Raises for a copy from one tiling to another one, except of words in a row."""
    tilings = {kernel.tiling_of(x) for x in (src, dst) if x.space is not SMEM}
    in_row = max(len(src.window.shape), len(dst.window.shape)) < 2
    if len(tilings) < 2 or (in_row and jnp.dtype(src.dtype).itemsize == WORD_BYTES):
        return
    raise errors.LayoutError(
        "a copy between arrays of different tilings",
        expected="one tiling, or vectors of 32-bit elements",
        got=f"{_shown(src)}, {kernel.tiling_of(src)}, to {_shown(dst)}, "
        f"{kernel.tiling_of(dst)}",
        hint="declare both with the tiling, or load and store vectors",
    )


def _around(src: Access, dst: Access) -> str:
    if (src.space, dst.space) == (VMEM, VMEM):
        return "copy vectors in a loop: y_vmem[part] = x_vmem[part]"
    if dst.space is SMEM:
        return "a vector subcore fills its SMEM from VMEM_SHARED, or by stores"
    if src.space is SMEM:
        return "read the scalars, and store them in vectors of VMEM"
    return "copy by way of a memory that both sides reach"


def _shown(access: Access) -> str:
    shape = list(access.window.shape)
    return f"{access.space.name} {jnp.dtype(access.dtype).name}{shape}"


def _check_rows(op: Op, kernel: Kernel) -> None:
    """Checks a copy of rows that indices name."""
    indexed = op.params["indexed"]
    other = op.operands["dst" if indexed == "src" else "src"]
    table = op.operands[indexed]
    if table.space not in (HBM, VMEM_SHARED) or other.space is not VMEM:
        raise errors.MemorySpaceError(
            "indices of rows between memories that streams do not connect",
            expected="rows in HBM or VMEM_SHARED, and the other side in VMEM",
            got=f"rows of {_shown(table)}, the other side {_shown(other)}",
            hint="indices select rows of the larger array: gather from it to VMEM, "
            "scatter to it from VMEM",
        )
    indices = op.operands["indices"]
    if isinstance(indices, Access) and indices.space is not VMEM:
        raise errors.MemorySpaceError(
            "indices of rows are in the wrong memory",
            expected="a reference in VMEM, or a vector",
            got=_shown(indices),
            hint="copy them to VMEM first: plsc.sync_copy(rows_ref, rows_vmem)",
        )
    if op.params.get("add") and table.space is HBM and indexed == "dst":
        raise errors.UnsupportedError(
            "rows are added to HBM",
            expected="rows added to VMEM_SHARED, or gathered to VMEM",
            got=f"add=True to {_shown(table)}",
            hint="add in VMEM_SHARED, wait for all subcores with plsc.subcore_barrier, "
            "and copy the sums to HBM",
        )
    if not table.window.sizes or table.window.axes[:1] != (0,):
        raise errors.UnsupportedError(
            "indices of a dimension that is not the first one",
            expected="rows of the first dimension of the array",
            got=f"a part of an array of shape {list(table.window.array_shape)}",
            hint="index before the dimensions are selected, or reshape the array",
        )
    _require_row(table, kernel)


def _require_row(table: Access, kernel: Kernel) -> None:
    """Raises for a row that no stream moves under the kernel's tiling."""
    dtype, window, tiling = (
        jnp.dtype(table.dtype),
        table.window,
        kernel.tiling_of(table),
    )
    row, whole = window.shape[1:], window.array_shape[1:]
    hint = (
        'plsc.CompilerParams(tiling="sparsecore"), for which XLA copies the array '
        "at each call; or pad the rows, and store narrow elements as int32"
    )
    if tiling == "sparsecore":
        fits, expected = window.sizes[1:] == whole, "whole rows"
        hint = "gather the rows, and take the part of them in VMEM"
    elif table.space is VMEM_SHARED:
        fits = dtype.itemsize == WORD_BYTES and whole[-1:] in ((), (COMPACT_ROW,))
        expected = f"32-bit elements, and a last dimension of {COMPACT_ROW}"
    else:
        fits = dtype.itemsize == WORD_BYTES and not (row and row[-1] % COMPACT_ROW)
        expected = (
            f"32-bit elements, and a last dimension that is a multiple of {COMPACT_ROW}"
        )
    if not fits:
        raise errors.LayoutError(
            f"rows that a stream cannot move under {tiling} tiling",
            expected=expected,
            got=f"rows of {dtype.name}{list(row)} of {dtype.name}"
            f"{list(window.array_shape)} in {table.space.name}",
            hint=hint,
        )


def _require_tiles(access: Access, kernel: Kernel) -> None:
    """Raises for a part that libtpu does not divide into equal parts of tiles.

    An array of one column of tiles lies in memory row by row.
    """
    window, itemsize = access.window, jnp.dtype(access.dtype).itemsize
    if len(window.array_shape) < 2 or access.space not in _TILED:
        return
    tiles = ((-2, COMPACT_ROWS), (-1, COMPACT_ROW))
    if all(window.sizes[axis] == window.array_shape[axis] for axis, _ in tiles):
        return
    packed = WORD_BYTES // itemsize
    divisors = [x.divisor for x in kernel.starts.of(access)]
    for axis, tile in tiles:
        size, known = window.sizes[axis], divisors[axis]
        if size == window.array_shape[axis]:
            continue
        pairs = axis == -2 and (size % packed or known % packed)
        in_rows = axis == -2 and window.array_shape[-1] <= COMPACT_ROW
        if not pairs and (in_rows or _is_tiled(window.starts[axis], known, size, tile)):
            continue
        dimension = len(window.array_shape) + axis
        raise errors.LayoutError(
            "a part of an array that is not equal parts of tiles",
            expected=f"in dimension {dimension} whole tiles of {tile}, a part of one, "
            "or equal parts of two"
            + (f"; multiples of {packed} rows" if axis == -2 and packed > 1 else ""),
            got=f"{size} elements from {_start(window.starts[axis], known)} on, of "
            f"{jnp.dtype(access.dtype).name}{list(window.array_shape)}",
            hint="copy whole tiles, tell a start with plsc.multiple_of, or pass "
            'plsc.CompilerParams(tiling="sparsecore")',
        )


@registry.checks(print_reference_p, machine=MACHINE)
def _check_print(op: Op, kernel: Kernel) -> None:
    access = op.operands["ref"]
    shape, whole = access.window.array_shape, access.window.sizes[-2:]
    if (
        kernel.tiling_of(access) != "compact"
        or SMEM is access.space
        or whole == shape[-2:]
    ):
        return
    wide = len(shape) > 1 and shape[-1] > COMPACT_ROW
    narrow = jnp.dtype(access.dtype).itemsize < WORD_BYTES
    if narrow or (wide and kernel.starts.of(access)[-1].divisor % COMPACT_ROW):
        raise errors.LayoutError(
            "debug_print of a part of a reference that does not start with a tile",
            expected=f"32-bit elements from a multiple of {COMPACT_ROW} on, or all of "
            "the last two dimensions",
            got=f"{_shown(access)} of {list(shape)}",
            hint='print whole rows, or pass plsc.CompilerParams(tiling="sparsecore")',
        )


def _is_tiled(start: Any, known: int, size: int, tile: int) -> bool:
    if known % tile == 0 and size % tile == 0:
        return True
    if not isinstance(start, int):
        return size <= math.gcd(known, tile)
    left = tile - start % tile
    return size <= left or size == 2 * left


def _start(start: Any, known: int) -> str:
    if isinstance(start, int):
        return str(start)
    return f"a multiple of {known}" if known > 1 else "a start that is not known"


def _require_aligned(access: Access) -> None:
    """Raises for an offset in HBM that is known not to be a multiple of 32 bytes."""
    window, itemsize = access.window, jnp.dtype(access.dtype).itemsize
    if not window.starts:
        return
    start = window.starts[-1]
    if not isinstance(start, int):
        return  # the emulator looks at those that are known at run time
    if start * itemsize % HBM_ALIGNMENT_BYTES == 0:
        return
    step = HBM_ALIGNMENT_BYTES // math.gcd(HBM_ALIGNMENT_BYTES, itemsize)
    raise errors.LayoutError(
        f"an offset in HBM is not a multiple of {HBM_ALIGNMENT_BYTES} bytes",
        expected=f"a multiple of {step} elements of {jnp.dtype(access.dtype).name}",
        got=f"{start} in the last dimension of shape {list(window.array_shape)}",
        hint="copy from the multiple before it, and take the part in VMEM",
    )
