# SPDX-License-Identifier: Apache-2.0
"""Registers of a fragmented array, and the array of emitters that they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_gpu import errors
from pallas_gpu.emitters import registers
from pallas_gpu.emitters.elements import dtypes, packed
from pallas_gpu.emitters.registers import Array, RegisterArray, Splat
from pallas_gpu.layouts import WGSplatLayout, WGStridedLayout
from pallas_gpu.layouts.registers.placement import (
    Placement,
    is_strided,
    name_of,
    place_registers,
)
from pallas_gpu.mosaic import elements, layouts
from pallas_gpu.mosaic.layouts import FragmentedLayout


class Held:
    """The registers of a `FragmentedArray`, and the array of emitters that they are."""

    layout: FragmentedLayout
    is_signed: bool | None

    def __init__(
        self,
        *,
        _registers: np.ndarray,
        _layout: FragmentedLayout,
        _is_signed: bool | None,
    ) -> None:
        self._set(layouts.resolve(_layout), _is_signed, _registers, None)
        layouts.array_shape(self.layout, np.shape(_registers))
        if isinstance(self.mlir_dtype, ir.IntegerType) != (_is_signed is not None):
            raise errors.ArgumentTypeError(
                "FragmentedArray: is_signed does not match the element type",
                expected="True or False for an integer type, None for others",
                got=f"is_signed={_is_signed} for {self.mlir_dtype}",
            )

    def _set(self, layout, is_signed, values, array) -> None:
        self.layout, self.is_signed = layout, is_signed
        self._registers, self._array = values, array

    # --- to emitters and back ---------------------------------------------------------

    @classmethod
    def of(cls, array: Array, layout: FragmentedLayout | None = None) -> Self:
        """Returns an array of emitters as a fragmented array.

        One without registers gets the default layout; `layout` describes the others'.
        """
        if isinstance(array, Splat):
            layout = WGSplatLayout(array.shape)
        else:
            if not isinstance(array, RegisterArray):
                array = registers.placed(array)
            layout = layout or _description(array.layout)
        found = cls.__new__(cls)
        found._set(layout, elements.signedness(array.dtype), None, array)
        return found

    def array(self) -> Array:
        """Returns the array as emitters have it."""
        if self._array is None:
            dtype = elements.dtype_of(self.mlir_dtype, self.is_signed)
            flat = [from_register(x, dtype) for x in self._registers.flat]
            if isinstance(self.layout, WGSplatLayout):
                self._array = Splat(flat[0], dtype, self.layout.shape)
                return self._array
            shape = layouts.array_shape(self.layout, self._registers.shape)
            values: list[Any] = [None] * len(flat)
            places = layouts.register_places(self.layout, shape)
            for place, value in zip(places, flat, strict=True):
                values[place] = value
            placement = place_registers(self.layout, shape)
            self._array = RegisterArray(tuple(values), placement, dtype)
        return self._array

    @property
    def registers(self) -> np.ndarray:
        """The registers, as MLIR values of the element type."""
        if self._registers is None:
            array = self._array
            if isinstance(array, Splat):
                values: Sequence[ir.Value] = [array.value]
            else:
                places = layouts.register_places(self.layout, array.shape)
                values = [array.values[place] for place in places]
            values = [to_register(x, array.dtype) for x in values]
            shape = layouts.registers_shape(self.layout, array.shape)
            self._registers = layouts.ndarray(values, shape)
        return self._registers

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        if self._array is not None:
            return self._array.shape
        return layouts.array_shape(self.layout, self._registers.shape)

    @property
    def mlir_dtype(self) -> ir.Type:
        """The type of an element."""
        if self._registers is None:
            return elements.type_of(self._array.dtype)
        return _element(self._registers.flat[0])

    def copy(self) -> Self:
        """Returns an array with the same registers."""
        made = type(self).__new__(type(self))
        values = None if self._registers is None else self._registers.copy()
        made._set(self.layout, self.is_signed, values, self._array)
        return made


# --- registers ------------------------------------------------------------------------


def to_register(value: ir.Value, dtype: np.dtype) -> ir.Value:
    """A register of emitters as a value of the element type: narrow types are bytes."""
    type_ = elements.type_of(dtype)
    if dtypes.is_packed(dtype) and _element(value) != type_:
        if dtypes.length(value) is None:
            integer = ir.IntegerType.get_signless(dtypes.stored_bits(dtype))
            value = arith.trunci(integer, value)
        else:
            value = packed.to_memory(value, dtype)
    return _retyped(value, type_)


def from_register(value: ir.Value, dtype: np.dtype) -> ir.Value:
    """The inverse of `to_register`."""
    byte, type_ = ir.IntegerType.get_signless(8), dtypes.mlir_type(dtype)
    if not dtypes.is_packed(dtype) or _element(value) == type_:
        return _retyped(value, type_)
    if dtypes.length(value) is None:
        integer = ir.IntegerType.get_signless(dtypes.stored_bits(dtype))
        return arith.extui(byte, _retyped(value, integer))
    return packed.from_memory(_retyped(value, byte), dtype)


def _element(value: ir.Value) -> ir.Type:
    type_ = value.type
    return type_.element_type if isinstance(type_, ir.VectorType) else type_


def _retyped(value: ir.Value, element: ir.Type) -> ir.Value:
    """The bits of a value as one or several elements of another type."""
    type_ = element
    if dtypes.length(value) is not None:
        count = elements.bitwidth(value.type) // elements.bitwidth(element)
        type_ = ir.VectorType.get([count], element)
    if value.type == type_:
        return value
    cast = arith.bitcast if type_ is element else vector.bitcast
    return cast(type_, value)


@functools.lru_cache(maxsize=256)
def _description(placement: Placement) -> FragmentedLayout:
    """The description of a placement; the placement itself if it has none."""
    if isinstance(placement, WGStridedLayout):
        return placement
    if (name := name_of(placement)) is not None:
        return name.to_layout()
    if is_strided(placement):
        return WGStridedLayout(placement.shape, placement.vector_length)
    return placement
