# SPDX-License-Identifier: Apache-2.0
"""Shape operations on arrays in registers."""

from __future__ import annotations

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _registry as registry


@registry.checks(_jax.primitive_by_name("slice"))
def _check_slice(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    if all(stride == 1 for stride in eqn.params["strides"] or ()):
        return
    raise errors.UnsupportedError(
        "a slice of an array in registers has a stride",
        expected="stride 1",
        got=f"strides {eqn.params['strides']}",
        hint="read the rows from the reference in a loop: `o_ref[i] = x_ref[2 * i]`",
    )
