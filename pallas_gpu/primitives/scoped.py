# SPDX-License-Identifier: Apache-2.0
"""Allocations: the primitives behind `run_scoped` and `get_global`."""

from __future__ import annotations

from pallas_gpu.primitives import _registry as registry

# The inputs of its `jaxpr` are the captured values, then one reference per allocation;
# `names` are the author's, for messages.
run_scoped_p = registry.define(
    "run_scoped",
    "scoped",
    results=lambda *_, jaxpr, **__: [v.aval for v in jaxpr.outvars],
)

# Its result is a reference of the type `what`; each equation allocates its own memory.
get_global_p = registry.define(
    "get_global", "scoped", results=lambda *_, what, **__: [what]
)
# JAX then accounts for accesses to the result as to memory of the body itself.
get_global_p.ref_primitive = get_global_p.ref_allocating = True
