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


def test_the_ring_of_the_page():
    code = re.search(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert code is not None
    names = {"jax": jax, "jnp": jnp, "plgpu": plgpu}
    exec(code[1], names)
    np.testing.assert_array_equal(names["y"], np.roll(np.arange(512.0), 128))


def test_every_collective_has_a_row():
    rows = "".join(line for line in TEXT.splitlines() if line.startswith("| `"))
    for name in collectives.__all__:
        assert f"`{name}`" in rows or name in ("Dispatched", "unreachable")
