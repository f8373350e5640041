# SPDX-License-Identifier: Apache-2.0
"""docs/composition.md is what its rows say, and its templates for derivatives work."""

from __future__ import annotations

import builtins
import re

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from tests.support.composition import ROWS
from tools.composition_table import PATH, table


def test_the_page_is_up_to_date():
    written = PATH.read_text(encoding="utf-8")
    assert written == table(), "run `make composition-table`"


def test_a_row_refuses_cells_that_exist_and_says_why():
    keys = {"eager", "jit", "kernel", "pallas_call", "all"}
    for row in ROWS:
        assert set(row.refused) <= keys, row.name
        assert all(x.reason and x.text for x in row.refused.values()), row.name
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_note_names_public_classes():
    notes = PATH.read_text("utf-8").partition("Notes:")[2].partition("## ")[0]
    named = re.findall(r"`(\w+(?:Error|Exception))`", notes)
    assert named
    for name in named:
        public = (builtins, jax.errors, plgpu.errors)
        assert any(hasattr(module, name) for module in public), name


def test_the_templates_for_derivatives_compute_them():
    blocks = re.findall(r"```python\n(.*?)```", PATH.read_text("utf-8"), re.S)
    assert len(blocks) == 2
    x = jnp.linspace(-3, 3, 64 * 128, dtype=jnp.float32).reshape(64, 128)
    expected = jax.grad(lambda x: (x * jax.nn.sigmoid(x)).sum())(x)
    names: dict = {}
    for block in blocks:
        exec(block, names)
        for grad in (jax.grad, lambda f: jax.jit(jax.grad(f))):
            got = grad(lambda x: names["silu"](x).sum())(x)
            np.testing.assert_allclose(got, expected, atol=1e-5)
    _, tangent = jax.jvp(names["silu"], (x,), (jnp.ones_like(x),))
    np.testing.assert_allclose(tangent, expected, atol=1e-5)
