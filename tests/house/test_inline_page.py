# SPDX-License-Identifier: Apache-2.0
"""docs/inline.md: its code runs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tools.source_tree import ROOT

TEXT = (ROOT / "docs" / "inline.md").read_text(encoding="utf-8")
X = np.arange(64 * 128, dtype=np.float32).reshape(64, 128) % 13 - 6
SCALE = np.array([3.0], np.float32)
KERNELS = {
    "silu_kernel": ([X], X / (1 + np.exp(-X))),
    "rounded_kernel": ([X], X.astype(jnp.bfloat16)),
    "scaled_kernel": ([X, SCALE], 3 * X),
    "add_first_row_kernel": ([X], X + X[0]),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_code_of_the_page(name):
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        exec(block, names)
    args, expected = KERNELS[name]
    out = jax.ShapeDtypeStruct(X.shape, expected.dtype)
    run = plgpu.kernel(names[name], out_type=out)
    found = np.asarray(run(*args)).astype(np.float32)
    np.testing.assert_allclose(found, expected.astype(np.float32), rtol=1e-5, atol=1e-5)
