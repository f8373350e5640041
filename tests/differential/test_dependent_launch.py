# SPDX-License-Identifier: Apache-2.0
"""A kernel that waits for earlier ones has the launch attribute of upstream's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

if not jax.__version__.startswith("0.11."):
    pytest.skip("compares with upstream 0.11", allow_module_level=True)

from tests.support.differential import sides

OUT = jax.ShapeDtypeStruct((8, 128), jnp.float32)


@pytest.mark.parametrize("semantics", ["Lane", "Warpgroup"])
@pytest.mark.parametrize(
    ("operation", "expected"),
    [("griddepcontrol_wait", True), ("griddepcontrol_launch_dependents", False)],
)
def test_the_wait_makes_the_launch_early(operation, expected, semantics):
    for side in sides.both():
        names = side.names

        def body(x, o, names=names):
            getattr(names, operation)()
            o[...] = x[...]

        kernel = names.kernel(
            body, out_type=OUT, compiler_params=side.params(semantics)
        )
        module, *_ = side.lower(kernel, OUT)
        assert (b"mosaic_gpu.uses_pdl" in module.bytecode) == expected
