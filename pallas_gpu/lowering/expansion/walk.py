# SPDX-License-Identifier: Apache-2.0
"""The walk over the warpgroup-level module, and what an expander works with.

Operations on whole arrays are replaced where they stand; scalar code around them stays.
A vector becomes an array in registers, or stays deferred (a splat, an iota) until a
layout asks for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.layouts.registers.placement import default_placement
from pallas_gpu.lowering import inference, scratch
from pallas_gpu.lowering.context import KernelState
from pallas_gpu.mosaic import logical, relayout
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.primitives import _registry as registry

Expander = Callable[["Expansion", Any], None]


@dataclasses.dataclass
class Expansion:
    """What expanders share.

    Attributes:
      kernel: the kernel that is lowered.
      assignment: the layouts.
      arrays: what has become of each vector.
      dead: operations to erase, users after what they use.
      moved: vectors that were moved to a layout, for each block that is open: what a
        block has moved is not seen behind its end.
    """

    kernel: KernelState
    assignment: inference.Assignment
    arrays: dict[ir.Value, regs.Array] = dataclasses.field(default_factory=dict)
    dead: list[ir.Operation] = dataclasses.field(default_factory=list)
    moved: list[dict[Any, regs.Array]] = dataclasses.field(default_factory=list)

    def array(self, value: ir.Value, dtype: np.dtype | None = None) -> regs.Array:
        """Returns a vector's array as it is; `dtype` gives integers their sign."""
        array = self.arrays[value]
        return array if dtype is None else regs.with_sign(array, dtype)

    def operand(self, op: Any, i: int, dtype: np.dtype | None = None) -> regs.Array:
        """Returns an operand in the layout in which it is wanted.

        A deferred array stays deferred where any layout will do.
        """
        value = op.operands[i]
        array = self.array(value)
        wanted = self.assignment.operand(op.operation, i)
        if wanted is not None:
            array = self._moved_once(value, array, wanted)
        return array if dtype is None else regs.with_sign(array, dtype)

    def _moved_once(self, value: ir.Value, array: regs.Array, wanted: Any) -> Any:
        if isinstance(array, regs.Deferred) or array.layout == wanted:
            return self.in_layout(array, wanted)
        key = value, wanted
        known = next((scope[key] for scope in self.moved if key in scope), None)
        if known is None:
            known = self.moved[-1][key] = self.in_layout(array, wanted)
        return known

    def placed(self, op: Any, i: int, dtype: np.dtype | None = None) -> Any:
        """As `operand`, in registers."""
        array = self.operand(op, i, dtype)
        if isinstance(array, regs.Deferred):
            return array.materialize(
                default_placement(array.shape, dtypes.bits(array.dtype))
            )
        return array

    def in_layout(self, array: regs.Array, wanted: Any) -> regs.Array:
        """Moves an array to a layout."""
        if isinstance(array, regs.Deferred):
            return array.materialize(wanted)
        if array.layout == wanted:
            return array
        room = scratch.for_relayout(self.kernel, array, wanted)
        return relayout.relayout(array, wanted, room)

    def set(self, value: ir.Value, array: regs.Array) -> None:
        """Enters what a vector has become, moved to the layout it should have.

        A repeated array lies where its operand lies: only there can it be made.
        """
        wanted = self.assignment.result(value)
        lies = isinstance(array, regs.RegisterArray | regs.Broadcast)
        if wanted is not None and lies:
            array = self.in_layout(array, wanted)
        self.arrays[value] = array


def _is_memref(value: ir.Value) -> bool:
    return isinstance(value.type, ir.MemRefType)


def is_array(value: ir.Value) -> bool:
    """True for a vector."""
    return isinstance(value.type, ir.VectorType)


def expand(kernel: KernelState, block: Any, assignment: inference.Assignment) -> None:
    """Expands a kernel's body in place.

    Args:
      kernel: the kernel; its builder is open.
      block: the body.
      assignment: its layouts.
    """
    expansion = Expansion(kernel, assignment)
    expand_block(expansion, block)
    for op in reversed(expansion.dead):
        op.erase()


def expand_block(expansion: Expansion, block: Any) -> None:
    """Expands the operations of a block in order."""
    keep_lines = expansion.kernel.params.compiler_params.line_info
    expansion.moved.append({})
    for op in list(block.operations):
        expander = _find(op)
        if expander is None:
            continue
        location = op.location if keep_lines else ir.Location.unknown()
        with ir.InsertionPoint(op), location, _scope(expansion, op):
            try:
                expander(expansion, op)
            except errors.PallasGpuError as error:
                raise error.with_location(inference.where(op.operation)) from None
    expansion.moved.pop()


def _scope(expansion: Expansion, op: Any) -> contextlib.AbstractContextManager[None]:
    """Lets the emitters issue for whom the rule has emitted the operation."""
    if logical.IN_WARP in op.operation.attributes:
        return expansion.kernel.builder.in_warp()
    return contextlib.nullcontext()


def _find(op: Any) -> Expander | None:
    name = op.operation.name
    if name.startswith(logical.SCALAR):
        return None
    expander = registry.rule(name, registry.RuleKind.EXPAND)
    values = (*op.operands, *op.results)
    arrays = any(is_array(v) or _is_memref(v) for v in values)
    if expander is None and (arrays or name.startswith(logical.OWN)):
        raise errors.InternalError(f"no expansion for {name}")
    return expander
