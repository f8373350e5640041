# SPDX-License-Identifier: Apache-2.0
"""Lines that a subcore logs, checks, delays, what the author knows of indices."""

from __future__ import annotations

from typing import Any

from jaxlib.mosaic.python import tpu

from pallas_gpu import _jax
from pallas_gpu.primitives import debug, registers
from pallas_gpu.primitives.sync import delay
from pallas_gpu.sparsecore.emitters import memory
from pallas_gpu.sparsecore.emitters.values import Array, known
from pallas_gpu.sparsecore.lowering.state import emits
from pallas_gpu.sparsecore.primitives.debug import print_reference_p
from pallas_gpu.types import formats


@emits(_jax.debug_print_p)
@emits(debug.debug_print_p)
def _debug_print(ctx: Any, *values: Array) -> None:
    """Logs the text in front of the value, and the value: a log has no format."""
    line = debug.line_of(ctx.eqn)
    parts = [part for value in values for part in value.parts]
    for part in parts or [None]:
        given = [] if part is None else [part]
        tpu.log(given, line.texts[0].strip(), formatted=False)


@emits(print_reference_p)
def _print_reference(ctx: Any, ref: memory.Part, *, fmt: str) -> None:
    line = formats.parse(fmt)
    tpu.log_buffer(memory.view(ref), list(ref.shape), line.texts[0].strip())


@emits(debug.debug_check_p)
def _debug_check(ctx: Any, *values: Array) -> None:
    # `unchecked` has dropped it, unless the author wants checks in the code.
    raise ctx.kernel.no_rule(ctx.op)


@emits(delay.delay_p)
def _delay(_: Any, nanos: Array) -> None:
    tpu.delay(nanos.value)


@emits(registers.multiple_of_p)
def _multiple_of(_: Any, x: Array, *, divisor: int) -> Array:
    if known(x.value) is not None:
        return x
    return x.with_parts([tpu.assume_multiple(x.value, divisor)])
