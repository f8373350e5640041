# SPDX-License-Identifier: Apache-2.0
"""Scoped allocations: the primitive behind `run_scoped`."""

from __future__ import annotations

from pallas_gpu.primitives import _registry as registry

# The inputs of its `jaxpr` are the captured values, then one reference per allocation;
# `names` are the author's, for messages.
run_scoped_p = registry.define(
    "run_scoped",
    "scoped",
    results=lambda *_, jaxpr, **__: [v.aval for v in jaxpr.outvars],
)
