# SPDX-License-Identifier: Apache-2.0
"""Printed lines of `jax.debug.print`, which JAX itself does not check for kernels."""

from __future__ import annotations

from pallas_gpu import _jax, types
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import debug
from pallas_gpu.program.nodes import Op


@registry.checks(_jax.debug_print_p)
def _check_line(op: Op, mesh: types.Mesh) -> None:
    avals = [var.aval for var in op.equation.invars]
    for aval in avals:
        debug.refuse_reference(aval)
    debug.require_printable(debug.line_of(op.equation), avals)
