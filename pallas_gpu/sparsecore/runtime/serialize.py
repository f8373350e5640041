# SPDX-License-Identifier: Apache-2.0
"""Serialization of a complete module: the bytes in XLA's custom call."""

from __future__ import annotations

import io

from jaxlib.mlir import ir, passmanager

from pallas_gpu import errors
from pallas_gpu.sparsecore.emitters.context import context

_STRIP_LOCATIONS = "strip-debuginfo"


def parse(text: str) -> ir.Module:
    """Returns a module from its text, verified."""
    with context(), ir.Location.unknown():
        try:
            module = ir.Module.parse(text)
            module.operation.verify()
        except ir.MLIRError as error:
            raise errors.CompilationError(
                "not a valid module for SparseCores", got=str(error)
            ) from error
        return module


def serialize(module: ir.Module, *, version: int | None = None) -> bytes:
    """Returns the module's bytes in libtpu's stable form; the module is not modified.

    Equal modules have equal bytes in every process: files and lines are not kept.

    Args:
      module: a module with one function per kernel.
      version: of the stable form; None is the newest one.
    """
    used = module.context
    target = "" if version is None else f" target-version={version}"
    steps = [_STRIP_LOCATIONS, f"mosaic-serde{{serialize=true{target}}}"]
    with used, ir.Location.unknown():
        copy = module.operation.clone(ip=False)
        before = used.allow_unregistered_dialects
        # The dialect of the stable form is not registered.
        used.allow_unregistered_dialects = True
        try:
            pipeline = f"builtin.module({','.join(steps)})"
            passmanager.PassManager.parse(pipeline).run(copy)
            buffer = io.BytesIO()
            copy.write_bytecode(buffer, desired_version=0)
        finally:
            used.allow_unregistered_dialects = before
    return buffer.getvalue()
