# SPDX-License-Identifier: Apache-2.0
"""How a kernel of either side becomes counts of instructions, with no GPU.

Both sides lower on a CPU to a custom call that carries a module. The modules go into
our offline compiler, so that both meet the same LLVM and ptxas.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

import pallas_gpu as plgpu
from pallas_gpu import arch
from pallas_gpu.runtime import store, worker
from pallas_gpu.runtime.custom_call import CALL_TARGET
from pallas_gpu.runtime.ptx_stats import CLASSES, class_counts
from pallas_gpu.runtime.serialize import SerializedModule
from tests.support.differential import machine_code

TARGET = arch.SM_90A
COLUMNS = (*CLASSES, "sass")
_DEVICES = {"sm_90a": ("NVIDIA H200", "9.0"), "sm_100a": ("NVIDIA B200", "10.0")}


class _Device(jax.sharding.AbstractDevice):
    """A GPU that is not here."""

    def __init__(self, target: arch.GpuTarget):
        kind, capability = _DEVICES[target.name]
        super().__init__(kind, num_cores=target.sm_count, platform="cuda")
        # Upstream asks for it, too; without it all devices are Hopper's.
        object.__setattr__(self, "compute_capability", capability)


class Side:
    """A compiler of its own, beside this process, so that both sides work at once.

    Attributes:
      names: the module that kernels are written with.
    """

    def __init__(self, names: Any, target: arch.GpuTarget = TARGET):
        self.names = names
        self._target = target
        # Disassembling costs more than all the rest; SASS is counted in the cubin.
        self._worker = worker.Worker(target, disassemble=False)
        self._thread = ThreadPoolExecutor(max_workers=1)
        atexit.register(self._worker.close)

    def params(self, semantics: str) -> Any:
        """Returns the parameters of compilation."""
        choice = getattr(self.names.LoweringSemantics, semantics)
        return self.names.CompilerParams(lowering_semantics=choice)

    def count(
        self, function: Callable[..., Any], *args: jax.ShapeDtypeStruct
    ) -> Future[dict[str, int]]:
        """Lowers the one kernel that a function calls, compiles it and counts."""
        return self._thread.submit(self._count, *self.lower(function, *args))

    def ptx(self, function: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> str:
        """Lowers and compiles the one kernel that a function calls; returns its PTX."""
        return self._thread.submit(self._compile, *self.lower(function, *args)).result()

    def lower(
        self, function: Callable[..., Any], *args: jax.ShapeDtypeStruct
    ) -> tuple[SerializedModule, list[worker.ArrayType], list[worker.ArrayType]]:
        """Returns the module, and the types of the operands and the results."""
        # Upstream asks the device how many SMs there are.
        device = _Device(self._target)
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(lambda *arrays: function(*arrays)).trace(*args)
            lowered = traced.lower(lowering_platforms=("cuda",))
        module = _module(lowered.compiler_ir("stablehlo"))
        results = jax.tree.leaves(lowered.out_info)
        return module, _types(args), _types(results)

    def _compile(self, module, operands, results) -> str:
        return store.compile_stored(
            self._worker, module, "differential", operands, results
        ).ptx

    def _count(self, module, operands, results) -> dict[str, int]:
        ptx = self._compile(module, operands, results)
        sass = machine_code.instructions(ptx, TARGET.name)
        return {**class_counts(ptx), "sass": sass}


class _Upstream:
    """Upstream's two modules under one name, as `pallas_gpu` has them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mosaic_gpu if hasattr(mosaic_gpu, name) else pl, name)


@functools.cache
def both() -> tuple[Side, Side]:
    """Returns our side and upstream's."""
    return Side(plgpu), Side(_Upstream())


@functools.cache
def upstream(target: arch.GpuTarget) -> Side:
    """Returns upstream's side for another target than Hopper."""
    return Side(_Upstream(), target)


def _types(avals: Any) -> list[worker.ArrayType]:
    return [(tuple(a.shape), np.dtype(a.dtype).name) for a in avals]


def _module(program: Any) -> SerializedModule:
    """Takes the module out of the one custom call of a program."""
    (call,) = [
        operation
        for operation in _operations(program.operation)
        if operation.name == "stablehlo.custom_call"
        and operation.attributes["call_target_name"].value == CALL_TARGET
    ]
    config = call.attributes["mhlo.backend_config"]
    return SerializedModule(
        config["module"].value_bytes, config["kernel_hash"].value_bytes
    )


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)
