# SPDX-License-Identifier: Apache-2.0
"""The code of docs/several_devices.md runs, and its tables name what exists."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu.ops import collectives
from tools.source_tree import ROOT

TEXT = (ROOT / "docs" / "several_devices.md").read_text(encoding="utf-8")


def test_the_rings_of_the_page():
    names = {"jax": jax, "jnp": jnp, "plgpu": plgpu}
    for code in re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        exec(code, names)
    expected = np.roll(np.arange(512.0), 128)
    np.testing.assert_array_equal(names["y"], expected)
    specs = {"in_specs": jax.P("x"), "out_specs": jax.P("x")}
    alone = jax.shard_map(names["shift_alone"], mesh=names["mesh"], **specs)
    got = plgpu.emulate_mesh(alone)(jnp.arange(512.0))
    np.testing.assert_array_equal(got, expected)


def test_every_collective_has_a_row():
    rows = "".join(line for line in TEXT.splitlines() if line.startswith("| `"))
    for name in collectives.__all__:
        assert f"`{name}`" in rows or name in ("Dispatched", "unreachable")
