# SPDX-License-Identifier: Apache-2.0
"""tcgen05: tensor memory, and products that accumulate in it. Since: sm_100a.

Products, copies and commits are issued by each thread that executes them: the body
selects one, by `single_thread` or by a predicate.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_gpu import errors
from pallas_gpu.emitters import module, smem
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.tensor_cores import operand_copy, pairs, scales, sparsity, tmem
from pallas_gpu.emitters.tensor_cores import tcgen05 as emitters
from pallas_gpu.emitters.tensor_cores.tmem import Allocation, TmemView
from pallas_gpu.layouts import TiledLayout, TmemKind, TmemLayout
from pallas_gpu.layouts.registers import catalogue
from pallas_gpu.layouts.registers.placement import place_registers
from pallas_gpu.layouts.tmem.layout import COLUMNS, LEAST_COLUMNS, allocated_columns
from pallas_gpu.layouts.window import Window
from pallas_gpu.mosaic import elements, layouts
from pallas_gpu.mosaic.barriers import BarrierRef
from pallas_gpu.mosaic.fragmented_array import FragmentedArray
from pallas_gpu.mosaic.memory import memrefs
from pallas_gpu.mosaic.memory.memref_shapes import parse_indices
from pallas_gpu.mosaic.scalars import as_i32, i32

LAYOUT = layouts.TCGEN05_LAYOUT
ROW_LAYOUT = layouts.TCGEN05_ROW_LAYOUT
COL_LAYOUT = layouts.TCGEN05_COL_LAYOUT
TMEM_NATIVE_LAYOUT = layouts.TMEM_NATIVE_LAYOUT
TMEM_ROWS = 128

LoadReduceOp = Literal["max", "min", "absmax", "absmin"]
# The bits of a warp in the address of its first lane.
_WARP_SHIFT = 21

# --- layouts --------------------------------------------------------------------------

TMEMLayout = TmemLayout
tmem_default_layout = TmemLayout.default
tmem_half_lane_layout = TmemLayout.half_lane
tmem_m64_collective_layout = TmemLayout.m64_collective
scales_layout = TmemLayout.scales
b_scales_m64_collective_layout = TmemLayout.scales_m64_collective
sparse_meta_layout = TmemLayout.sparse_metadata
fa_m64_collective_layout = catalogue.tcgen05_m64_collective


def inferred_layout(shape: tuple[int, int], collective: bool) -> TmemLayout:
    """The layout of an accumulator of a shape: 128 rows, or 64."""
    if shape[0] != TMEM_ROWS // 2:
        return TmemLayout.default()
    kind = TmemLayout.m64_collective if collective else TmemLayout.half_lane
    return kind(shape[1])


@dataclasses.dataclass(frozen=True)
class TMEMRef:
    """An array in tensor memory; the i32 `address` is that of lane 0, first column."""

    address: ir.Value
    shape: tuple[int, int]
    dtype: ir.Type
    layout: TmemLayout

    def __post_init__(self) -> None:
        self.layout.check(self.shape)

    @classmethod
    def of(cls, view: TmemView) -> TMEMRef:
        """Returns a view of emitters as a reference."""
        rows, columns = view.shape
        address = view.address(view.allocation.address)
        type_ = elements.type_of(view.dtype)
        return cls(address, (rows, columns), type_, view.layout)

    def view(self, is_signed: bool | None = None) -> TmemView:
        """Returns the reference as emitters have it."""
        threads = module.current().threads
        shift = module.current().i32(_WARP_SHIFT)
        warp = arith.addi(self.address, arith.shli(threads.warp, shift))
        dtype = elements.dtype_of(self.dtype, is_signed)
        window = Window.whole(self.shape)
        return TmemView(Allocation(self.address, warp), 0, self.layout, dtype, window)

    @property
    def packing(self) -> int:
        """Elements in a column of 32 bits."""
        return self.layout.packing

    @classmethod
    def from_alloc(
        cls,
        tmem_addr_ref: ir.Value,
        shape: tuple[int, int],
        dtype: ir.Type,
        collective: bool | None = None,
        layout: TmemLayout | None = None,
    ) -> TMEMRef:
        """Returns the array at an address that `tmem_alloc` has stored in a memref.

        Without a layout it is an accumulator, `collective` that of a pair of CTAs.
        """
        if layout is None:
            if collective is None:
                raise errors.ArgumentError(
                    "TMEMRef.from_alloc: neither a layout nor collective",
                    expected="one of them",
                    got="None",
                )
            layout = inferred_layout(shape, collective)
        pointer = memrefs.memref_ptr(tmem_addr_ref)
        return cls(smem.load_element(pointer, dtypes.I32), shape, dtype, layout)

    def slice(self, *idxs: Any) -> TMEMRef:
        """Returns some columns: whole tiles of the layout."""
        starts, sizes, squeezed = parse_indices(idxs, self.shape)
        starts = [as_i32(x) for x in starts]
        whole = starts[0] == 0 and sizes[0] == self.shape[0]
        if any(squeezed) or not whole:
            raise errors.UnsupportedError(
                "A part of an array in TMEM has all of its rows",
                expected="slices, the first of which is whole",
                got=idxs,
            )
        view = self.view()
        part = view.window.slice(starts, sizes, add=smem.add_index)
        moved = dataclasses.replace(view, window=part)
        return TMEMRef(
            moved.address(self.address), (sizes[0], sizes[1]), self.dtype, self.layout
        )

    def load(
        self,
        layout: TiledLayout | None = None,
        is_signed: bool | None = None,
        reduce: LoadReduceOp | None = None,
    ) -> FragmentedArray | tuple[FragmentedArray, FragmentedArray]:
        """Loads the array, by default in the layout in which accumulators are loaded.

        PTX: `tcgen05.ld`. All threads of the warpgroup issue it. `reduce` also returns
        this extremum of each row; sm_103a does it in the load.
        """
        view = self.view(is_signed)
        chosen = layouts.resolve(layout or self._loaded_layout())
        placement = place_registers(chosen, self.shape)
        result = FragmentedArray.of(tmem.load(view, placement), chosen)
        if reduce is None:
            return result
        kind = reduce.removeprefix("abs")
        absolute = result.abs() if kind != reduce else result
        return result, absolute.reduce(kind, 1)

    def _loaded_layout(self) -> TiledLayout:
        bits = elements.bitwidth(self.dtype)
        if bits in (16, 32):
            match self.layout.kind:
                case TmemKind.DEFAULT:
                    return LAYOUT
                case TmemKind.HALF_LANE:
                    return layouts.WGMMA_LAYOUT
                case TmemKind.M64_COLLECTIVE:
                    return fa_m64_collective_layout(self.layout.tile_columns)
        return self.layout.tiled

    def store(self, value: FragmentedArray) -> None:
        """Stores an array. PTX: `tcgen05.st`; it is complete after `commit_tmem`."""
        array: Any = value.array()
        tmem.store(self.view(value.is_signed), array)


# --- products -------------------------------------------------------------------------


def mma(
    d: TMEMRef,
    a: ir.Value | TMEMRef,
    b: ir.Value,
    *,
    a_swizzle: int = 128,
    b_swizzle: int = 128,
    a_scale: TMEMRef | None = None,
    b_scale: TMEMRef | None = None,
    a_sparse_metadata: TMEMRef | None = None,
    accumulate: ir.Value | bool = True,
    collective: bool = False,
) -> None:
    """Starts `d += a @ b`, or `d = a @ b`. PTX: `tcgen05.mma`.

    One thread issues it, of a pair of CTAs (`collective`) one of the leader; a later
    `commit_arrive` of that thread tells when it is complete.

    Args:
      d: (M, N) in TMEM; M is 64 or 128.
      a: (M, K): a tiled reference to SMEM, or in TMEM; (M, K / 2) if it is sparse.
      b: (K, N), a tiled reference to SMEM; of a pair of CTAs (K, N / 2).
      a_swizzle, b_swizzle: of a and b in SMEM, in bytes.
      a_scale, b_scale: the scales of blocks of K, both or none.
      a_sparse_metadata: says which elements of a sparse a there are.
      accumulate: whether to add to d: a bool, or an i1.

    Raises:
      ShapeError, DTypeError, LayoutError: no instruction has these operands.
    """
    if (a_scale is None) != (b_scale is None):
        raise errors.ArgumentError(
            "tcgen05.mma: scales of one operand",
            expected="a_scale and b_scale, or none of them",
            got="one of them",
        )
    scaled = None
    if a_scale is not None and b_scale is not None:
        scaled = a_scale.view(), b_scale.view()
    metadata = None
    if a_sparse_metadata is not None:
        metadata = a_sparse_metadata.view(is_signed=False)
    is_tmem = isinstance(a, TMEMRef)
    left = a.view() if is_tmem else memrefs.tiled_view_of(a, a_swizzle)
    right = memrefs.tiled_view_of(b, b_swizzle)
    with module.current().in_thread():
        emitters.mma(
            d.view(), left, right, accumulate, scaled, metadata, collective=collective
        )


def commit_arrive(
    barrier: BarrierRef | ir.Value, collective: bool = False, ctx: Any = None
) -> None:
    """Arrives on a barrier once the thread's earlier tcgen05 instructions are complete.

    Those of a pair of CTAs are `collective`, and both of its barriers get the arrival.
    `ctx` is accepted for upstream's sake.
    """
    pointer = barrier if isinstance(barrier, ir.Value) else barrier.get_ptr()
    with module.current().in_thread():
        emitters.commit_arrive(pointer, collective=collective)


# --- allocation and order -------------------------------------------------------------


def tmem_alloc_exact_ncols(ncols: int, exact: bool) -> int:
    """Returns the columns that an allocation has: a power of two from 32 to 512.

    Raises:
      ArgumentError: there are more, or with `exact` other numbers; else they round up.
    """
    rounded = allocated_columns(ncols)
    if rounded > COLUMNS or (exact and rounded != ncols):
        raise errors.ArgumentError(
            "An allocation of TMEM does not have this many columns",
            expected=f"a power of two from {LEAST_COLUMNS} to {COLUMNS}",
            got=ncols,
            hint="pass exact=False to round it up",
        )
    return rounded


def tmem_alloc(
    tmem_addr: ir.Value, ncols: int, collective: bool = False, exact: bool = True
) -> int:
    """Allocates columns of TMEM; one whole warp issues it. PTX: `tcgen05.alloc`.

    A memref of one i32 in SMEM, or its address, gets the address. A pair of CTAs may
    allocate together. Returns the number of columns: `tmem_alloc_exact_ncols`.
    """
    if isinstance(tmem_addr.type, ir.MemRefType):
        tmem_addr = memrefs.memref_ptr(tmem_addr)
    columns = tmem_alloc_exact_ncols(ncols, exact)
    count = module.current().i32(columns)
    nvvm.tcgen05_alloc(tmem_addr, count, group=pairs.group(collective))
    return columns


def tmem_dealloc(
    tmem_addr: ir.Value, ncols: int, collective: bool = False, exact: bool = True
) -> None:
    """Frees what `tmem_alloc` has allocated, at the i32 that it has stored.

    PTX: `tcgen05.dealloc`. One whole warp issues it.
    """
    if tmem_addr.type != i32():
        raise errors.ArgumentTypeError(
            "tmem_dealloc: not an address", expected="an i32", got=str(tmem_addr.type)
        )
    count = module.current().i32(tmem_alloc_exact_ncols(ncols, exact))
    group = pairs.group(collective)
    nvvm.tcgen05_dealloc(tmem.pointer(tmem_addr), count, group=group)


def tmem_relinquish_alloc_permit(collective: bool) -> None:
    """Says that the block allocates no more; one whole warp issues it."""
    nvvm.tcgen05_relinquish_alloc_permit(group=pairs.group(collective))


def commit_tmem() -> None:
    """Waits until the warpgroup's stores to TMEM are complete, and known to all."""
    tmem.wait_stores()


def wait_load_tmem() -> None:
    """Waits until the warpgroup has read TMEM: it may be overwritten then."""
    tmem.wait_loads()


# --- copies ---------------------------------------------------------------------------


def async_copy_scales_smem_to_tmem(
    smem_ref: ir.Value, tmem_ref: TMEMRef, collective: bool = False
) -> None:
    """Starts a copy of scales; one thread issues it, also for a pair of CTAs.

    PTX: `tcgen05.cp`, from a contiguous (rows / 128, scales / 4, 32, 16) to (rows,
    scales) in `scales_layout()`.
    """
    _copy(scales.copy_to_tmem, memrefs.view_of(smem_ref), tmem_ref, collective)


def async_copy_sparse_metadata_smem_to_tmem(
    smem_ref: ir.Value, tmem_ref: TMEMRef, collective: bool = False
) -> None:
    """As `async_copy_scales_smem_to_tmem`, of the metadata of a sparse operand.

    From a contiguous (1, indices / 64, 128, 64) of 2 bits to (128, indices) in
    `sparse_meta_layout()`.
    """
    view = memrefs.view_of(smem_ref, is_signed=False)
    _copy(sparsity.copy_to_tmem, view, tmem_ref, collective)


def async_copy_smem_to_tmem(
    smem_ref: ir.Value, tmem_ref: TMEMRef, swizzle: int, collective: bool = False
) -> None:
    """As `async_copy_scales_smem_to_tmem`, of a left operand.

    From (128, K), tiled by 8 rows of `swizzle` bytes, to (128, K), packed.
    """
    view = memrefs.tiled_view_of(smem_ref, swizzle)
    _copy(operand_copy.copy_to_tmem, view, tmem_ref, collective)


def _copy(start: Any, source: Any, target: TMEMRef, collective: bool) -> None:
    with module.current().in_thread():
        start(source, target.view(), collective=collective)
