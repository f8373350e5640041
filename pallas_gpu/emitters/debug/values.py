# SPDX-License-Identifier: Apache-2.0
"""Printed lines and checks: the threads that print, and the end of a failed launch."""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_gpu.emitters import addressing, elementwise, module, padding
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.control import predicated
from pallas_gpu.emitters.debug import lines
from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.registers import default_placement
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.registers.placement import Placement
from pallas_gpu.types import formats


def print_values(line: formats.Line, values: Sequence[regs.Array]) -> None:
    """Prints a line with scalars, or one for each element of the arrays among them.

    Scalars are printed by the elected thread of the issuer, an element by a thread that
    holds it.

    Args:
      values: scalars, and arrays of one shape.

    Raises:
      LayoutError: two arrays have different layouts.
    """
    shape = next((x.shape for x in values if x.shape), ())
    if not shape:
        with predicated(module.current().elected):
            lines.print_line(line, [_scalar(x) for x in values])
        return
    layout = _common_layout(values)
    arrays = [_placed(x, layout) for x in values]
    axes = [
        regs.iota(dtypes.I32, shape, axis).materialize(layout).values
        for axis in range(len(shape))
    ]
    with predicated(_holds_first_copy(layout)):
        for register in range(layout.num_registers):
            for lane in range(layout.vector_length):
                position = tuple(dtypes.extract(x[register], lane) for x in axes)
                with predicated(padding.inside_from(layout, register, lane)):
                    lines.print_line(
                        line, [_element(x, register, lane, position) for x in arrays]
                    )


def _placed(x: regs.Array, layout: Placement) -> regs.Array:
    return x.materialize(layout) if isinstance(x, regs.Deferred) and x.shape else x


def _scalar(x: regs.Array) -> lines.Printed:
    assert isinstance(x, regs.Splat)
    return lines.Printed(x.value, x.dtype)


def _element(
    x: regs.Array, register: int, lane: int, position: tuple[ir.Value, ...]
) -> lines.Printed:
    if isinstance(x, regs.RegisterArray):
        value = dtypes.extract(x.values[register], lane)
        return lines.Printed(value, x.dtype, position)
    return _scalar(x)


def _common_layout(values: Sequence[regs.Array]) -> Placement:
    arrays = [x for x in values if isinstance(x, regs.RegisterArray)]
    if not arrays:
        array = next(x for x in values if x.shape)
        return default_placement(array.shape, dtypes.bits(array.dtype))
    what, hint = "debug_print: the arrays", "print each array by itself"
    return elementwise.common_layout(arrays, what, hint)


def _holds_first_copy(layout: Placement) -> ir.Value | None:
    """i1: no thread before this one holds the same elements; None for all threads."""
    bits = layout.replication_bits if isinstance(layout, LinearLayout) else ()
    return addressing.thread_bits_clear(bits)


def check(condition: ir.Value, text: str, axes: Sequence[ir.Value]) -> None:
    """Ends the launch with an error unless a condition holds.

    The thread that prints is the one that traps: a trap of another would end the launch
    before the line is printed.

    Args:
      condition: i1, the same in all threads of the issuer.
      text: printed if it does not hold, with `%d` for each of the axes.
      axes: i32 values.
    """
    i1 = ir.IntegerType.get_signless(1)
    fails = arith.xori(condition, arith.constant(i1, 1))
    with predicated(arith.andi(fails, module.current().elected)):
        lines.print_text(text, axes)
        llvm.intr_trap()
