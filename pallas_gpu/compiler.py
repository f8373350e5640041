# SPDX-License-Identifier: Apache-2.0
"""The compilation pipeline: its stages, in order, as data.

A kernel is traced and checked when it is called (`entry.trace`, `checks`); the
stages after that depend on a target. Each stage maps a `Build` to the next: from the
stage `rules` on it contains a module, which the stage modifies in place and MLIR
verifies afterwards. All but `options` are passes that the target's machine implements
or omits (`lowering.machine`). NVIDIA's are:

    results    warnings of what is left undefined            (lowering.passes)
    composites operations that consist of others             (entry.expand)
    fences     fences between threads and copies in SMEM     (memory.fences)
    ranges     accesses whose elements are adjacent          (lowering.passes)
    plan       SMEM, TMEM and barriers                       (resources)
    layouts    register layouts and SMEM tilings, inferred   (lowering.inference)
    rules      operations -> MLIR, by their rules            (lowering.families)
    host       tagged operations -> TMA descriptors          (emitters.program)
    cse        common subexpressions, dead code              (emitters.program)
    barriers   redundant consecutive barriers removed         (emitters.program)
    serialize  module -> stable bytes and their hash         (runtime.serialize)
    compile    bytes -> PTX, SASS, resources, with no GPU    (runtime.offline_compiler)

`layouts` does nothing under Lane semantics. On a GPU, XLA runs instead of `compile`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from pallas_gpu import arch, errors
from pallas_gpu.emitters import module as emission
from pallas_gpu.entry import scope
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering import launch, machine
from pallas_gpu.lowering.machine import Build
from pallas_gpu.lowering.passes import unchecked
from pallas_gpu.program import text as program_text
from pallas_gpu.program.build import region_of

Text = Callable[[Build], str | None]
# Called with a text's name, the kernel's name and a function that returns the text.
Observer = Callable[[str, str, Callable[[], str | None]], None]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of the pipeline.

    Attributes:
      name: the stage's name.
      run: maps the build before the stage to the one after; returns the same build if
        it has changed nothing.
      texts: the texts that can be dumped, by name; None where a kernel has no such
        text.
      verify: whether to verify a changed module: `barriers` does so itself, also for
        the stages before it.
    """

    name: str
    run: Callable[[Build], Build]
    texts: Mapping[str, Text] = dataclasses.field(default_factory=dict)
    verify: bool = True


# The variables that set a compiler parameter, by the name of the parameter.
_SWITCHES = {
    "line_info": "PALLAS_GPU_LINEINFO",
    "debug_checks": "PALLAS_GPU_DEBUG_CHECKS",
}


def read_options(build: Build) -> Build:
    """Resolves the options that environment variables set, and drops checks."""
    params = build.params
    for name, variable in _SWITCHES.items():
        known = hasattr(params.compiler_params, name)
        if known and os.environ.get(variable, "0") == "1":
            given: dict[str, Any] = {name: True}
            options = dataclasses.replace(params.compiler_params, **given)
            params = dataclasses.replace(params, compiler_params=options)
    build = build.replace(params=params)
    if params.compiler_params.debug_checks:
        return build
    return build.with_body(unchecked.without_checks(params.jaxpr))


def machine_pass(name: str) -> Callable[[Build], Build]:
    """Returns the stage that runs a pass of the target's machine, if it has one."""

    def run(build: Build) -> Build:
        step = machine.passes_of(build.target).get(name)
        return build if step is None else step(build)

    run.__name__ = run.__qualname__ = name
    return run


def module_text(build: Build) -> str:
    """Returns the module as MLIR text."""
    return str(build.module)


def _compiled_text(name: str, build: Build) -> str | None:
    return build.compiled.texts.get(name)


def _program_text(build: Build) -> str:
    return program_text.text(region_of(build.params.jaxpr), build.params.name)


STAGES: tuple[Stage, ...] = (
    Stage(
        "options",
        read_options,
        {
            "jaxpr": lambda b: str(b.params.jaxpr),
            "program": _program_text,
        },
    ),
    Stage("results", machine_pass("results")),
    Stage(
        "composites",
        machine_pass("composites"),
        {"composites": lambda b: str(b.params.jaxpr)},
    ),
    Stage("fences", machine_pass("fences")),
    Stage("ranges", machine_pass("ranges")),
    Stage("plan", machine_pass("plan"), {"plan": lambda b: b.plan.table()}),
    Stage(
        "layouts",
        machine_pass("layouts"),
        {"layouts": launch.layouts_text, "annotated": launch.annotated_text},
    ),
    Stage("rules", machine_pass("rules"), {"rules": module_text}),
    Stage("host", machine_pass("host"), {"host": module_text}, verify=False),
    Stage("cse", machine_pass("cse"), {"cse": module_text}, verify=False),
    Stage("barriers", machine_pass("barriers"), {"mlir": module_text}, verify=False),
    Stage("serialize", machine_pass("serialize"), verify=False),
    Stage(
        "compile",
        machine_pass("compile"),
        {
            name: functools.partial(_compiled_text, name)
            for name in ("ptx", "ptxas", "sass", "bundles")
        },
        verify=False,
    ),
)
# The last stage that produces a module, and the texts of all, in order.
LOWERED = "barriers"
TEXTS: tuple[str, ...] = tuple(name for stage in STAGES for name in stage.texts)


@scope.without_collections()
def run(
    build: Build,
    *,
    after: str | None = None,
    until: str = STAGES[-1].name,
    observe: Observer | None = None,
) -> Build:
    """Runs a part of the pipeline.

    Args:
      build: the result of the stage `after`.
      after: the last stage that has run; None before the first.
      until: the last stage to run.
      observe: called with the name of each text, the kernel's name and a function that
        returns the text.

    Raises:
      PallasGpuError: the kernel does not compile; the error has the kernel's line.
    """
    first = 0 if after is None else _position(after) + 1
    for stage in STAGES[first : _position(until) + 1]:
        try:
            build = run_stage(stage, build)
        except errors.PallasGpuError as error:
            error.with_location(build.params.defined_at)
            raise
        if observe is not None:
            _show(observe, stage, build)
    return build


def run_stage(stage: Stage, build: Build) -> Build:
    """Runs one stage and verifies the resulting module.

    Raises:
      PallasGpuError: the kernel does not compile.
    """
    before, build = build, stage.run(build)
    if stage.verify and build is not before and build.module is not None:
        emission.verify(build.module)
    return build


def lower(
    params: CallParams, target: arch.Target, observe: Observer | None = None
) -> Build:
    """Lowers a traced kernel to verified MLIR.

    Raises:
      PallasGpuError: the kernel does not lower; the error has the kernel's line.
    """
    return run(Build(params, target), until=LOWERED, observe=observe)


def _position(name: str) -> int:
    names = [stage.name for stage in STAGES]
    if name not in names:
        raise errors.ArgumentError(
            "unknown stage", expected="one of " + ", ".join(names), got=repr(name)
        )
    return names.index(name)


def _show(observe: Observer, stage: Stage, build: Build) -> None:
    """Passes a stage's texts to the observer, which generates those it needs."""
    for name, text in stage.texts.items():
        observe(name, build.name, functools.partial(text, build))


def target_of(
    params: CallParams, attached: Callable[[], arch.GpuTarget]
) -> arch.GpuTarget:
    """Returns the target that a kernel specifies, else that of the attached GPU.

    Raises:
      TargetError: the attached GPU is not supported.
    """
    wanted = params.compiler_params.target
    if wanted is None:
        return attached()
    target = arch.target(wanted)
    return target


def require_runs_on(
    target: arch.GpuTarget, attached: arch.GpuTarget, name: str
) -> None:
    """Raises TargetError when a kernel for one target is launched on another."""
    if target != attached:
        raise errors.TargetError(
            f"kernel {name}: compiled for {target.name}, not for the attached GPU",
            expected=f"a GPU of compute capability {target.compute_capability}",
            got=f"{attached.name}",
            hint="interpret=True runs it in the emulator, pallas_gpu.offline.compile "
            "compiles it; without CompilerParams(target=...) a kernel is for every GPU "
            "that has what it uses",
        )
