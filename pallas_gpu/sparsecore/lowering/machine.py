# SPDX-License-Identifier: Apache-2.0
"""SparseCores of TPUs as a machine of the compiler: its stages."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_gpu import errors, resources
from pallas_gpu.lowering.context import lower_region
from pallas_gpu.lowering.machine import Build, register_machine
from pallas_gpu.program.build import region_of
from pallas_gpu.sparsecore.emitters.module import Module
from pallas_gpu.sparsecore.lowering import kinds
from pallas_gpu.sparsecore.lowering.state import SparseCoreState, array_type
from pallas_gpu.sparsecore.types import MACHINE, VMEM_SHARED


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel allocates.

    Attributes:
      shared: the variables of its arrays in VMEM_SHARED, which are arguments of its
        function: libtpu does not allocate them in a region.
      declared: (memory, shape, dtype) of each array, in the program's order.
    """

    shared: tuple[Any, ...]
    declared: tuple[tuple[str, tuple[int, ...], str], ...]

    def table(self) -> str:
        """The allocations as readable text."""
        rows = [f"{memory:<12} {dtype}{list(shape)}" for memory, shape, dtype in
                self.declared]  # fmt: skip
        return "\n".join(rows) + "\n"


def plan_memory(build: Build) -> Build:
    """Lists what the kernel allocates; the check pass has compared the budgets."""
    refs = dict.fromkeys(
        var
        for site in resources.scopes(build.params.jaxpr)
        for var in resources.scope_refs(site.eqn)
    )
    plan = Plan(
        tuple(var for var in refs if var.aval.memory_space is VMEM_SHARED),
        tuple(
            (var.aval.memory_space.name, tuple(var.aval.shape), str(var.aval.dtype))
            for var in refs
        ),
    )
    return build.replace(plan=plan)


def lower_operations(build: Build) -> Build:
    """Lowers the operations of the program in order, by their rules.

    Raises:
      ShapeError: an argument or a result has no dimension.
      UnsupportedError: an operation has no rule.
    """
    params: Any = build.params
    for var in params.jaxpr.invars:
        if not var.aval.shape:
            raise errors.ShapeError(
                f"kernel {params.name}: an argument or result is a scalar",
                expected="arrays with one dimension or more",
                got=f"{np.dtype(var.aval.dtype).name}[]",
                hint="reshape it to (1,), or pad it to 8 words, which a copy of 32 "
                "bytes is",
            )
    arrays, shared = (
        [array_type(var.aval, params) for var in found]
        for found in (params.jaxpr.invars, build.plan.shared)
    )
    module = Module(params.name, params.mesh.grid, arrays, shared)
    with module:
        target: Any = build.target
        state = SparseCoreState(params, target, module, build.plan)
        lower_region(state, region_of(params.jaxpr), module.arrays)
    return build.replace(module=module.module)


# `runtime/` adds the stages that process the finished module.
register_machine(
    MACHINE,
    composites=kinds.of_vector_subcores,
    plan=plan_memory,
    rules=lower_operations,
    host=kinds.with_scalar_subcores,
)
