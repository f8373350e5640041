# SPDX-License-Identifier: Apache-2.0
"""wgmma: products that accumulate in registers, and are waited for by the body."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters.registers import Deferred
from pallas_gpu.emitters.tensor_cores import wgmma as emitters
from pallas_gpu.mosaic import elements
from pallas_gpu.mosaic.fragmented_array import FragmentedArray, optimization_barrier
from pallas_gpu.mosaic.memory import memrefs


class WGMMAAccumulator:
    """An accumulator of `wgmma`, in `WGMMA_LAYOUT`; see `zero` and `from_registers`.

    `_sync` is accepted for upstream's sake: a product fences its accumulator.
    """

    def __init__(
        self, *, _value: FragmentedArray, _original_layout: Any, _sync: bool = True
    ) -> None:
        self._value, self._original_layout = _value, _original_layout

    @classmethod
    def zero(
        cls,
        m: int,
        n: int,
        dtype: ir.Type | None = None,
        *,
        is_signed: bool | None = None,
    ) -> WGMMAAccumulator:
        """Returns zeros of float32, float16 or a signed 32-bit integer.

        m and n are multiples of 64 and of 8.
        """
        wide = np.dtype(np.float32)
        kind = wide if dtype is None else elements.dtype_of(dtype, is_signed)
        return cls.from_registers(FragmentedArray.of(emitters.zeros((m, n), kind)))

    @classmethod
    def from_registers(
        cls, registers: FragmentedArray, sync: bool = True
    ) -> WGMMAAccumulator:
        """Returns an array in `WGMMA_LAYOUT` as an accumulator."""
        array = registers.array()
        if isinstance(array, Deferred):
            raise errors.LayoutError(
                "A splat is not an accumulator",
                expected="an array in WGMMA_LAYOUT",
                got=registers.layout,
                hint="use WGMMAAccumulator.zero, or to_layout(WGMMA_LAYOUT)",
            )
        return cls(_value=registers, _original_layout=registers.layout, _sync=sync)

    @property
    def value(self) -> FragmentedArray:
        """The array; products are complete after a wait for their group."""
        # Reads of the registers stay behind the wait before this point.
        return optimization_barrier(self._value)

    def tree_flatten(self) -> tuple[tuple[FragmentedArray], Any]:
        """Returns the array, and its layout."""
        return (self._value,), self._original_layout

    @classmethod
    def tree_unflatten(cls, aux: Any, value: Any) -> WGMMAAccumulator:
        """Returns the accumulator of an array."""
        return cls(_value=value[0], _original_layout=aux, _sync=False)


jax.tree_util.register_pytree_node_class(WGMMAAccumulator)


def wgmma(
    acc: WGMMAAccumulator,
    a: FragmentedArray | ir.Value,
    b: ir.Value,
    *,
    swizzle: int = 128,
) -> WGMMAAccumulator:
    """Starts `acc + a @ b` and returns the accumulator that will hold it.

    PTX: `wgmma.fence`, `wgmma.mma_async`. Since: sm_90a. All threads of the warpgroup
    issue it. `nvvm.wgmma_commit_group_sync_aligned()` ends a group of products, and
    `nvvm.wgmma_wait_group_sync_aligned(n)` waits for all groups but the last n.

    a is in registers, or as b a reference to SMEM, tiled by 8 rows of `swizzle` bytes.

    Raises:
      ShapeError, DTypeError, LayoutError: the operands do not match any instruction.
    """
    is_array = isinstance(a, FragmentedArray)
    left: Any = a.array() if is_array else memrefs.tiled_view_of(a, swizzle)
    right = memrefs.tiled_view_of(b, swizzle)
    array: Any = acc._value.array()
    result = emitters.mma(array, left, right, commits=False)
    value = FragmentedArray.of(result, acc._value.layout)
    return WGMMAAccumulator(
        _value=value, _original_layout=acc._original_layout, _sync=False
    )
