# SPDX-License-Identifier: Apache-2.0
"""`debug_print`, which also prints references."""

from __future__ import annotations

from typing import Any

from pallas_gpu import expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import debug
from pallas_gpu.sparsecore.primitives._define import define
from pallas_gpu.sparsecore.types import Space

__all__ = ["debug_print"]

print_reference_p = define("print_reference", "debug", reads=("ref",), observable=True)


@expect.arguments(args=expect.anything)
def debug_print(fmt: str, *args: Any) -> None:
    """Logs a text, and a scalar, a vector, or the contents of a reference.

    The emulator prints a line, or one for each element; a module logs the text in front
    of the value, without a format. Compiled offline, it has no code for logs.

    Issued by: a subcore.

    Args:
      fmt: a format string as of `pallas_gpu.debug_print`, with a `{}` for the value.
      *args: nothing, a value, or a reference or a part of one, `x_vmem.at[:16]`.

    Raises:
      As `pallas_gpu.debug_print`; UnsupportedError: several values; LayoutError: a part
        of a reference that begins within a tile.
    """
    aval = types.base_aval(args[0]) if len(args) == 1 else None
    if aval is None or not isinstance(aval.memory_space, Space):
        debug.debug_print(fmt, *args)
        return
    line = debug.printed_line(fmt, 1)
    debug.require_printable(line, [aval])
    ops.bind(print_reference_p, {"ref": ops.operand(args[0])}, fmt=str(line))
