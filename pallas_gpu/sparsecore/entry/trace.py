# SPDX-License-Identifier: Apache-2.0
"""From a Python body to a checked jaxpr over references in HBM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry import scope
from pallas_gpu.entry.allocations import allocated
from pallas_gpu.entry.trace import Arrays
from pallas_gpu.program.bodies import line_of_use
from pallas_gpu.sparsecore.types import (
    HBM,
    Scratch,
    Semaphore,
    SemaphoreRef,
    Space,
    SparseCoreRef,
    require_stored,
)


def trace_body(
    body: Callable[..., Any], arrays: Arrays, mesh: Any, name: str
) -> _jax.Jaxpr:
    """Traces a body over references to arrays of these types, without consts."""
    with scope.tracing(mesh), scope.locating(body):
        for aval in arrays.avals:
            require_stored(aval.dtype, f"kernel {name}: an argument or result")
        who = f"kernel {name}"
        closed, _ = arrays.traced(
            body, mesh, who, lambda aval: SparseCoreRef(aval, HBM), _RETURNED, 1
        )
        pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        consts = [_constant(*pair, closed.jaxpr, name) for pair in pairs]
        return allocated(closed.jaxpr, consts, mesh.axes, _declared)


_RETURNED = "copy results to the output references: plsc.sync_copy(x, out_ref)"


def _declared(eqn: _jax.JaxprEqn) -> Scratch | Semaphore:
    """Returns the declaration of what `get_global` or `jax.empty_ref` allocates."""
    ref = eqn.outvars[0].aval
    if isinstance(ref, SemaphoreRef):
        return Semaphore(ref.type, tuple(ref.shape))
    space = ref.memory_space
    if not isinstance(space, Space) or space is HBM:
        raise errors.MemorySpaceError(
            f"{eqn.primitive.name} in memory that a body does not allocate",
            expected="memory_space=plsc.VMEM, plsc.SMEM or plsc.VMEM_SHARED",
            got=f"memory_space={getattr(space, 'name', space)}",
            hint="pass memory_space, or declare the array in scratch_types",
        )
    return Scratch(space, tuple(ref.shape), ref.dtype, getattr(ref, "tiling", None))


def _constant(var: Any, value: Any, jaxpr: _jax.Jaxpr, name: str) -> Any:
    """Returns a number that a body closes over; raises for anything else."""
    where = line_of_use(jaxpr, var)
    if isinstance(var.aval, types.refs.IndexableRef):
        raise errors.KernelError(
            f"kernel {name}: a reference is used outside its scope",
            expected="references that the kernel or run_scoped passes to its body",
            got=types.describe(var.aval),
            hint="use it in the function that gets it, or declare it in scratch_types",
            where=where,
        )
    if (
        isinstance(var.aval, _jax.AbstractRef)
        or var.aval.shape
        or _jax.is_tracer(value)
    ):
        traced = _jax.is_tracer(value) and not var.aval.shape
        raise errors.ClosureError(
            f"kernel {name}: the body uses "
            f"{'a traced value' if traced else 'an array'} from the enclosing function",
            expected="arrays as arguments; only numbers may be closed over",
            got=f"{var.aval.str_short()}",
            hint="pass it as an argument, and copy what is needed to VMEM or SMEM",
            where=where,
        )
    return np.asarray(value)[()]
