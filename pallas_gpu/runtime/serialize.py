# SPDX-License-Identifier: Apache-2.0
"""Serialization of a complete module: the bytes in XLA's custom call and cache keys."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import (
    _mlirGPUPasses,  # noqa: F401  registers gpu-kernel-outlining
    _mosaic_gpu_ext,
)

from pallas_gpu import errors
from pallas_gpu.emitters import module as emission

# The version that plugins read which are some months older than jax 0.11.2, whose own
# kernels have it in jax.export; its newest one is 9.
FORWARD_COMPATIBLE = 6
_STRIP_LOCATIONS = "strip-debuginfo"
# The plugin does the same with a launch, but such a function carries no attributes.
_OUTLINE = "gpu-kernel-outlining{data-layout-str=}"
_NEWEST = re.compile(r"highest supported version is (\d+)")
_LINES = 40
_LINE_CHARACTERS = 400


@dataclasses.dataclass(frozen=True)
class SerializedModule:
    """A module's bytes and their identity.

    Attributes:
      bytecode: MLIR bytecode in the plugin's stable form.
      hash: SHA-256 of `bytecode`, 32 bytes; the key in XLA's and our caches.
    """

    bytecode: bytes
    hash: bytes

    def __repr__(self) -> str:
        short = self.hash.hex()[:12]
        return f"SerializedModule({len(self.bytecode)} bytes, hash={short}…)"


def register_dialect(context: ir.Context) -> None:
    """Registers the `mosaic_gpu` dialect and its passes; idempotent."""
    _mosaic_gpu_ext.register_dialect(context)


def shortened(text: str) -> str:
    """MLIR's message without the whole module that often follows it."""
    lines = [line[:_LINE_CHARACTERS] for line in text.strip().splitlines()]
    if len(lines) <= _LINES:
        return "\n".join(lines)
    return "\n".join([*lines[:_LINES], f"… and {len(lines) - _LINES} more lines"])


def serialize(
    module: ir.Module,
    *,
    keep_locations: bool = False,
    verify: bool = True,
    ir_version: int | None = None,
) -> SerializedModule:
    """Returns the module's bytes; the module itself is not modified.

    Equal modules have equal bytes in every process and folder, unless locations are
    kept: those contain file names.

    Args:
      module: a Mosaic GPU module with one host function and one launch.
      keep_locations: keep file and line, which become `.loc` in PTX.
      verify: verify the module, which takes a third of the time; False if it has just
        been verified.
      ir_version: of the stable form; None is the newest one.

    Raises:
      ArgumentError: the version is newer than the newest one.
      CompilationError: the module cannot be serialized.
    """
    context = module.context
    register_dialect(context)
    steps = [] if keep_locations else [_STRIP_LOCATIONS]
    steps.append(_stable_form(ir_version))
    with context, ir.Location.unknown(context), _unregistered_dialects(context):
        # The pass rewrites in place, and the caller may still dump the module.
        # Without ip=False the copy is inserted at the caller's insertion point.
        copy = module.operation.clone(ip=False)
        pipeline = passmanager.PassManager.parse(f"builtin.module({','.join(steps)})")
        pipeline.enable_verifier(verify)
        try:
            _limit_registers(copy.operation)
            pipeline.run(copy.operation)
        except ir.MLIRError as error:
            if newest := _NEWEST.search(str(error)):
                raise errors.ArgumentError(
                    "CompilerParams: this plugin does not write such an ir_version",
                    expected=f"at most {newest[1]}",
                    got=ir_version,
                    hint="leave it out for the newest one",
                ) from error
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


def _stable_form(version: int | None) -> str:
    """Returns the pass to a form that later versions of the plugin can read, too.

    The plugin rejects a module without it.
    """
    target = "" if version is None else f" target-version={version}"
    return f"mosaic_gpu-serde{{serialize=true{target}}}"


def _limit_registers(module: ir.Operation) -> None:
    """Makes the launch a function for which ptxas has the limit that the launch has.

    PTX: `.maxnreg` (PTX ISA, Performance-Tuning Directives).
    """
    limit = emission.register_limit_of(module)
    if limit is None:
        return
    outline = passmanager.PassManager.parse(f"builtin.module({_OUTLINE})")
    outline.enable_verifier(False)
    outline.run(module)
    for part in module.regions[0].blocks[0].operations:
        if part.operation.name == "gpu.module":
            for function in part.operation.regions[0].blocks[0].operations:
                if function.operation.name == "gpu.func":
                    function.operation.attributes["nvvm.maxnreg"] = limit


@contextmanager
def _unregistered_dialects(context: ir.Context) -> Iterator[None]:
    """Allows the stable form's operations, whose dialect is not registered."""
    before = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        yield
    finally:
        context.allow_unregistered_dialects = before
