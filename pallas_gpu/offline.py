# SPDX-License-Identifier: Apache-2.0
"""Compilation without a GPU: PTX, SASS and a resource report for any target."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, arch, compiler, errors, expect, types
from pallas_gpu.entry import assumed_target, call, scope
from pallas_gpu.lowering import launch
from pallas_gpu.lowering.machine import Build
from pallas_gpu.program.bodies import equations
from pallas_gpu.runtime import register
from pallas_gpu.runtime.ptx_stats import instruction_counts
from pallas_gpu.runtime.resources_report import Resources
from pallas_gpu.types import values

__all__ = [
    "KernelReport",
    "LoweredReport",
    "Resources",
    "compile",
    "current_target",
    "lower",
]


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """The result of compiling one kernel.

    Attributes:
      name: the kernel's name.
      target: the target's name.
      jaxpr: the traced body.
      program: what is emitted: operations, accesses, facts, layouts and source lines.
      mlir: the module that JAX's CUDA plugin compiles.
      ptx: PTX text.
      sass: disassembled machine code; None if nvdisasm is missing (see `note`).
      resources: registers, spills, SMEM, barriers, occupancy.
      note: the reason if something is missing.
    """

    name: str
    target: str
    jaxpr: str = dataclasses.field(repr=False)
    program: str = dataclasses.field(repr=False)
    mlir: str = dataclasses.field(repr=False)
    ptx: str = dataclasses.field(repr=False)
    sass: str | None = dataclasses.field(repr=False)
    resources: Resources
    note: str | None = None

    @property
    def instruction_counts(self) -> dict[str, int]:
        """The number of PTX instructions by family."""
        return instruction_counts(self.ptx)

    def __str__(self) -> str:
        return f"kernel {self.name} for {self.target}\n{self.resources}"


@dataclasses.dataclass(frozen=True)
class LoweredReport:
    """A kernel as MLIR: the result of `lower`.

    Attributes:
      name: the kernel's name.
      target: the target's name.
      jaxpr: the traced body.
      program: what is emitted: operations, accesses, facts, layouts and source lines.
      mlir: the module that JAX's CUDA plugin compiles.
    """

    name: str
    target: str
    jaxpr: str = dataclasses.field(repr=False)
    program: str = dataclasses.field(repr=False)
    mlir: str = dataclasses.field(repr=False)


@expect.arguments(args=values.operands)
def compile(
    fn: Callable[..., Any], *args: Any, target: str | arch.Target = "sm_90a"
) -> list[KernelReport]:
    """Compiles every kernel that a function calls, without a GPU.

    What is compiled is stored in the user's folder of caches, and the same module is
    not compiled again (`PALLAS_GPU_COMPILATIONS_DIR` in docs/settings.md).

    Args:
      fn: a function of arrays, jitted or not, that calls kernels.
      *args: arrays or `jax.ShapeDtypeStruct`s: only shapes and dtypes are used.
      target: `"sm_90a"`, `"sm_100a"` or `"sm_103a"`. Functions that have a kernel for
        each target, as those of `ops` for the first two, choose the one for it.

    Returns:
      One report per kernel, in program order.

    Raises:
      OfflineUnavailableError: the CUDA wheels are missing:
        `pip install 'pallas-gpu[offline]'`.
      CompilationError: the emitted code does not compile.
      PallasGpuError: the kernel does not lower for the target.

    Example:
      >>> (report,) = pallas_gpu.offline.compile(f, x, target="sm_90a")
      >>> print(report.resources)
    """
    chosen = arch.target(target)
    return [_compile(params, chosen) for params in kernels_called(fn, args, chosen)]


@expect.arguments(args=values.operands)
def lower(
    fn: Callable[..., Any], *args: Any, target: str | arch.Target = "sm_90a"
) -> list[LoweredReport]:
    """Lowers every kernel that a function calls to MLIR; requires no CUDA wheels.

    Args:
      fn: as in `compile`.
      *args: as in `compile`.
      target: as in `compile`.

    Returns:
      The jaxpr and the MLIR module of each kernel, in the order of the calls.

    Raises:
      KernelError: a kernel is wrong.
      UnsupportedError: a kernel is not supported on the target.
    """
    chosen = arch.target(target)
    reports = []
    for params in kernels_called(fn, args, chosen):
        lowered = compiler.lower(params, chosen, register.observe)
        reports.append(
            LoweredReport(
                params.name,
                chosen.name,
                str(params.jaxpr),
                launch.program_text(lowered),
                str(lowered.module),
            )
        )
    return reports


def current_target() -> str | None:
    """Returns the target of the `compile` or `lower` that traces the calling function.

    A function that has a kernel for each target chooses by it. JAX traces a jitted one
    again for another target.

    Issued by: the host, outside of kernels.

    Returns:
      Its name, e.g. `"sm_100a"`; None if nothing is compiled offline.

    Example:
      >>> pallas_gpu.offline.current_target() is None
      True
    """
    return assumed_target.assumed_target()


def _compile(params: call.CallParams, target: arch.Target) -> KernelReport:
    require_target(params, target)
    build = compiler.run(Build(params, target), observe=register.observe)
    compiled = build.compiled
    return KernelReport(
        params.name,
        target.name,
        str(params.jaxpr),
        launch.program_text(build),
        str(build.module),
        compiled.ptx,
        compiled.sass,
        compiled.resources,
        compiled.note,
    )


def require_target(params: call.CallParams, target: arch.Target) -> None:
    """Raises TargetError if a kernel is declared for another target."""
    wanted = params.compiler_params.target
    if wanted is not None and arch.target(wanted) != target:
        raise errors.TargetError(
            f"kernel {params.name} is declared for another target",
            expected=f"target={wanted!r}, as in its CompilerParams",
            got=repr(target.name),
            hint="omit the target in CompilerParams",
        )


def launches(closed: _jax.ClosedJaxpr | _jax.Jaxpr) -> Iterator[call.CallParams]:
    """Yields the kernels of a jaxpr, those that JAX's `pallas_call` contains too."""
    for eqn in equations(closed):
        if eqn.primitive is call.kernel_p:
            yield call.CallParams(**eqn.params)
        elif (expanded := call.expansion(eqn)) is not None:
            yield from launches(expanded)


def kernels_called(
    fn: Callable[..., Any], args: Any, target: arch.Target
) -> list[call.CallParams]:
    """Returns the kernels for a target that a function calls, each once."""
    with assumed_target.assuming(target):
        return kernels(fn, args, types.Mesh.machine)


def kernels(
    fn: Callable[..., Any], args: Sequence[Any], machine: str
) -> list[call.CallParams]:
    """Returns the kernels for a machine that a function calls, each once.

    Raises:
      ArgumentError: it calls none.
    """
    with jax.disable_jit(False):
        closed = jax.make_jaxpr(functools.partial(scope.call, "offline", fn))(*args)
    all_ = list(launches(closed))
    found = [params for params in all_ if params.mesh.machine == machine]
    if not found:
        others = ", ".join(dict.fromkeys(params.mesh.machine for params in all_))
        raise errors.ArgumentError(
            "the function does not call a kernel of pallas_gpu for this machine",
            expected=f"a function that calls a kernel for {machine}",
            got=getattr(fn, "__name__", repr(fn))
            + (f", which calls kernels for {others}" if others else ""),
        )
    unique: list[call.CallParams] = []
    for params in found:
        known = any(
            params.jaxpr is other.jaxpr and params.batch == other.batch
            for other in unique
        )
        if not known:
            unique.append(params)
    return unique


def __dir__() -> list[str]:
    return sorted(__all__)
