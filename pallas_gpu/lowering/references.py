# SPDX-License-Identifier: Apache-2.0
"""Parts of references as operands of rules, and their windows in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import elementwise
from pallas_gpu.emitters import module as emission
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.devices import peers
from pallas_gpu.emitters.elements import dtypes, scalars
from pallas_gpu.layouts.window import Sum, Window
from pallas_gpu.lowering import values as vals
from pallas_gpu.program.nodes import Access, Operand

I32 = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A part of a reference, an operand of a rule.

    Attributes:
      handle: the reference.
      window: the part, in the reference's shape; dynamic starts are i32 values.
      viewed: dtype as which the elements are viewed; None for their own.
      owner: whose memory it is; None: that of the executing device.
    """

    handle: Any
    window: Window
    viewed: Any = None
    owner: peers.Owner | None = None

    @classmethod
    def of(cls, access: Access, read: Callable[[Operand], Any]) -> Reference:
        """Returns an access of the program.

        Args:
          read: returns the value of an operand of the program.
        """

        def start(of_axis: Any) -> ir.Value | int:
            if isinstance(of_axis, int):
                return of_axis
            if not isinstance(of_axis, Sum):
                return i32(index_value(read(of_axis)))
            terms = [index_value(read(term)) for term in of_axis.terms]
            numbers = [term for term in terms if isinstance(term, int)]
            total: Any = 0
            for term in terms:
                if not isinstance(term, int):
                    total = add_indices(total, term)
            return add_indices(total, of_axis.constant + sum(numbers))

        window = access.window.at([start(x) for x in access.window.starts])
        viewed = None if access.viewed is None else access.viewed[1]
        owner: peers.Owner | None = None
        if access.owner is not None:
            device = access.device
            owner = peers.ALL if device is None else start(Sum(0, (device,)))
        return cls(read(access.buffer), window, viewed, owner)

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements in memory."""
        if self.viewed is None:
            return self.handle.dtype
        return dtypes.memory_dtype(np.dtype(self.viewed))

    def in_memory(self) -> Window:
        """Returns the part as a window of the array in memory, batch axes first.

        Known multiples of its starts are derived from the code that computes them.
        """
        lead = getattr(self.handle, "lead", ())
        window = self.window
        if lead:
            window = window.behind(lead, self.handle.shape[: len(lead)])
        return window.at(window.starts, list(map(scalars.divisor, window.starts)))

    def in_tmem(self) -> Window:
        """Returns the part in rows and columns of TMEM.

        The dimensions before the last two are spread over the columns.
        """
        *lead, row, column = self.window.starts
        *sizes, rows, columns = self.window.array_shape
        first = _row_major((*lead, column), (*sizes, columns))
        return Window.whole((rows, math.prod(sizes) * columns)).slice(
            (row, first),
            self.window.sizes[-2:],
            (0, scalars.divisor(first)),
            add=add_indices,
        )

    def element(self) -> ir.Value | int:
        """Returns the row-major index of the part of one element."""
        return _row_major(self.window.starts, self.window.array_shape)


def index_value(value: Any) -> Any:
    """Returns a constant index as a Python number, so that it is static in views."""
    if vals.is_scalar(value) and dtypes.is_constant(value.value):
        attribute = value.value.owner.attributes["value"]
        if isinstance(attribute, ir.IntegerAttr):
            # An attribute holds the bits regardless of the sign.
            number = np.array(attribute.value).astype(value.dtype)
            return number.item()
    return value


def i32(value: Any) -> ir.Value | int:
    """Returns an index as an i32 value, or as a Python number."""
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, regs.Splat):
        return vals.scalar_value(elementwise.astype(value, I32))
    return value


def add_indices(a: Any, b: Any) -> ir.Value | int:
    """Adds two indices, numbers or values."""
    builder = emission.current()
    a, b = i32(a), i32(b)
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0 or b == 0:
        return b if a == 0 else a
    return arith.addi(builder.i32(a), builder.i32(b))


def _row_major(starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    index: Any = 0
    for start, size in zip(starts, sizes, strict=True):
        if isinstance(index, int):
            index *= size
        else:
            index = arith.muli(index, emission.current().i32(size))
        index = add_indices(index, start)
    return index
