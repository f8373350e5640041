# SPDX-License-Identifier: Apache-2.0
"""A finished module as bytes: what XLA's custom call carries and the caches compare."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import _mosaic_gpu_ext

from pallas_gpu import errors

# The pass turns every operation into a form that later versions of the plugin can
# read back; the plugin refuses a module without it.
_STABLE_FORM = "mosaic_gpu-serde{serialize=true}"
_STRIP_LOCATIONS = "strip-debuginfo"
_LINES = 40
_LINE_CHARACTERS = 400


@dataclasses.dataclass(frozen=True)
class SerializedModule:
    """A module's bytes and their identity.

    Attributes:
      bytecode: MLIR bytecode in the plugin's stable form.
      hash: SHA-256 of `bytecode`, 32 bytes; XLA's and our caches know a kernel by it.
    """

    bytecode: bytes
    hash: bytes

    def __repr__(self) -> str:
        short = self.hash.hex()[:12]
        return f"SerializedModule({len(self.bytecode)} bytes, hash={short}…)"


def register_dialect(context: ir.Context) -> None:
    """Makes the `mosaic_gpu` dialect and its passes known; calling it again is fine."""
    _mosaic_gpu_ext.register_dialect(context)


def shortened(text: str) -> str:
    """MLIR's words without the whole module that often follows them."""
    lines = [line[:_LINE_CHARACTERS] for line in text.strip().splitlines()]
    if len(lines) <= _LINES:
        return "\n".join(lines)
    return "\n".join([*lines[:_LINES], f"… and {len(lines) - _LINES} more lines"])


def serialize(module: ir.Module, *, keep_locations: bool = False) -> SerializedModule:
    """Returns the module's bytes; the module itself stays as it is.

    Equal modules give equal bytes in every process and folder, unless locations are
    kept: those carry file names.

    Args:
      module: a Mosaic GPU module with one host function and one launch.
      keep_locations: keep file and line, which then reach PTX as `.loc`.

    Raises:
      CompilationError: MLIR refuses the module.
    """
    context = module.context
    register_dialect(context)
    steps = [_STABLE_FORM] if keep_locations else [_STRIP_LOCATIONS, _STABLE_FORM]
    with context, ir.Location.unknown(context), _unregistered_dialects(context):
        # The pass rewrites in place, and the caller may still want to dump the module.
        # Without ip=False the copy lands at the caller's insertion point.
        copy = module.operation.clone(ip=False)
        pipeline = passmanager.PassManager.parse(f"builtin.module({','.join(steps)})")
        try:
            pipeline.run(copy.operation)
        except ir.MLIRError as error:
            raise errors.CompilationError(
                "the module cannot be serialized",
                got=shortened(str(error)),
                hint="please report it with the kernel; PALLAS_GPU_KEEP=mlir writes "
                "the module to a file",
            ) from error
        out = io.BytesIO()
        copy.operation.write_bytecode(out)
    bytecode = out.getvalue()
    return SerializedModule(bytecode, hashlib.sha256(bytecode).digest())


@contextmanager
def _unregistered_dialects(context: ir.Context) -> Iterator[None]:
    """Allows the stable form's operations, which belong to no registered dialect."""
    before = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        yield
    finally:
        context.allow_unregistered_dialects = before
