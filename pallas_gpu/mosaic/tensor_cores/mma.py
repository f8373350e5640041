# SPDX-License-Identifier: Apache-2.0
"""mma: products of arrays in registers, by the warps."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters.tensor_cores import mma as emitters
from pallas_gpu.layouts import TiledLayout, element_bits
from pallas_gpu.layouts.registers.fragments import MmaShape
from pallas_gpu.mosaic import elements
from pallas_gpu.mosaic.fragmented_array import FragmentedArray


class MMALayouts:
    """The layouts of the operands of `mma`: `lhs`, `rhs` and the accumulator, `acc`.

    `m_warps`, 1, 2 or 4, are along the rows; the others are along the columns.
    """

    lhs: TiledLayout
    rhs: TiledLayout
    acc: TiledLayout

    def __init__(self, element_type: Any, *, m_warps: int = 4) -> None:
        shape = MmaShape(0, 0, 0, _bits(element_type), m_warps)
        self.lhs, self.rhs, self.acc = shape.lhs, shape.rhs, shape.acc

    @classmethod
    def for_shape(cls, element_type: Any, m: int, n: int) -> MMALayouts:
        """Returns the layouts of most warps along the rows that divide (m, n).

        Raises:
          ShapeError: there are none.
        """
        for shape in MmaShape.divisions(m, n, 0, _bits(element_type)):
            rows, columns, _ = shape.tile
            if m % rows == 0 and n % columns == 0:
                return cls(element_type, m_warps=shape.m_warps)
        raise errors.ShapeError(
            "No division of this product among four warps",
            expected="rows a multiple of 16 w, columns of 32 / w, for w = 1, 2 or 4",
            got=(m, n),
        )


def _bits(element_type: Any) -> int:
    if isinstance(element_type, ir.Type):
        return elements.bitwidth(element_type)
    return element_bits(element_type)


def mma(
    acc: FragmentedArray, a: FragmentedArray, b: FragmentedArray
) -> FragmentedArray:
    """Returns `acc + a @ b`.

    PTX: `mma.sync`. Since: sm_80. All threads of the warpgroup issue it. acc is (M, N)
    of float32, or of int32 for integers, a (M, K), b (K, N), in `MMALayouts`.

    Raises:
      LayoutError: an operand is in another layout.
    """
    operands: Any = [x.array() for x in (acc, a, b)]
    return FragmentedArray.of(emitters.mma(*operands), acc.layout)
