# SPDX-License-Identifier: Apache-2.0
"""Printed lines of `jax.debug.print`, which JAX itself does not check for kernels."""

from __future__ import annotations

from pallas_gpu import _jax, types
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import debug


@registry.checks(_jax.debug_print_p)
def _check_line(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    for var in eqn.invars:
        debug.refuse_reference(var.aval)
    debug.require_printable(debug.line_of(eqn), [var.aval for var in eqn.invars])
