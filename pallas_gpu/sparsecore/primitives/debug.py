# SPDX-License-Identifier: Apache-2.0
"""`debug_print`, which also prints references."""

from __future__ import annotations

from typing import Any

from pallas_gpu import errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import debug
from pallas_gpu.sparsecore.primitives._define import define
from pallas_gpu.sparsecore.types import Space
from pallas_gpu.types import formats

__all__ = ["debug_print"]

print_reference_p = define(
    "print_reference", "debug", called="debug_print", reads=("ref",), observable=True
)


@expect.arguments(args=expect.anything)
def debug_print(fmt: str, *args: Any) -> None:
    """Logs a text, and a scalar, a vector, or the contents of a reference.

    The emulator prints a line, or one for each element; a log of a TPU has the text in
    front of the value, and no format. `jax.debug.print` does the same for values.
    What libtpu compiles offline has no code for logs.

    Issued by: a subcore.

    Args:
      fmt: a format string of Python with a `{}` for the value; see
        `pallas_gpu.debug_print`.
      *args: nothing, a value, or a reference, also a part of one: `x_vmem.at[:16]`.

    Raises:
      ArgumentError: the placeholders do not match the values.
      DTypeError: a format does not suit the type of the value.
      UnsupportedError: several values.
      ArgumentTypeError: a reference to semaphores.
      LayoutError: a part that is not of whole tiles, under the compact tiling.

    Example:
      >>> plsc.debug_print("counters: {}", counters_smem)
    """
    avals = [types.base_aval(x) for x in args]
    if not any(isinstance(getattr(a, "memory_space", None), Space) for a in avals):
        debug.debug_print(fmt, *args)
        return
    if len(args) > 1:
        raise several(len(args))
    line = formats.line_of(fmt, 1, {}, {})
    if line is None:
        raise debug.mismatch(fmt, 1)
    ref = ops.operand(args[0])
    debug.require_printable(line, avals)
    ops.bind(print_reference_p, {"ref": ref}, fmt=str(line))


def several(count: int) -> errors.UnsupportedError:
    """Returns the error for a log of several values."""
    return errors.UnsupportedError(
        "debug_print of several values",
        expected="a text, or one scalar, vector or reference",
        got=f"{count} values",
        hint="print each of them with a debug_print of its own",
    )
