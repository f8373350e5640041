# SPDX-License-Identifier: Apache-2.0
"""How a kernel of upstream's becomes PTX and SASS with no GPU.

Upstream lowers on a CPU to a custom call that carries its module; the module goes into
our offline compiler, so that both sides meet the same LLVM and ptxas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_gpu import arch
from pallas_gpu.runtime import worker
from pallas_gpu.runtime.custom_call import CALL_TARGET
from pallas_gpu.runtime.serialize import SerializedModule

TARGET = arch.SM_90A


class Names:
    """Upstream's two modules under one name, as `pallas_gpu` has them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mosaic_gpu if hasattr(mosaic_gpu, name) else pl, name)


def compile(
    function: Callable[..., Any], *args: jax.ShapeDtypeStruct
) -> Future[worker.CompilerOutput]:
    """Lowers the one kernel of upstream's that a function calls, and compiles it.

    The compiler works beside the caller, in a process of its own.
    """
    # Upstream asks the device how many SMs there are.
    device = jax.sharding.AbstractDevice(
        "NVIDIA H200", num_cores=TARGET.sm_count, platform="cuda"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(lambda *arrays: function(*arrays)).trace(*args)
        lowered = traced.lower(lowering_platforms=("cuda",))
    compiler, thread = _compiler()
    return thread.submit(
        compiler.compile,
        _module(lowered.compiler_ir("stablehlo")),
        name="upstream",
        operands=_types(args),
        results=_types(jax.tree.leaves(lowered.out_info)),
    )


@functools.cache
def _compiler() -> tuple[worker.Worker, ThreadPoolExecutor]:
    """A second worker, so that both sides of a comparison compile at once."""
    return worker.Worker(TARGET), ThreadPoolExecutor(max_workers=1)


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
