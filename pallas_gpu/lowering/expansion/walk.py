# SPDX-License-Identifier: Apache-2.0
"""The walk over the warpgroup-level module, and the state of the expanders.

Operations on whole arrays are replaced in place; scalar code around them is unchanged.
A vector becomes an array in registers, or stays deferred (a splat, an iota) until a use
requires a layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.lowering import inference, memrefs, scratch
from pallas_gpu.lowering.context import KernelState
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes
from pallas_gpu.mosaic.moves import relayout
from pallas_gpu.mosaic.registers import default_placement
from pallas_gpu.primitives import _registry as registry

Expander = Callable[["Expansion", Any], None]


@dataclasses.dataclass
class Expansion:
    """The state that expanders share.

    Attributes:
      kernel: the kernel that is lowered.
      assignment: the layouts.
      arrays: the array of each vector.
      dead: operations to erase, users after what they use.
      marked: operations that a single warp executes.
      moved: relayouts that were already emitted, for each open block: a block's
        relayouts are not visible after its end.
      parts: the parts of arrays behind memrefs that were resolved.
    """

    kernel: KernelState
    assignment: inference.Assignment
    arrays: dict[ir.Value, regs.Array] = dataclasses.field(default_factory=dict)
    dead: list[ir.Operation] = dataclasses.field(default_factory=list)
    marked: list[ir.Operation] = dataclasses.field(default_factory=list)
    moved: list[dict[Any, regs.Array]] = dataclasses.field(default_factory=list)
    parts: dict[ir.Value, memrefs.Part] = dataclasses.field(default_factory=dict)

    def part(self, ref: ir.Value) -> memrefs.Part:
        """Returns the part of an array behind a memref."""
        part = self.parts.get(ref)
        if part is None:
            part = memrefs.resolve(ref)
            if part is None:
                raise errors.InternalError("not an array in memory", got=str(ref))
            self.parts[ref] = part
        return part

    def array(self, value: ir.Value, dtype: np.dtype | None = None) -> regs.Array:
        """Returns a vector's array; `dtype` determines the sign of integers."""
        array = self.arrays[value]
        return array if dtype is None else regs.with_sign(array, dtype)

    def operand(self, op: Any, i: int, dtype: np.dtype | None = None) -> regs.Array:
        """Returns an operand in its assigned layout.

        A deferred array stays deferred where any layout is admitted.
        """
        value = op.operands[i]
        array = self.array(value)
        layout = self.assignment.operand(op.operation, i)
        if layout is not None:
            array = self._moved_once(value, array, layout)
        return array if dtype is None else regs.with_sign(array, dtype)

    def _moved_once(self, value: ir.Value, array: regs.Array, layout: Any) -> Any:
        if isinstance(array, regs.Deferred) or array.layout == layout:
            return self.in_layout(array, layout)
        key = value, layout
        known = next((scope[key] for scope in self.moved if key in scope), None)
        if known is None:
            known = self.moved[-1][key] = self.in_layout(array, layout)
        return known

    def placed(self, op: Any, i: int, dtype: np.dtype | None = None) -> Any:
        """As `operand`, materialized in registers."""
        array = self.operand(op, i, dtype)
        if isinstance(array, regs.Deferred):
            return array.materialize(
                default_placement(array.shape, dtypes.bits(array.dtype))
            )
        return array

    def in_layout(self, array: regs.Array, layout: Any) -> regs.Array:
        """Moves an array to a layout."""
        if isinstance(array, regs.Deferred):
            return array.materialize(layout)
        if array.layout == layout:
            return array
        room = scratch.for_relayout(self.kernel, array, layout)
        return relayout.relayout(array, layout, room)

    def set(self, value: ir.Value, array: regs.Array) -> None:
        """Records the array of a vector, converted to the vector's assigned layout.

        A broadcast array has the layout of its operand: it can only be materialized
        there.
        """
        layout = self.assignment.result(value)
        placeable = isinstance(array, regs.RegisterArray | regs.Broadcast)
        if layout is not None and placeable:
            array = self.in_layout(array, layout)
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
    # What compiles the module does not know the mark. Removed earlier, it would change
    # the hash by which an operation is found.
    for op in expansion.marked:
        del op.attributes[logical.IN_WARP]
    for op in reversed(expansion.dead):
        op.erase()


def expand_block(expansion: Expansion, block: Any) -> None:
    """Expands the operations of a block in order."""
    keep_lines = expansion.kernel.params.compiler_params.line_info
    unknown = ir.Location.unknown()
    expansion.moved.append({})
    for op in list(block.operations):
        expander = _find(op)
        scope = _scope(expansion, op)
        if expander is None:
            continue
        location = op.location if keep_lines else unknown
        expansion.kernel.where = functools.partial(inference.where, op.operation)
        with ir.InsertionPoint(op), location, scope:
            try:
                expander(expansion, op)
            except errors.PallasGpuError as error:
                raise error.with_location(inference.where(op.operation)) from None
    expansion.moved.pop()


def _scope(expansion: Expansion, op: Any) -> contextlib.AbstractContextManager[None]:
    """Restores the issuer for which the rule has emitted the operation."""
    if logical.IN_WARP not in op.operation.attributes:
        return contextlib.nullcontext()
    expansion.marked.append(op.operation)
    return expansion.kernel.builder.in_warp()


def _find(op: Any) -> Expander | None:
    name = op.operation.name
    if name.startswith(logical.SCALAR):
        return None
    expander = registry.rule(name, registry.RuleKind.EXPAND)
    if expander is None:
        values = (*op.operands, *op.results)
        arrays = any(is_array(v) or _is_memref(v) for v in values)
        if arrays or name.startswith(logical.OWN):
            raise errors.InternalError(f"no expansion for {name}")
    return expander
