# SPDX-License-Identifier: Apache-2.0
"""Programs that move elements between threads and memory: each gives them all back.

Reductions, scans, relayouts, and transfers with shared memory, in layouts that need
every kind of shuffle, exchange and matrix instruction.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from pallas_gpu.emitters import gmem, mbarrier, registers, smem
from pallas_gpu.emitters.moves import reductions, relayout, scans
from pallas_gpu.emitters.moves.scratch import SmemScratch
from pallas_gpu.layouts import Layout
from tests.support.finished import smem_view
from tests.support.programs import Program

_FOLD = {
    "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "logaddexp": np.logaddexp,
}  # fmt: skip


def _rng() -> np.random.Generator:
    """The same numbers for a program, whichever other programs have been made."""
    return np.random.default_rng(5)


def _numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "bool":
        return _rng().integers(0, 2, shape).astype(bool)
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        return _rng().integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return _rng().integers(-99, 99, shape).astype(dtype)


# --- reductions and scans -------------------------------------------------------------

_KINDS = (
    *((kind, "int32") for kind in _FOLD if kind != "logaddexp"),
    *((kind, "uint32") for kind in ("max", "min")),
    *((kind, "float32") for kind in ("add", "mul", "max", "min")),
    *((kind, "bool") for kind in ("and", "or")),
)


def _reduction(kind: Any, dtype: str, layout: Any, shape, axes) -> Program:
    x = _numbers(shape, dtype)
    # Of each column two elements decide, so that neither may be left out: they share
    # a bit, and a float holds their product exactly.
    rows = (np.arange(shape[1]) * 37 + 5) % shape[0]
    first = np.arange(shape[0])[:, None] == rows
    second = np.arange(shape[0])[:, None] == rows ^ 21
    deciding = np.where(first, 3, np.where(second, 5, 0))
    if kind == "or":
        x = deciding.astype(dtype)
    elif kind == "and":
        x = ~deciding.astype(dtype)
    elif kind == "mul":
        x = np.where(deciding, deciding, 1).astype(dtype)
    return reduction(kind, x, layout, axes)


def reduction(kind: Any, x: np.ndarray, layout: Any, axes, scratch=2048) -> Program:
    """Combines the elements of an array along some axes."""
    expected = _FOLD[kind].reduce(x, axis=axes, dtype=x.dtype)

    def emit(kb, view, out):
        room = SmemScratch(kb.smem_pointer(0), scratch)
        result = reductions.reduce(kind, gmem.load(view, layout), axes, room)
        if isinstance(result, registers.Splat):
            gmem.store_scalar(out, result.value)
        else:
            gmem.store(out, result)

    return Program(emit, [x], [np.asarray(expected)], smem_bytes=2048)


# What a whole warp combines in one instruction.
_OF_A_WARP = (
    *((kind, "int32") for kind in ("add", "max", "min", "and", "or", "xor")),
    *(("max", "uint32"), ("min", "uint32"), ("max", "int8"), ("add", "uint16")),
    *((kind, "float32") for kind in ("max", "min")),
    *(("max", "bfloat16"), ("min", "float16"), ("or", "bool"), ("and", "bool")),
    *(("xor", "int64"), ("or", "int8")),
)


def _of_a_warp(kind: Any, dtype: str, arch: tuple[int, int] = (9, 0)) -> Program:
    """Rows of what 32 lanes hold, among them those that only their order decides."""
    if kind in ("and", "or", "xor"):
        # In most rows three elements decide, two of them of a thread; they share bits.
        x = np.zeros((8, 128), np.int64)
        for bits, place in ((3, 0), (5, 1), (12, 5)):
            x[np.arange(8), np.arange(8) * 37 % 128 ^ place] = bits + (bits << 32)
        x[::4] = 0
        x = (x != 0) if dtype == "bool" else x
        return reduction(kind, (~x if kind == "and" else x).astype(dtype), None, (1,))
    if "int" in dtype:
        return reduction(kind, _numbers((8, 128), dtype), None, (1,))
    x = _rng().normal(size=(16, 128)).astype(np.float32)
    x[1::4] = -np.abs(x[1::4])
    x[2:12:4, 77] = np.array([0x7FC00000, 0xFFC00000, 0xFF800001], "u4").view("f4")
    x[[3, 7]], x[3, 9], x[7, 9] = [[0], [-0.0]], -0.0, 0
    x[12:14], x[12, 5], x[14, [3, 99]] = [[np.inf], [-np.inf]], -1, [np.inf, -np.inf]
    x[15] *= 2.0**-130
    with np.errstate(invalid="ignore"):  # a signalling NaN
        x = x.astype(dtype)
    # Of equal numbers those with a sign are less.
    order = np.lexsort((~np.signbit(x), x.astype(np.float32)), axis=1)
    place = order[:, -1 if kind == "max" else 0]
    expected = np.where(np.isnan(x).any(1), np.nan, x[np.arange(16), place])
    made = reduction(kind, x, None, (1,))
    return dataclasses.replace(made, expected=[expected.astype(dtype)], arch=arch)


def _scan(kind: Any, layout: Any, shape, axis: int, reverse: bool) -> Program:
    is_float = kind == "logaddexp"
    x = _rng().integers(-9, 9, shape).astype(np.float32 if is_float else np.int32)
    # With a zero, a product of all is that, as a bitwise AND is.
    x[x == 0] = 1
    return scan(kind, x, layout, axis, reverse, tolerance=2e-6 * is_float)


def scan(
    kind: Any, x, layout: Any, axis: int, reverse=False, scratch=2048, tolerance=0.0
) -> Program:
    """Combines each element of an array with those before it along an axis."""
    flipped = np.flip(x, axis) if reverse else x
    expected = _FOLD[kind].accumulate(flipped, axis=axis, dtype=x.dtype)
    expected = np.flip(expected, axis) if reverse else expected

    def emit(kb, view, out):
        placed = registers.place(layout, x.shape) if layout else None
        room = SmemScratch(kb.smem_pointer(0), scratch)
        value = gmem.load(view, placed)
        gmem.store(out, scans.scan(kind, value, axis, reverse=reverse, scratch=room))

    expected = np.ascontiguousarray(expected)
    return Program(emit, [x], [expected], tolerance, smem_bytes=2048)


# --- relayouts ------------------------------------------------------------------------

_STRIDED = Layout.WG_STRIDED((64, 32), vec_size=4)
# name: (from, to, shape, dtype, scratch)
_RELAYOUTS = {
    "shuffles": (Layout.WGMMA, Layout.WGMMA_TRANSPOSED, (64, 16), "float32", 0),
    "shuffles of halves": (Layout.WGMMA_TRANSPOSED, Layout.WGMMA, (64, 16), "int16", 0),
    "shuffles of bytes": (Layout.WGMMA, Layout.WGMMA_TRANSPOSED, (64, 16), "int8", 0),
    "shuffles of bools": (Layout.WGMMA, Layout.WGMMA_TRANSPOSED, (64, 16), "bool", 0),
    "upcast": (Layout.WGMMA_UPCAST_2X, Layout.WGMMA, (64, 32), "int8", 0),
    "upcast twice": (Layout.WGMMA_UPCAST_4X, Layout.WGMMA, (64, 32), "int16", 0),
    "native": (Layout.TCGEN05, Layout.TCGEN05_TMEM_NATIVE, (128, 8), "int32", 0),
    "rows": (Layout.WGMMA, _STRIDED, (64, 32), "float32", 1 << 13),
    "rows of bytes": (_STRIDED, Layout.WGMMA, (64, 32), "int8", 1 << 12),
    "rows in rounds": (Layout.WGMMA, _STRIDED, (64, 32), "float32", 2048),
    "copies": (Layout.WGMMA_ROW, Layout.WG_STRIDED((256,), 1), (256,), "int32", 2048),
    "copies made": (
        Layout.WG_STRIDED((256,), 2), Layout.WGMMA_COL, (256,), "int32", 2048
    ),
}  # fmt: skip


def _relayout(src: Any, dst: Any, shape, dtype: str, scratch: int) -> Program:
    return relayout_of(_numbers(shape, dtype), src, dst, scratch)


def relayout_of(x: np.ndarray, src: Any, dst: Any, scratch: int = 0) -> Program:
    """Moves an array from a layout to another one, with so much scratch."""

    def emit(kb, view, out):
        room = SmemScratch(kb.smem_pointer(0), scratch) if scratch else None
        gmem.store(out, relayout.layout_cast(gmem.load(view, src), dst, room))

    return Program(emit, [x], [x], smem_bytes=scratch)


# --- shared memory --------------------------------------------------------------------

# name: (layout, shape, dtype, tiling, swizzle, order of a transposed view)
_TRANSFERS = {
    "matrices": (Layout.WGMMA, (64, 64), "int16", (8, 64), 128, None),
    "few matrices": (Layout.WGMMA, (64, 16), "int16", (8, 16), 32, None),
    "transposed": (Layout.WGMMA, (16, 64), "int16", (8, 64), 128, (1, 0)),
    "columns": (Layout.WGMMA_TRANSPOSED, (16, 64), "int16", (8, 64), 128, (1, 0)),
    "staggered": (Layout.WGMMA, (64, 32), "float32", (8, 32), 128, None),
    "staggered less": (Layout.WGMMA, (64, 16), "float32", (8, 16), 64, None),
    "bytes": (Layout.WGMMA_8BIT, (64, 64), "int8", (8, 64), 64, None),
    "transposed bytes": (Layout.WGMMA_8BIT, (32, 64), "int8", (8, 64), 64, (1, 0)),
    "pairs of bytes": (Layout.TCGEN05, (16, 128), "int8", (8, 128), 128, (1, 0)),
    "plain": (None, (64, 8), "float32", None, 16, None),
    "bools": (None, (512,), "bool", None, 16, None),
}


def _transfer(layout, shape, dtype: str, tiling, swizzle, order) -> Program:
    x = _numbers(tuple(shape[i] for i in order) if order else shape, dtype)
    return transfer(x, layout, tiling, swizzle, order)


def transfer(x: np.ndarray, layout: Any, tiling, swizzle, order=None) -> Program:
    """Stores an array in SMEM, in a view of this order, and loads it twice.

    Of bytes that are transposed, for Blackwell: before, no instruction transposes them.
    """
    shape = tuple(x.shape[order.index(i)] for i in range(x.ndim)) if order else x.shape
    plain_layout = None if tiling is None else Layout.WG_STRIDED(x.shape, 1)

    def emit(kb, view, out, plain):
        whole = smem_view(kb, 0, shape, x.dtype, tiling, swizzle)
        part = whole.transpose(order) if order else whole
        smem.store(part, gmem.load(view, layout))
        mbarrier.warpgroup_barrier()
        gmem.store(out, smem.load(part, layout, optimized=False))
        # The same bytes in another layout: where each element is stored counts too.
        gmem.store(plain, smem.load(part, plain_layout, optimized=False))

    arch = (10, 0) if order and x.dtype.itemsize == 1 else (9, 0)
    return Program(emit, [x], [x, x], smem_bytes=x.nbytes, arch=arch)


def kind_of(name: str) -> str:
    """What combines in one of the combinations."""
    kinds = {"rows": "add", "rows of halves": "max", "everything": "add"}
    kinds |= {"scan back": "add", "scan of rows": "add"}
    return kinds.get(name) or name.removeprefix("scan by ").split(" ")[0]


@functools.cache
def combinations() -> dict[str, Program]:
    """Reductions and scans."""
    wgmma, found = Layout.WGMMA, {}
    for kind, dtype in _KINDS:
        found[f"{kind} of {dtype}"] = _reduction(kind, dtype, wgmma, (64, 16), (0,))
    found["rows"] = _reduction("add", "int32", wgmma, (64, 16), (1,))
    found["rows of halves"] = _reduction("max", "float16", wgmma, (64, 16), (1,))
    found["everything"] = _reduction("add", "int8", wgmma, (64, 16), (0, 1))
    for kind, dtype in _OF_A_WARP:
        found[f"{kind} of {dtype} in a warp"] = _of_a_warp(kind, dtype)
        if "float" in dtype:
            found[f"{kind} of {dtype} in a warp of sm_100a"] = _of_a_warp(
                kind, dtype, (10, 0)
            )
    for kind in ("add", "mul", "max", "min", "logaddexp"):
        found[f"scan by {kind}"] = _scan(kind, None, (256,), 0, False)
    found["scan back"] = _scan("add", None, (256,), 0, True)
    found["scan of rows"] = _scan("add", wgmma, (64, 8), 1, False)
    return found


@functools.cache
def movements() -> dict[str, Program]:
    """Relayouts and transfers."""
    found = {}
    for name, case in _RELAYOUTS.items():
        found[f"relayout by {name}"] = _relayout(*case)
    for name, case in _TRANSFERS.items():
        found[f"SMEM in {name}"] = _transfer(*case)
    return found
