# SPDX-License-Identifier: Apache-2.0
"""Arrays in the registers of a warpgroup, and arrays that are not materialized yet.

A `RegisterArray` has a layout. A `Deferred` does not: a splat, an iota, a broadcast, or
an elementwise function of these adopts the layout of the array it is combined with.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import addressing, module
from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.layouts import LinearLayout, WGSplatLayout, WGStridedLayout
from pallas_gpu.layouts.registers import defaults
from pallas_gpu.layouts.registers import placement as placements
from pallas_gpu.layouts.registers.broadcasts import broadcast_layout
from pallas_gpu.layouts.registers.placement import (
    Placement,
    describe,
    place,
    place_registers,
    reshape_placement,
)


@dataclasses.dataclass(frozen=True)
class RegisterArray:
    """An array in the registers of a warpgroup.

    Attributes:
      values: one `vector<vec x T>` per register.
      layout: where each element is stored.
      dtype: element type, with the signedness that MLIR's integers lack.
    """

    values: tuple[ir.Value, ...]
    layout: Placement
    dtype: np.dtype

    def __post_init__(self) -> None:
        if len(self.values) != self.layout.num_registers:
            raise errors.InternalError(
                "The number of values is not the layout's number of registers",
                expected=self.layout.num_registers,
                got=len(self.values),
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.layout.shape

    def with_values(
        self, values: Sequence[ir.Value], dtype: np.dtype | None = None
    ) -> RegisterArray:
        """The same layout and dtype with other registers, e.g. a loop's carries."""
        return RegisterArray(tuple(values), self.layout, dtype or self.dtype)


class Deferred:
    """An array without a layout; `materialize` emits it in a given one."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def materialize(self, layout) -> RegisterArray:
        """Emits the registers of the array in a layout."""
        return self._emitted(place_registers(layout, self.shape), {})

    def _emitted(
        self, layout: Placement, done: dict[int, RegisterArray]
    ) -> RegisterArray:
        # An operand that is used twice is emitted once: expressions such as a hash's
        # would otherwise double with each step.
        if id(self) not in done:
            if isinstance(self, Mapped):
                columns = [x._emitted(layout, done).values for x in self.operands]
                values = map_registers(self.emit, columns)
                done[id(self)] = RegisterArray(values, layout, self.dtype)
            else:
                done[id(self)] = self._materialize(layout)
        return done[id(self)]

    def _materialize(self, layout: Placement) -> RegisterArray:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Splat(Deferred):
    """All elements have the same value; with shape () it is a scalar."""

    value: ir.Value
    dtype: np.dtype
    shape: tuple[int, ...] = ()

    def _materialize(self, layout: Placement) -> RegisterArray:
        register = dtypes.splat(self.value, layout.vector_length)
        return RegisterArray((register,) * layout.num_registers, layout, self.dtype)


@dataclasses.dataclass(frozen=True)
class Iota(Deferred):
    """Each element is its index along one dimension."""

    dtype: np.dtype
    shape: tuple[int, ...]
    dimension: int

    def _materialize(self, layout: Placement) -> RegisterArray:
        if isinstance(layout, WGStridedLayout):
            registers = _strided_coordinate(layout, self.dimension)
        else:
            registers = _linear_coordinate(layout, self.dimension)
        converted = {}
        for value in registers:
            if value not in converted:
                converted[value] = convert_value(value, dtypes.I32, self.dtype)
        values = tuple(converted[value] for value in registers)
        return RegisterArray(values, layout, self.dtype)


@dataclasses.dataclass(frozen=True)
class Broadcast(Deferred):
    """A register array repeated along new axes and axes of size one.

    Axis i of the operand is axis `dims[i]` of the result.
    """

    operand: RegisterArray
    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:  # type: ignore[override]
        return self.operand.dtype

    def _materialize(self, layout: Placement) -> RegisterArray:
        sources = None
        operand = self.operand
        if isinstance(layout, LinearLayout) and isinstance(
            operand.layout, LinearLayout
        ):
            sources = _broadcast_sources(layout, operand.layout, self.dims)
        if sources is None:
            raise errors.LayoutError(
                "The operand of a broadcast is in other threads than the result",
                expected=f"a layout that matches {describe(layout)} reduced to axes "
                f"{self.dims}",
                got=describe(operand.layout),
                hint="layout_cast the operand, or load it with a layout such as "
                "Layout.WGMMA.reduce(axis)",
            )
        return RegisterArray(gather(operand.values, sources), layout, self.dtype)


@dataclasses.dataclass(frozen=True)
class Mapped(Deferred):
    """An elementwise function of deferred arrays of one shape."""

    emit: Callable[..., ir.Value]
    operands: tuple[Deferred, ...]
    dtype: np.dtype

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The operands' shape."""
        return self.operands[0].shape

    def leaves(self) -> list[Deferred]:
        """Returns the arrays of the expression that are not functions, each once."""
        found: dict[int, Deferred] = {}
        rest: list[Deferred] = [self]
        while rest:
            x = rest.pop()
            if id(x) not in found:
                found[id(x)] = x
                rest += x.operands[::-1] if isinstance(x, Mapped) else ()
        return [x for x in found.values() if not isinstance(x, Mapped)]

    def with_leaves(self, function: Callable[[Deferred], Any]) -> Mapped:
        """Returns the same expression of other arrays."""
        return self._with_leaves(function, {})

    def _with_leaves(
        self, function: Callable[[Deferred], Any], done: dict[int, Any]
    ) -> Mapped:
        for x in self.operands:
            if id(x) not in done:
                done[id(x)] = (
                    x._with_leaves(function, done)
                    if isinstance(x, Mapped)
                    else function(x)
                )
        return Mapped(self.emit, tuple(done[id(x)] for x in self.operands), self.dtype)


Array = RegisterArray | Deferred


def placed(x: Deferred, layout: Placement | None = None) -> RegisterArray:
    """Emits an array for which nothing determines a layout.

    Args:
      x: the array.
      layout: used unless `x` repeats an array that is elsewhere: threads then keep what
        they have. The default layout, if not given.
    """
    bits = max(dtypes.bits(x.dtype), 8)
    layout = layout or default_placement(x.shape, bits)
    for broadcast in broadcasts(x):
        own = broadcast.operand.layout
        if not isinstance(own, LinearLayout):
            continue
        if not (
            isinstance(layout, LinearLayout)
            and layout.broadcast_matches(own, broadcast.dims)
        ):
            layout = broadcast_layout(own, x.shape, broadcast.dims, bits)
            break
    return x.materialize(layout)


def broadcasts(x: Deferred) -> list[Broadcast]:
    """The broadcasts that an array is a function of."""
    leaves = x.leaves() if isinstance(x, Mapped) else [x]
    return [leaf for leaf in leaves if isinstance(leaf, Broadcast)]


def map_registers(
    emit: Callable[..., ir.Value], columns: Sequence[Sequence[ir.Value]]
) -> tuple[ir.Value, ...]:
    """Applies an emitter to each register; equal operands are computed once."""
    done: dict[tuple, ir.Value] = {}
    result = []
    for values in zip(*columns, strict=True):
        value = done.get(values)
        if value is None:
            value = done[values] = emit(*values)
        result.append(value)
    return tuple(result)


# --- layouts --------------------------------------------------------------------------


def default_placement(shape: Sequence[int], bits: int) -> Placement:
    """The default layout over the threads that execute the emitted code.

    These are the threads of the warpgroup, or of the warp: then each warp has an array
    of its own. See `placement.default_placement`.
    """
    return placements.default_placement(shape, bits, module.current().issuer_threads)


def spread_layout(shape: Sequence[int], bits: int = 32) -> LinearLayout:
    """A linear layout of any shape over these threads; see `defaults.spread_layout`."""
    threads = module.current().issuer_threads
    return defaults.spread_layout(tuple(shape), bits, threads)


# --- making arrays --------------------------------------------------------------------


def splat(value: ir.Value, dtype: np.dtype, shape: Sequence[int] = ()) -> Splat:
    """The array whose elements are all `value`."""
    return Splat(value, np.dtype(dtype), tuple(shape))


def iota(dtype: np.dtype, shape: Sequence[int], dimension: int) -> Iota:
    """The array of indices along `dimension`."""
    return Iota(np.dtype(dtype), tuple(shape), dimension)


def broadcast_in_dim(x: Array, shape: Sequence[int], dims: Sequence[int]) -> Array:
    """Repeats an array: axis i of `x` becomes axis `dims[i]` of `shape`.

    A register array that only gains axes of size one keeps its registers.
    """
    shape, dims = tuple(shape), tuple(dims)
    match x:
        case Splat():
            return Splat(x.value, x.dtype, shape)
        case Iota() if x.shape[x.dimension] == shape[dims[x.dimension]]:
            return Iota(x.dtype, shape, dims[x.dimension])
        case Iota():  # an axis of size one: all indices are 0
            return Splat(dtypes.constant(0, x.dtype), x.dtype, shape)
        case Broadcast():
            return Broadcast(x.operand, shape, tuple(dims[d] for d in x.dims))
        case Mapped():
            return x.with_leaves(lambda leaf: broadcast_in_dim(leaf, shape, dims))
        case RegisterArray():
            if math.prod(shape) == math.prod(x.shape) and list(dims) == sorted(dims):
                return _reshape_array(x, shape)
            return Broadcast(x, shape, dims)
    raise errors.InternalError("Not a kernel array", got=type(x))


def reshape(x: Array, shape: Sequence[int]) -> Array:
    """Reshapes an array, row-major, without data movement.

    Raises:
      LayoutError: the placement would not be linear in the new shape.
    """
    shape = tuple(shape)
    if shape == x.shape:
        return x
    match x:
        case RegisterArray():
            return _reshape_array(x, shape)
        case Splat():
            return Splat(x.value, x.dtype, shape)
        case Mapped():
            return x.with_leaves(lambda leaf: reshape(leaf, shape))
        case Iota() | Broadcast():
            return _reshape_units(x, shape)
    raise errors.InternalError("Not a kernel array", got=type(x))


def squeeze(x: Array, axes: Sequence[int]) -> Array:
    """Drops axes of size one."""
    rank = len(x.shape)
    dropped = {a % rank for a in axes}
    return reshape(x, [s for a, s in enumerate(x.shape) if a not in dropped])


def transpose(x: RegisterArray, permutation: Sequence[int]) -> RegisterArray:
    """Result axis i is axis `permutation[i]`; registers stay where they are.

    Raises:
      LayoutError: the array is strided without a linear form.
    """
    # Without a linear form, this raises an error that states the reason.
    layout = x.layout if isinstance(x.layout, LinearLayout) else x.layout.linear()
    values = tuple(x.values[r] for r in layout.transpose_registers(permutation))
    return RegisterArray(values, layout.transpose(permutation), x.dtype)


def static_slice(
    x: Array, starts: Sequence[int], sizes: Sequence[int]
) -> RegisterArray | Splat:
    """A slice that is a subset of the array's registers."""
    match x:
        case Splat():
            return Splat(x.value, x.dtype, tuple(sizes))
        case RegisterArray(layout=LinearLayout() as layout):
            chosen = layout.slice_registers(starts, sizes)
            values = tuple(x.values[r] for r in chosen)
            return RegisterArray(values, layout.slice(starts, sizes), x.dtype)
    raise errors.LayoutError(
        "This array cannot be sliced in registers",
        expected="a register array with a linear layout, or a splat",
        got=type(x).__name__,
        hint="layout_cast the array first, or slice a reference",
    )


def regroup(x: Array, layout) -> Array:
    """Converts an array to a layout without data movement between threads.

    A deferred array is materialized in it; in a register array each thread may regroup
    its own elements. `relayout.layout_cast` exchanges data too.
    """
    if isinstance(x, Splat) and isinstance(place(layout, x.shape), WGSplatLayout):
        return x
    target = place_registers(layout, x.shape)
    if isinstance(x, Deferred):
        return x.materialize(target)
    if target == x.layout:
        return x
    sources = None
    if isinstance(target, LinearLayout) and isinstance(x.layout, LinearLayout):
        sources = _broadcast_sources(target, x.layout, tuple(range(len(x.shape))))
    if sources is None:
        raise errors.LayoutError(
            "The array's elements are in other threads than the layout requires",
            expected=describe(target),
            got=describe(x.layout),
            hint=f"layout_cast it to {describe(target)}",
        )
    return RegisterArray(gather(x.values, sources), target, x.dtype)


# --- pieces ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def _broadcast_sources(
    layout: LinearLayout, operand: LinearLayout, dims: tuple[int, ...]
) -> list[list[tuple[int, int]]] | None:
    elements = layout.broadcast_elements(operand, dims)
    if elements is None:
        return None
    return [[(int(r), int(v)) for r, v in register] for register in elements]


def gather(
    values: Sequence[ir.Value], sources: Sequence[Sequence[tuple[int, int]]]
) -> tuple[ir.Value, ...]:
    """Vectors assembled from elements of other vectors.

    Args:
      values: vectors of one length.
      sources: for each result its elements, as (index of the value, element in it).
    """
    whole = list(range(dtypes.length(values[0]) or 1))
    done: dict[tuple, ir.Value] = {}

    def build(register: tuple[tuple[int, int], ...]) -> ir.Value:
        first = register[0][0]
        if list(register) == [(first, v) for v in whole]:
            return values[first]
        elements = {rv: dtypes.extract(values[rv[0]], rv[1]) for rv in set(register)}
        if len(elements) == 1:
            return dtypes.splat(elements[register[0]], len(register))
        return dtypes.pack([elements[rv] for rv in register])

    for register in map(tuple, sources):
        if register not in done:
            done[register] = build(register)
    return tuple(done[tuple(register)] for register in sources)


def _reshape_array(x: RegisterArray, shape: tuple[int, ...]) -> RegisterArray:
    return RegisterArray(x.values, reshape_placement(x.layout, shape), x.dtype)


def _reshape_units(x: Iota | Broadcast, shape: tuple[int, ...]) -> Array:
    """Inserts or removes axes of size 1."""
    kept = [a for a, s in enumerate(x.shape) if s != 1]
    places = [a for a, s in enumerate(shape) if s != 1]
    if [x.shape[a] for a in kept] != [shape[a] for a in places]:
        raise errors.LayoutError(
            "A reshape of this array can only insert or remove axes of size 1",
            expected=f"the sizes of {x.shape} other than 1",
            got=shape,
            hint="layout_cast the array before the reshape",
        )
    new_axis = dict(zip(kept, places, strict=True))
    if isinstance(x, Iota):
        if x.dimension not in new_axis:
            return Splat(dtypes.constant(0, x.dtype), x.dtype, shape)
        return Iota(x.dtype, shape, new_axis[x.dimension])
    axes = [i for i, d in enumerate(x.dims) if d in new_axis]
    operand = squeeze(x.operand, [i for i in range(len(x.dims)) if i not in axes])
    dims = tuple(new_axis[x.dims[i]] for i in axes)
    return Broadcast(operand, shape, dims)  # type: ignore[arg-type]


def _linear_coordinate(layout: LinearLayout, axis: int) -> list[ir.Value]:
    """i32 vectors: the coordinate of each element along an axis."""
    kernel = module.current()
    base = addressing.thread_sum([c[axis] for c in layout.thread_columns])
    length = layout.vector_length

    def register(origin: int) -> ir.Value:
        first = base if origin == 0 else arith.addi(base, kernel.i32(origin))
        vector = dtypes.splat(first, length)
        if length == 1 or layout.vector_axis != axis:
            return vector
        return arith.addi(vector, _counting(length))

    made = {origin: register(origin) for origin in {o[axis] for o in layout.origins}}
    return [made[o[axis]] for o in layout.origins]


def _counting(length: int) -> ir.Value:
    return dtypes.pack([module.current().i32(v) for v in range(length)])


def _strided_coordinate(layout: WGStridedLayout, axis: int) -> list[ir.Value]:
    """The same if coordinates are not linear: by division of the flat index."""
    step = math.prod(layout.shape[axis + 1 :])
    size = layout.shape[axis]
    length = layout.vec_size
    base = addressing.thread_sum([length << b for b in range(7)])
    result = []
    for register in range(layout.num_registers):
        start = module.current().i32(layout.flat_offset(0, register))
        flat = dtypes.splat(arith.addi(base, start), length)
        if length > 1:
            flat = arith.addi(flat, _counting(length))
        quotient = arith.divui(flat, dtypes.constant(step, dtypes.I32, flat))
        bound = dtypes.constant(size, dtypes.I32, flat)
        result.append(arith.remui(quotient, bound))
    return result
