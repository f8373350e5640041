# SPDX-License-Identifier: Apache-2.0
"""Scoped allocations: the primitive behind `run_scoped`."""

from __future__ import annotations

from pallas_gpu.primitives import _registry as registry

# Its `jaxpr` has as inputs what it captured, then one reference for each allocation.
run_scoped_p = registry.define(
    "run_scoped",
    "scoped",
    results=lambda *_, jaxpr, **__: [v.aval for v in jaxpr.outvars],
)
