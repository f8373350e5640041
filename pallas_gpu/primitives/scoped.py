# SPDX-License-Identifier: Apache-2.0
"""Allocations: the primitives behind `run_scoped` and `get_global`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pallas_gpu import arch, types
from pallas_gpu.primitives import _registry as registry


def _needs(op: Any) -> Iterator[tuple[arch.Feature, str]]:
    for aval in (ref.aval for ref in op.made):
        space, barrier = aval.memory_space, getattr(aval, "barrier", None)
        if space.feature is not None:
            yield space.feature, f"scratch memory in {space.name}"
        if isinstance(aval, types.AccumulatorRef):
            yield arch.Feature.WGMMA, "an accumulator (ACC)"
        if barrier is not None and barrier.orders_tensor_core:
            yield arch.Feature.TCGEN05, "a barrier with orders_tensor_core"


# The inputs of its `jaxpr` are the captured values, then one reference per allocation;
# `names` are the author's, for messages.
run_scoped_p = registry.define(
    "run_scoped",
    "scoped",
    results=lambda *_, jaxpr, **__: [v.aval for v in jaxpr.outvars],
    needs=_needs,
)

# Its result is a reference of the type `what`; each equation allocates its own memory.
get_global_p = registry.define(
    "get_global", "scoped", results=lambda *_, what, **__: [what]
)
# JAX then accounts for accesses to the result as to memory of the body itself.
get_global_p.ref_primitive = get_global_p.ref_allocating = True
