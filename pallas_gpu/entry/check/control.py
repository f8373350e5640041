# SPDX-License-Identifier: Apache-2.0
"""Loops: their carries."""

from __future__ import annotations

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import Op


@registry.checks(*map(_jax.primitive_by_name, ("scan", "while")))
def _check_carried_refs(op: Op, mesh: types.Mesh) -> None:
    body = op.regions[-1]
    for i, j in op.carries:
        old = body.inputs[i]
        if isinstance(old.aval, _jax.AbstractRef) and body.results[j] is not old:
            raise errors.UnsupportedError(
                "a loop changes which reference it carries",
                expected="the same reference in each iteration",
                got=f"a reference other than the initial {types.describe(old.aval)}",
                hint="index one reference with the loop's counter",
            )
