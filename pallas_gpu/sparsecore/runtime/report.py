# SPDX-License-Identifier: Apache-2.0
"""Compilation without a TPU: the bundles of every kernel of a function, and a cost."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_gpu import compiler, expect, offline
from pallas_gpu.arch import tpu
from pallas_gpu.entry import call
from pallas_gpu.lowering.machine import Build
from pallas_gpu.runtime.register import observe
from pallas_gpu.sparsecore.runtime import stages as stages  # adds its stages
from pallas_gpu.sparsecore.runtime.bundles import BundleProgram, Code
from pallas_gpu.sparsecore.types import MACHINE, chips
from pallas_gpu.types import values

# What XLA emits to change a tiling; a bitcast costs nothing.
_COPY = re.compile(r"= \S+ (copy|fusion|transpose)\(")

__all__ = ["KernelReport", "compile"]


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """The result of compiling one kernel.

    Attributes:
      name: the kernel's name.
      target: the chip's name.
      jaxpr: the traced body.
      mlir: the module that libtpu compiles.
      bundles: its instruction bundles.
      hlo: XLA's module around it: under another tiling it copies operands.
      hbm_bytes: bytes of its operands and results.
    """

    name: str
    target: str
    jaxpr: str = dataclasses.field(repr=False)
    mlir: str = dataclasses.field(repr=False)
    bundles: BundleProgram = dataclasses.field(repr=False)
    hlo: str = dataclasses.field(repr=False)
    hbm_bytes: int

    @property
    def code(self) -> Code:
        """The code of the subcores that run the body."""
        return self.bundles.vector or self.bundles.scalar

    @property
    def copies_operands(self) -> bool:
        """Whether XLA copies operands or results, to another tiling, at each call."""
        return _COPY.search(self.hlo) is not None

    @property
    def hbm_seconds(self) -> float:
        """The time in which the HBM of a device moves operands and results once."""
        return self.hbm_bytes / tpu.target(self.target).hbm_bytes_per_second

    def __str__(self) -> str:
        """What the compiled code says, and a bound: nothing here was measured."""
        code = self.code
        rows = [
            f"kernel {self.name} for {self.target}: {len(code.bundles)} bundles, "
            f"{len(code.waits)} waits, {len(code.barriers)} barriers"
        ]
        for stream in code.streams:
            size = "" if stream.bytes is None else f", {stream.bytes} B"
            rows.append(f"  {stream.kind}: {stream.source} to {stream.target}{size}")
        for loop in code.loops:
            rows.append(
                f"  loop of {len(loop.bundles)} bundles: {loop.loads} vectors loaded, "
                f"{loop.stores} stored"
            )
        rows.append(
            f"  operands and results: {self.hbm_bytes} B, "
            f"{self.hbm_seconds * 1e6:.2f} us at the bandwidth of HBM"
        )
        if self.copies_operands:
            rows.append("  XLA copies operands or results to the kernel's tiling")
        return "\n".join(rows)


@expect.arguments(args=values.operands)
def compile(
    fn: Callable[..., Any], *args: Any, target: str | tpu.TpuTarget = "tpu7x"
) -> list[KernelReport]:
    """Compiles every kernel for SparseCores that a function calls, without a TPU.

    Args:
      fn: a function of arrays, jitted or not, that calls kernels.
      *args: arrays or `jax.ShapeDtypeStruct`s: only shapes and dtypes are used.
      target: `"v5p"`, `"v6e"` or `"tpu7x"`, for kernels that do not name a chip.

    Returns:
      One report per kernel, in program order; one for calls of the same traced kernel.

    Raises:
      ArgumentError: the function calls no kernel for SparseCores.
      OfflineUnavailableError: libtpu is missing: `pip install 'pallas-gpu[tpu]'`.
      CompilationError: libtpu refuses the emitted module.
      PallasGpuError: the kernel does not lower for the target.

    Example:
      >>> (report,) = plsc.compile(lookup, table, rows, target="v6e")
      >>> print(report)
    """
    with chips.tracing_for(target):
        return [_compiled(params) for params in offline.kernels(fn, args, MACHINE)]


def _compiled(params: call.CallParams) -> KernelReport:
    target = tpu.target(params.compiler_params.target or tpu.DEFAULT_TARGET)
    build = compiler.run(Build(params, target), observe=observe)
    avals = [var.aval for var in params.jaxpr.invars]
    return KernelReport(
        name=params.name,
        target=target.name,
        jaxpr=str(params.jaxpr),
        mlir=str(build.module),
        bundles=build.compiled.program,
        hlo=build.compiled.hlo,
        hbm_bytes=sum(a.size * np.dtype(a.dtype).itemsize for a in avals),
    )
