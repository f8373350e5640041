# SPDX-License-Identifier: Apache-2.0
"""Arrays in the registers of a warpgroup: layouts, shapes, reductions, elements."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.emitters import elementwise, gmem, registers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.moves import reductions, relayout
from pallas_gpu.emitters.moves.scratch import SmemScratch
from pallas_gpu.emitters.registers import Deferred, RegisterArray, Splat
from pallas_gpu.emitters.tensor_cores import wgmma
from pallas_gpu.layouts import LinearLayout, TiledLayout, WGSplatLayout, WGStridedLayout
from pallas_gpu.layouts.registers import catalogue
from pallas_gpu.layouts.registers.placement import place_registers
from pallas_gpu.mosaic import elements, layouts, transfers
from pallas_gpu.mosaic.devices import MultimemReductionOp, MultimemRef
from pallas_gpu.mosaic.held import from_register
from pallas_gpu.mosaic.layouts import FragmentedLayout
from pallas_gpu.mosaic.memory import memrefs
from pallas_gpu.mosaic.memory.memref_shapes import parse_indices
from pallas_gpu.mosaic.operators import Operators
from pallas_gpu.mosaic.scalars import debug_print

Atomic = Literal["add", "max", "min", "and", "or", "xor"]


class Rounding(enum.Enum):
    """How a conversion to a narrower float rounds."""

    TO_NEAREST_EVEN = enum.auto()
    TO_POSITIVE_INFINITY = enum.auto()
    TO_ZERO = enum.auto()


# How many partial results grow at a time. Attention took 1.05 times as long with
# extrema in a tree, and 1.02 times with sums in one chain, too (H200).
_CHAINS = {"max": 1, "min": 1}


class FragmentedArray(Operators):
    """An array that the threads of a warpgroup hold in registers.

    `of` makes one of an array of emitters, which `array()` gives back.

    Args:
      _registers: an array of MLIR vectors, of shape `layouts.registers_shape`; of a
        splat it has no axes, and a scalar.
      _layout: where each element is.
      _is_signed: of integers whether they are signed; None of other types.
    """

    # --- making arrays ----------------------------------------------------------------

    @classmethod
    def splat(
        cls,
        value: ir.Value,
        shape: tuple[int, ...],
        layout: FragmentedLayout | None = None,
        *,
        is_signed: bool | None = None,
    ) -> FragmentedArray:
        """Returns the array whose elements are all `value`."""
        dtype = elements.dtype_of(value.type, is_signed)
        found = cls.of(registers.splat(from_register(value, dtype), dtype, shape))
        if is_signed is not None:
            found.is_signed = is_signed
        return found if layout is None else found.to_layout(layout)

    @classmethod
    def broadcasted_iota(
        cls,
        dtype: ir.Type,
        shape: tuple[int, ...],
        dimension: int,
        layout: FragmentedLayout | None = None,
        *,
        is_signed: bool | None = None,
    ) -> FragmentedArray:
        """Returns the array of indices along a dimension, by default strided."""
        own = elements.dtype_of(dtype, is_signed)
        array = registers.iota(own, shape, dimension)
        return cls.of(array) if layout is None else _placed(cls, array, layout)

    @classmethod
    def build(
        cls,
        shape: tuple[int, ...],
        layout: FragmentedLayout,
        fn: Callable[..., ir.Value],
        *,
        is_signed: bool | None = None,
    ) -> FragmentedArray:
        """Returns the array of what `fn` returns for the coordinates of an element."""
        zero = arith.constant(ir.IntegerType.get_signless(32), 0)
        made: Any = cls.splat(zero, shape, layout, is_signed=False).foreach(
            lambda _, index: fn(*index), create_array=True, is_signed=is_signed
        )
        return made

    # --- layouts and types ------------------------------------------------------------

    def to_layout(self, new_layout: FragmentedLayout) -> FragmentedArray:
        """Returns the array in another layout; data may move between lanes of a warp.

        Raises:
          LayoutError: data would cross warps.
        """
        new_layout = layouts.resolve(new_layout)
        if new_layout == self.layout:
            return self
        try:
            cast = relayout.layout_cast(self.array(), new_layout)
        except errors.OutOfResources:
            raise errors.LayoutError(
                "to_layout: data would cross warps",
                expected="a layout in which each warp holds the same elements",
                got=f"{self.layout} to {new_layout}",
                hint="store the array to SMEM, and load it in the new layout",
            ) from None
        return type(self).of(cast, new_layout)

    def astype(
        self,
        new_dtype: ir.Type,
        *,
        is_signed: bool | None = None,
        rounding: Rounding | None = None,
    ) -> FragmentedArray:
        """Returns the array with another element type.

        No other `rounding` is there than the usual one: to nearest, of float8_e8m0fnu
        upwards.
        """
        to = elements.dtype_of(new_dtype, is_signed)
        usual = Rounding.TO_NEAREST_EVEN
        if dtypes.kind(to) == "exponent":
            usual = Rounding.TO_POSITIVE_INFINITY
        if rounding not in (None, usual):
            raise errors.UnsupportedError(
                f"astype: rounding {rounding} to {to} is not supported",
                expected=f"None, or {usual}",
            )
        array = self.array()
        if to == dtypes.BOOL and array.dtype != dtypes.BOOL:
            return self != 0
        return type(self).of(elementwise.astype(array, to), self.layout)

    def bitcast(
        self, elt: ir.Type, *, output_is_signed: bool | None = None
    ) -> FragmentedArray:
        """Returns the bits of the elements as another type of the same width."""
        to = elements.dtype_of(elt, output_is_signed)
        return self._apply("bitcast_convert_type", to=to)

    # --- shapes -----------------------------------------------------------------------

    def broadcast(self, shape: tuple[int, ...]) -> FragmentedArray:
        """Returns a splat in a shape to which its own broadcasts."""
        if not isinstance(self.array(), Splat):
            raise errors.UnsupportedError(
                "broadcast is for splats",
                got=f"layout {self.layout}",
                hint="use broadcast_in_dim, which takes the layout of the result",
            )
        dims = range(len(shape) - len(self.shape), len(shape))
        return type(self).of(registers.broadcast_in_dim(self.array(), shape, dims))

    def broadcast_in_dim(
        self,
        shape: tuple[int, ...],
        source_dimensions: tuple[int, ...],
        layout: FragmentedLayout,
    ) -> FragmentedArray:
        """Returns the array repeated: its axis i is axis `source_dimensions[i]`.

        Raises:
          LayoutError: threads would have to exchange data.
        """
        wide = registers.broadcast_in_dim(self.array(), shape, source_dimensions)
        return _placed(type(self), wide, layout)

    def broadcast_minor(self, n: int) -> FragmentedArray:
        """Returns rows in `WGMMA_ROW_LAYOUT` repeated along n columns."""
        row = layouts.WGMMA_ROW_LAYOUT, layouts.TCGEN05_ROW_LAYOUT
        if self.layout not in row:
            raise errors.LayoutError(
                "broadcast_minor: the array is not one of rows",
                expected="WGMMA_ROW_LAYOUT or TCGEN05_ROW_LAYOUT",
                got=self.layout,
            )
        wide = (layouts.WGMMA_LAYOUT, layouts.TCGEN05_LAYOUT)[row.index(self.layout)]
        return self.broadcast_in_dim((*self.shape, n), (0,), wide)

    def reshape(self, shape: tuple[int, ...]) -> FragmentedArray:
        """Returns the array in another shape, row-major; registers stay where they are.

        Raises:
          LayoutError: there is no layout of the other shape with these registers.
        """
        return type(self).of(registers.reshape(self.array(), shape))

    def __getitem__(self, idx: Any) -> FragmentedArray:
        """A part of static bounds, whose registers no other element shares."""
        starts, sizes, squeezed = parse_indices(idx, self.shape)
        part = registers.static_slice(self.array(), starts, sizes)  # type: ignore[arg-type]
        axes = [axis for axis, drop in enumerate(squeezed) if drop]
        layout = None if axes else _if_of(self.layout, part)
        return type(self).of(registers.squeeze(part, axes) if axes else part, layout)

    def __setitem__(self, idx: object, value: FragmentedArray) -> None:
        starts, sizes, squeezed = parse_indices(idx, self.shape)
        new: Any = value.array()
        array = self.array()
        if any(squeezed) or new.shape != tuple(sizes):
            raise errors.ShapeError(
                "An assignment to a part of an array of registers",
                expected=f"slices, and an array of shape {tuple(sizes)}",
                got=f"index {idx}, shape {new.shape}",
            )
        if not isinstance(array, RegisterArray) or not isinstance(
            array.layout, LinearLayout
        ):
            raise errors.LayoutError(
                "Parts of this array cannot be assigned to",
                expected="an array in a tiled layout",
                got=self.layout,
            )
        target = array.layout.slice(starts, sizes)
        new = registers.regroup(new, target)
        chosen = array.layout.slice_registers(starts, sizes)
        values = list(array.values)
        for register, x in zip(chosen, new.values, strict=True):
            values[register] = x
        self._registers, self._array = None, array.with_values(values)

    # --- reductions -------------------------------------------------------------------

    def reduce(
        self,
        op: str | Callable[[ir.Value, ir.Value], ir.Value],
        axis: int | Sequence[int],
        scratch: ir.Value | None = None,
        *,
        acc_ilp: int | None = None,
    ) -> FragmentedArray:
        """Reduces the array over one axis or several; to a splat if none remains.

        Args:
          op: "add", "mul", "max", "min", "and", "or" or "xor".
          scratch: a memref in SMEM, for axes along which warps hold different parts.
          acc_ilp: partial results of a thread that grow at a time; None: one of
            extrema, and a tree of others.

        Raises:
          OutOfResources: the scratch is missing or too small.
        """
        if not isinstance(op, str):
            raise errors.UnsupportedError(
                "reduce: the operation is a function",
                expected='a name, such as "add"',
                got=op.__name__,
            )
        rank = len(self.shape)
        axes = [a % rank for a in ([axis] if isinstance(axis, int) else axis)]
        array = self.array()
        if isinstance(array, Splat):
            return self._reduced_splat(op, axes)
        room = None if scratch is None else _scratch(scratch)
        chains = _CHAINS.get(op) if acc_ilp is None else acc_ilp
        result = reductions.reduce(op, array, axes, room, chains)  # type: ignore[arg-type]
        return type(self).of(result, self._reduced_layout(result, axes))

    def _reduced_splat(self, op: str, axes: Sequence[int]) -> FragmentedArray:
        count = math.prod(self.shape[a] for a in axes)
        rest = tuple(n for a, n in enumerate(self.shape) if a not in axes)
        value: FragmentedArray = self
        if op == "add":
            value = self * count
        elif op == "mul":
            value = self**count
        elif op == "xor" and count % 2 == 0:
            value = self ^ self
        return type(self).of(
            registers.broadcast_in_dim(value.array(), rest, range(len(rest)))
        )

    def _reduced_layout(self, result: Any, axes: Sequence[int]) -> Any:
        if not isinstance(self.layout, TiledLayout):
            return None
        lead = len(self.shape) - self.layout.tiling.rank
        inner = [a - len(self.shape) for a in axes if a >= lead]
        if len(inner) == self.layout.tiling.rank:
            return None
        return _if_of(self.layout.reduce(inner) if inner else self.layout, result)

    # --- elements ---------------------------------------------------------------------

    def foreach(
        self,
        fn: Callable[[ir.Value, tuple[ir.Value, ...]], ir.Value | None],
        *,
        create_array: bool = False,
        is_signed: bool | None = None,
    ) -> FragmentedArray | None:
        """Calls a function with each element of a thread and its coordinates.

        These are values of type `index`. With `create_array` the results are an array.
        """
        axis, index = self._vector_axis(), ir.IndexType.get()
        made: list[ir.Value] = []
        firsts = layouts.thread_indices(self.layout, self.shape)
        for register, first in zip(self.registers.flat, firsts, strict=True):
            results = []
            for i, x in enumerate(dtypes.elements(register)):
                at = list(first)
                if i:
                    at[axis] = arith.addi(at[axis], arith.constant(index, i))
                results.append(fn(x, tuple(at)))
            if create_array:
                made.append(dtypes.pack(results))  # type: ignore[arg-type]
        if not create_array:
            return None
        return FragmentedArray(
            _registers=layouts.ndarray(made, self.registers.shape),
            _layout=self.layout,
            _is_signed=is_signed,
        )

    def _vector_axis(self) -> int:
        placement = place_registers(self.layout, self.shape)
        if isinstance(placement, LinearLayout):
            return placement.vector_axis
        if placement.vec_size > 1 and self.shape[-1] % placement.vec_size:
            raise errors.LayoutError(
                "foreach: the elements of a register are in several rows",
                expected=f"rows of a multiple of {placement.vec_size} elements",
                got=self.shape,
            )
        return len(self.shape) - 1

    def debug_print(self, fmt: str) -> None:
        """Prints a line for each element: `{}` is its position and its value."""
        positions = ", ".join(["{}"] * len(self.shape))
        line = fmt.format(f"[{positions}]: {{}}")
        self.foreach(lambda x, at: debug_print(line, *at, x, uniform=False))

    # --- memory -----------------------------------------------------------------------

    @classmethod
    def load_strided(
        cls,
        ref: ir.Value,
        *,
        is_signed: bool | None = None,
        vec_size: int | None = None,
    ) -> FragmentedArray:
        """Loads a reference to GMEM or SMEM, row-major elements cyclic over threads."""
        shape = tuple(ref.type.shape)
        bits = elements.bitwidth(ref.type.element_type)
        default = layouts.default_strided
        layout = WGStridedLayout(shape, vec_size) if vec_size else default(shape, bits)
        view = memrefs.view_of(ref, is_signed)
        return cls.of(transfers.load(view, layout, optimized=False), layout)

    @classmethod
    def load_untiled(
        cls,
        ref: ir.Value,
        *,
        layout: TiledLayout,
        swizzle: int = 16,
        is_signed: bool | None = None,
        optimized: bool = True,
    ) -> FragmentedArray:
        """Loads a reference to GMEM or SMEM that is not tiled, in a layout.

        `swizzle` is that of SMEM, in bytes, 16 is none; `optimized` refuses bank
        conflicts.
        """
        view = transfers.swizzled(memrefs.view_of(ref, is_signed), swizzle)
        return cls.of(transfers.load(view, layout, optimized=optimized), layout)

    @classmethod
    def load_tiled(
        cls,
        ref: ir.Value,
        swizzle: int | None,
        *,
        is_signed: bool | None = None,
        layout: FragmentedLayout = layouts.WGMMA_LAYOUT,
        optimized: bool = True,
        tiling_rank: int | None = None,
    ) -> FragmentedArray:
        """Loads a tiled array from SMEM; see `load_untiled`.

        The shape is (..., tiles of each axis, sizes of a tile); `tiling_rank` is the
        number of axes of a tile, by default half of all.
        """
        layout = layouts.resolve(layout)
        tiled = transfers.tiled(ref, swizzle, tiling_rank, is_signed)
        return cls.of(tiled.load(layout, optimized=optimized), layout)

    @classmethod
    def load_reduce_untiled(
        cls,
        ref: MultimemRef,
        layout: FragmentedLayout,
        reduction: MultimemReductionOp,
        swizzle: int = 16,
        is_signed: bool | None = None,
    ) -> FragmentedArray:
        """Loads an array of all devices, and combines what they have.

        PTX: `multimem.ld_reduce`. Since: sm_90.
        """
        layout, view = layouts.resolve(layout), memrefs.view_of(ref.ref, is_signed)
        assert isinstance(view, gmem.GmemView) and swizzle == 16
        # One device has nothing to combine.
        several = None if view.owner is None else reduction
        return cls.of(gmem.load(view, layout, reduction=several), layout)

    def store_untiled(
        self,
        ref: ir.Value | MultimemRef,
        *,
        swizzle: int = 16,
        optimized: bool = True,
        atomic: Atomic | None = None,
    ) -> None:
        """Stores the array to a reference to GMEM or SMEM that is not tiled.

        Arguments are as of `load_untiled`; `atomic` is the operation that combines
        elements with those in memory. A `MultimemRef` is that of all devices.
        """
        ref = ref.ref if isinstance(ref, MultimemRef) else ref
        array = self.array()
        strided = isinstance(self.layout, (WGStridedLayout, WGSplatLayout))
        view = transfers.swizzled(memrefs.view_of(ref, self.is_signed), swizzle)
        plain = optimized and not strided
        transfers.store(view, array, optimized=plain, atomic=atomic)

    def store_tiled(
        self,
        ref: ir.Value,
        swizzle: int | None,
        optimized: bool = True,
        tiling_rank: int | None = None,
        atomic: Atomic | None = None,
    ) -> None:
        """Stores to a tiled reference to SMEM; see `load_tiled` and `store_untiled`."""
        tiled = transfers.tiled(ref, swizzle, tiling_rank, self.is_signed)
        tiled.store(self.array(), optimized=optimized, atomic=atomic)

    # --- pytree -----------------------------------------------------------------------

    def tree_flatten(self) -> tuple[list[ir.Value], Any]:
        """Returns the registers, and what else the array consists of."""
        aux = self.layout, self.registers.shape, self.is_signed
        return list(self.registers.flat), aux

    @classmethod
    def tree_unflatten(cls, aux: Any, flat_registers: Sequence[Any]) -> FragmentedArray:
        """Returns the array of some registers."""
        layout, shape, is_signed = aux
        made = cls.__new__(cls)
        made._set(layout, is_signed, layouts.ndarray(list(flat_registers), shape), None)
        return made


jax.tree_util.register_pytree_node_class(FragmentedArray)


def _if_of(layout: FragmentedLayout, array: Any) -> FragmentedLayout | None:
    """A tiled layout if an array is in it; None otherwise."""
    if isinstance(array, RegisterArray) and isinstance(layout, TiledLayout):
        with contextlib.suppress(errors.LayoutError):
            return layout if layout.linear(array.shape) == array.layout else None
    return None


def _placed(cls: Any, array: Any, layout: Any) -> FragmentedArray:
    layout = layouts.resolve(layout)
    if isinstance(array, Deferred):
        if isinstance(layout, WGSplatLayout) and isinstance(array, Splat):
            return cls.of(array)
        array = array.materialize(layout)
    return cls.of(registers.regroup(array, layout), layout)


def _scratch(ref: ir.Value) -> SmemScratch:
    bits = elements.bitwidth(ref.type.element_type)
    size_bytes = math.prod(ref.type.shape) * bits // 8
    return SmemScratch(memrefs.memref_ptr(ref), size_bytes // 16 * 16)


def optimization_barrier(*arrays: FragmentedArray) -> Any:
    """Returns the arrays as new values to the compiler.

    They are computed before this point, and their uses stay behind it.
    """
    fresh = wgmma.optimization_barrier([x.array() for x in arrays])
    pairs = zip(fresh, arrays, strict=True)
    found = tuple(type(x).of(new, x.layout) for new, x in pairs)
    return found if len(found) != 1 else found[0]


def concatenate(arrays: Sequence[FragmentedArray], axis: int = 0) -> FragmentedArray:
    """Returns arrays one after the other along an axis; registers stay where they are.

    They have one element type and layout; strided ones are joined along axis 0 only.
    """
    first, rank = arrays[0], len(arrays[0].shape)
    axis %= rank
    others = {x.shape[:axis] + x.shape[axis + 1 :] for x in arrays}
    kinds = {(x.array().dtype, type(x.layout)) for x in arrays}
    tiled = isinstance(first.layout, TiledLayout)
    if len(others) > 1 or len(kinds) > 1 or isinstance(first.layout, WGSplatLayout):
        raise errors.ArgumentError(
            "concatenate: the arrays do not fit each other",
            expected="one element type, equal sizes on other axes, no splats",
            got=[(str(x.mlir_dtype), x.shape) for x in arrays],
        )
    if tiled != all(x.layout == first.layout for x in arrays) or (axis and not tiled):
        raise errors.LayoutError(
            "concatenate: registers would move",
            expected="one tiled layout, or strided arrays along axis 0",
            got=[x.layout for x in arrays],
        )
    sizes = list(first.shape)
    sizes[axis] = sum(x.shape[axis] for x in arrays)
    layout: Any = first.layout
    if not tiled:
        layout = WGStridedLayout(tuple(sizes), layout.vec_size)
    return FragmentedArray(
        _registers=np.concatenate([x.registers for x in arrays], axis=axis),
        _layout=layout,
        _is_signed=first.is_signed,
    )


def copy_tiled(src: ir.Value, dst: ir.Value, swizzle: int = 16) -> None:
    """Copies between GMEM and SMEM, tiled by (8, `swizzle` bytes), by threads."""
    inward = memrefs.is_smem(dst)
    shape = tuple((src if inward else dst).type.shape)
    bits = elements.bitwidth(src.type.element_type)
    signed = False if isinstance(src.type.element_type, ir.IntegerType) else None
    layout = catalogue.smem_gmem_copy(shape, bits, swizzle)
    if inward:
        x = FragmentedArray.load_untiled(
            src, layout=layout, is_signed=signed, optimized=False
        )
        x.store_tiled(dst, swizzle)
        return
    x = FragmentedArray.load_tiled(src, swizzle, is_signed=signed, layout=layout)
    x.store_untiled(dst, optimized=False)
