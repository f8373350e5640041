# SPDX-License-Identifier: Apache-2.0
"""Scoped allocations: the primitive behind `run_scoped`."""

from __future__ import annotations

from pallas_gpu import _jax
from pallas_gpu.primitives import _registry as registry

run_scoped_p = registry.define("run_scoped", "scoped", multiple_results=True)


@run_scoped_p.def_effectful_abstract_eval
def _run_scoped_type(*captured, jaxpr: _jax.Jaxpr, collective_axes):
    """Types of a scope: `jaxpr` takes what it captured, then one ref an allocation."""
    results = [v.aval for v in jaxpr.outvars]
    return results, {registry.KERNEL_EFFECT}
