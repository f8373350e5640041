# SPDX-License-Identifier: Apache-2.0
"""The check pass over a traced kernel: what is refused before it runs or compiles.

What libtpu refuses, or compiles to code that fails on the device, is refused here with
the author's line, so that the emulator accepts what the compiler does. A family
registers the checks of its operations with `registry.checks(..., machine=MACHINE)`;
they get the operation and the `Kernel`.
"""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.checks.jax_operations import refuse_collective
from pallas_gpu.checks.references import written_inputs
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import Fault, Op
from pallas_gpu.program.walk import walk
from pallas_gpu.sparsecore.check import budgets, vectors
from pallas_gpu.sparsecore.check import copies as copies  # registers its checks
from pallas_gpu.sparsecore.check import sync as sync  # registers its checks
from pallas_gpu.sparsecore.check.kernel import Kernel
from pallas_gpu.sparsecore.types import MACHINE


def check(jaxpr: _jax.Jaxpr, kernel: Kernel, num_inputs: int) -> None:
    """Checks every operation of a body, and raises what is wrong with the first."""
    known: set[Any] = set()
    for site in walk(jaxpr):
        with errors.at(site.line):
            _check(site.op, kernel, known)
    for i, called, array, where in written_inputs(jaxpr, num_inputs):
        raise errors.KernelError(
            f"input {i} of the kernel is written",
            expected="copies to outputs of the kernel and to scratch memory",
            got=f"{called} to {array}, an input",
            hint="declare a result for it in out_type",
            where=where,
        )
    budgets.require(jaxpr, kernel)


def _check(op: Op, kernel: Kernel, known: set[Any]) -> None:
    refuse_collective(op, kernel.mesh)
    vectors.refuse_accuracy(op)
    if isinstance(op.operands, Fault):
        raise op.operands.error
    for access in op.accesses:
        ops.require_inside(access.window, registry.called(op.primitive))
    inner = (value for region in op.regions for value in region.inputs)
    vectors.require_registers(op, inner, kernel, known)
    own = registry.check_of(op.primitive, MACHINE)
    if own is not None:
        own(op, kernel)
