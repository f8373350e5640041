# SPDX-License-Identifier: Apache-2.0
"""The way of a kernel, stage by stage: the table of contents of the lowering.

    trace     Python body -> jaxpr over references       (entry.trace)
    check     bounds, operations, copies                  (entry.check, within trace)
    plan      SMEM and barriers against the target        (resources, within lower)
    lower     jaxpr -> Mosaic GPU MLIR, verified          (lowering.launch)
              under Warpgroup semantics in three steps:
        rules     jaxpr -> vectors, memrefs, dialect ops  (lowering.families)
        infer     layouts of registers and of SMEM        (lowering.inference)
        expand    -> the code of a thread                 (lowering.expansion)
    serialize MLIR -> stable bytes and their hash         (runtime.serialize)
    compile   bytes -> PTX, SASS, resources, or a launch  (runtime)

Tracing happens when a kernel is called; what follows needs a target. Stages that leave
a text are shown to an observer under their names: `jaxpr`, `warpgroup` (what the rules
give), `layouts` (the same with the layouts inferred) and `mlir`.
"""

from __future__ import annotations

from collections.abc import Callable

from pallas_gpu import arch, errors, lowering
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering.launch import Observer


def lower(
    params: CallParams, target: arch.Target, observe: Observer | None = None
) -> lowering.LoweredKernel:
    """Takes a traced kernel to verified MLIR.

    Args:
      params: the kernel primitive's parameters.
      target: what to compile for.
      observe: called with a stage's name, the kernel's name and a function that gives
        the stage's text.

    Raises:
      PallasGpuError: the kernel does not lower; the error has the kernel's line.
    """
    if observe is not None:
        observe("jaxpr", params.name, lambda: str(params.jaxpr))
    lowered = lowering.lower(params, target, observe)
    if observe is not None:
        observe("mlir", params.name, lambda: str(lowered.module))
    return lowered


def target_of(params: CallParams, attached: Callable[[], arch.Target]) -> arch.Target:
    """Returns the target a kernel asks for, else the attached one.

    Raises:
      TargetError: the attached GPU is not supported.
    """
    wanted = params.compiler_params.target
    if wanted is None:
        return attached()
    target = arch.target(wanted)
    return target


def require_runs_on(target: arch.Target, attached: arch.Target, name: str) -> None:
    """Raises TargetError when a kernel for one target is launched on another."""
    if target != attached:
        raise errors.TargetError(
            f"kernel {name} is compiled for {target.name} and this GPU is another",
            expected=f"a GPU of compute capability {target.compute_capability}",
            got=f"{attached.name}",
            hint="leave CompilerParams(target=...) out to run, or use "
            "pallas_gpu.offline.compile",
        )
