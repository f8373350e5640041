# SPDX-License-Identifier: Apache-2.0
"""Printed lines, checks, and what can be said of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_gpu import _jax, errors
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.smem import SharedArray
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import debug
from pallas_gpu.types import formats

_EMULATE = registry.RuleKind.EMULATE


@registry.register(debug.debug_print_p, _EMULATE)
def _debug_print(_: Warpgroup, values: Any, fmt: str, **__: Any) -> None:
    print_line(formats.parse(fmt), values)


@registry.register(_jax.debug_print_p, _EMULATE)
def _debug_print_of_jax(_: Warpgroup, values: list[Any], **params: Any) -> tuple:
    print_line(debug.line_of_jax(params), values)
    return ()


def print_line(line: formats.Line, values: Sequence[Any]) -> None:
    """Prints a line, or one for each element of the arrays among the values."""
    arrays = [np.asarray(value) for value in values]
    found = line.conversions([x.dtype for x in arrays])
    shape = next((x.shape for x in arrays if x.shape), ())
    for position in np.ndindex(shape):
        text = line.texts[0]
        for field, conversions, after in zip(
            line.fields, found, line.texts[1:], strict=True
        ):
            array = arrays[field.value]
            place = f"{list(position)}: " if array.shape and not field.bare else ""
            value: Any = array[position if array.shape else ()]
            text += place + formats.show(conversions, value) + after
        print(text, flush=True)


@registry.register(debug.debug_check_p, _EMULATE)
def _debug_check(_: Warpgroup, operands: dict[str, Any], message: str, **__: Any):
    if not bool(operands["condition"]):
        error = errors.DebugCheckError(
            f"debug_check: {message}",
            expected="a condition that is True",
            got="False",
            hint="the condition is checked at the line below; debug_print shows values",
        )
        report(error)


@registry.register(debug.print_layout_p, _EMULATE)
def _print_layout(wg: Warpgroup, operands: dict[str, Any], fmt: str, **__: Any) -> None:
    device = wg.cta.device
    if wg.location in device.printed:
        return
    device.printed.add(wg.location)
    print(fmt.format(_layout(operands["x"])), flush=True)


def _layout(x: Any) -> str:
    memory = x.memory if isinstance(x, Region) else None
    if isinstance(memory, SharedArray) and not memory.layout.is_plain:
        return memory.layout.description
    return "chosen by the compiler (the emulator has no layouts)"
