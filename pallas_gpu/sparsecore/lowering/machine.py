# SPDX-License-Identifier: Apache-2.0
"""SparseCores as a machine: plan, module, state, passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors, resources
from pallas_gpu.arch import tpu
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering.machine import Pass, register_machine
from pallas_gpu.sparsecore.emitters.module import Module
from pallas_gpu.sparsecore.emitters.values import Handle
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


class SparseCore:
    """SparseCores of TPUs: the machine that compiles for `arch.tpu.TpuTarget`."""

    name = MACHINE

    def __init__(self) -> None:
        # `runtime/` adds those that process the finished module.
        self.passes: dict[str, Pass] = {
            "composites": kinds.of_vector_subcores,
            "host": kinds.with_scalar_subcores,
        }

    def plan(self, params: CallParams, target: tpu.TpuTarget) -> Plan:
        """Lists what the kernel allocates; the check pass has compared the budgets."""
        refs = dict.fromkeys(
            var
            for site in resources.scopes(params.jaxpr)
            for var in resources.scope_refs(site.eqn)
        )
        return Plan(
            tuple(var for var in refs if var.aval.memory_space is VMEM_SHARED),
            tuple(
                (var.aval.memory_space.name, tuple(var.aval.shape), str(var.aval.dtype))
                for var in refs
            ),
        )

    def launch(self, params: CallParams, target: tpu.TpuTarget, plan: Plan) -> Module:
        """Returns the kernel's module, without a body.

        Raises:
          ShapeError: an argument or a result has no dimension.
        """
        for var in params.jaxpr.invars:
            if not var.aval.shape:
                raise errors.ShapeError(
                    f"kernel {params.name}: an argument or result is a scalar",
                    expected="arrays with one dimension or more",
                    got=f"{np.dtype(var.aval.dtype).name}[]",
                    hint="reshape it to (1,), or pad it to 8 words, which a copy of "
                    "32 bytes is",
                )
        return Module(
            params.name,
            params.mesh.grid,
            *(
                [array_type(var.aval, params) for var in found]
                for found in (params.jaxpr.invars, plan.shared)
            ),
        )

    def state(
        self,
        params: CallParams,
        target: tpu.TpuTarget,
        plan: Plan,
        launch: Module,
        layouts: Any = None,
    ) -> SparseCoreState:
        """Returns the initial state of the rules."""
        return SparseCoreState(params, target, launch, plan)

    def prologue(self, state: SparseCoreState) -> Sequence[Handle]:
        """Returns the arrays in HBM; there is no code before the body."""
        return state.module.arrays

    def epilogue(self, state: SparseCoreState) -> None:
        """There is no code after the body."""


SPARSECORE = SparseCore()
register_machine(SPARSECORE)
