# SPDX-License-Identifier: Apache-2.0
"""The values that cross the border of a loop's or a branch's region, and their layouts.

Besides the operands and results of the jaxpr, the register state that the body may use
crosses, and every array needs a layout. A splat or an iota has none. A loop that
carries one is emitted in a trial: the body is emitted once into a block that is
discarded, and the layouts of its results are used. A branch's body is emitted once,
into a block whose operations are moved into place when the layouts of all results are
known.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallas_gpu import errors
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts.registers.placement import Placement, describe
from pallas_gpu.lowering import notes
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.choice import agreement
from pallas_gpu.lowering.context import KernelState, RuleContext

# The dtype of a value that crosses, and the layout of an array.
Spec = tuple[np.dtype, Placement | None]


class Border:
    """The SSA values that cross: register state, then scalars and arrays."""

    def __init__(self, kernel: KernelState, keys: Sequence[Any], specs: Sequence[Spec]):
        self._kernel = kernel
        self._keys = list(keys)
        self._specs = [*specs_of([kernel.state[key] for key in keys]), *specs]

    @property
    def types(self) -> list[ir.Type]:
        """Types of the SSA values that cross."""
        return [kind for spec in self._specs for kind in _types(*spec)]

    def pack(self, values: Sequence[Any]) -> list[ir.Value]:
        """Returns the SSA values of the register state and of values."""
        kernel, ssa = self._kernel, list[ir.Value]()
        state = [kernel.state[key] for key in self._keys]
        for value, (_, layout) in zip([*state, *values], self._specs, strict=True):
            if layout is not None:
                value = kernel.layouts.fit(kernel, value, layout)
            ssa += [vals.scalar_value(value)] if layout is None else value.values
        return ssa

    def unpack(self, ssa: Sequence[ir.Value]) -> list[Any]:
        """Updates the register state and returns the values behind SSA values."""
        ssa, values = list(ssa), list[Any]()
        for dtype, layout in self._specs:
            count = 1 if layout is None else layout.num_registers
            own, ssa = tuple(ssa[:count]), ssa[count:]
            if layout is None:
                values.append(regs.Splat(own[0], dtype))
            else:
                values.append(regs.RegisterArray(own, layout, dtype))
        count = len(self._keys)
        self._kernel.state.update(zip(self._keys, values[:count], strict=True))
        return values[count:]


def specs_of(values: Sequence[Any]) -> list[Spec]:
    """Returns how scalars and values in registers cross a border."""
    return [(value.dtype, getattr(value, "layout", None)) for value in values]


def _types(dtype: np.dtype, layout: Placement | None) -> list[ir.Type]:
    if layout is None:
        return [dtypes.mlir_type(dtype)]
    register = dtypes.vector_type(dtype, layout.vector_length)
    return [register] * layout.num_registers


def match(kernel: KernelState, value: Any, layout: Placement) -> Any:
    """Returns a value in the layout of a border.

    Raises:
      LayoutError: the author has chosen another one.
    """
    value = agreement.in_layout(kernel, value, layout)
    if isinstance(value, regs.Deferred):
        return value.materialize(layout)
    if value.layout != layout:
        before, after = describe(layout), describe(value.layout)
        raise errors.LayoutError(
            "a loop or a branch changes the layout of an array",
            expected=before,
            got=after,
            hint=f"use layout_cast(x, {before}) on the result, or layout_cast the "
            f"initial value to {after}",
        )
    return value


# --- loops ----------------------------------------------------------------------------


def place_carry(
    kernel: KernelState, carry: list[Any], emit: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Returns a carry with a layout for every array: its own, or the body's.

    Args:
      emit: emits the body; returns its results.
    """
    for _ in range(len(carry) + 1):
        if not any(map(_has_no_layout, carry)):
            return carry
        with _trial(kernel):
            layouts = [getattr(r, "layout", None) for r in emit(carry)]
        placed = [
            value.materialize(layout) if _has_no_layout(value) and layout else value
            for value, layout in zip(carry, layouts, strict=True)
        ]
        if placed == carry:
            break
        carry = placed
    return [regs.placed(v) if _has_no_layout(v) else v for v in carry]


def _has_no_layout(value: Any) -> bool:
    return isinstance(value, regs.Deferred) and not vals.is_scalar(value)


@contextlib.contextmanager
def _trial(kernel: KernelState) -> Iterator[None]:
    """Emits into a block that is discarded; the register state is restored."""
    state, tops, outer = dict(kernel.state), kernel.smem_top_bytes, kernel.trial
    kernel.smem_top_bytes = dict(tops)
    region = scf.ExecuteRegionOp([])
    kernel.trial = region.regions[0].blocks.append()
    try:
        with (
            ir.InsertionPoint(kernel.trial),
            kernel.builder.discarding(),
            notes.on_trial(),
        ):
            yield
    finally:
        kernel.state, kernel.smem_top_bytes, kernel.trial = state, tops, outer
        region.operation.erase()


def results_in_trial(kernel: KernelState, border: Border) -> list[Any] | None:
    """Returns results of a loop whose layouts are known, None outside a trial.

    A trial does not emit nested loops: otherwise each level of nesting would double how
    often the innermost loop is emitted.
    """
    if kernel.trial is None:
        return None
    unknown = ir.Location.unknown()
    return border.unpack([kernel.trial.add_argument(t, unknown) for t in border.types])


# --- branches -------------------------------------------------------------------------


class Branch:
    """The body of a branch, emitted once.

    It is emitted ahead of its position if the position cannot be built without the
    layouts of the results.
    """

    def __init__(self, ctx: RuleContext, i: int, args: Sequence[Any]):
        self._ctx, self._i = ctx, i
        self._kernel = ctx.kernel
        self._args = args
        self._ahead: _Emitted | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to emit."""
        return not self._ctx.op.regions[self._i].ops

    def layout(self, i: int) -> Any:
        """Returns the layout of a result, None for one without a layout."""
        if self._ahead is None:
            staging = scf.ExecuteRegionOp([])
            with self._kernel.in_block(staging.regions[0].blocks.append()):
                self._ahead = self._lower(staging)
        return getattr(self._ahead.results[i], "layout", None)

    def emit(self, block: ir.Block, border: Border) -> None:
        """Emits the body and its terminator into a block."""
        kernel = self._kernel
        before = dict(kernel.state)
        with kernel.in_block(block):
            body = self._ahead or self._lower()
            if body.staging is not None:
                for op in list(body.staging.regions[0].blocks[0].operations):
                    block.append(op)
                body.staging.operation.erase()
            kernel.state = body.state
            scf.yield_(border.pack(body.results))
        kernel.state = before

    def _lower(self, staging: scf.ExecuteRegionOp | None = None) -> _Emitted:
        kernel = self._kernel
        before = dict(kernel.state)
        results = self._ctx.run(self._i, self._args)
        check_carry(results, "a branch")
        after, kernel.state = kernel.state, before
        return _Emitted(results, after, staging)


@dataclasses.dataclass(frozen=True)
class _Emitted:
    """An emitted body: its results, the register state at its end, and its block."""

    results: list[Any]
    state: dict[Any, Any]
    staging: scf.ExecuteRegionOp | None


def check_carry(values: Sequence[Any], what: str) -> None:
    """Refuses loops and branches that carry a changing reference."""
    for value in values:
        if not isinstance(value, regs.Array):
            raise errors.UnsupportedError(
                f"{what} changes which reference it carries",
                expected="the same reference in each iteration",
                got=type(value).__name__,
                hint="index one reference with the loop's counter",
            )
