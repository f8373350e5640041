# SPDX-License-Identifier: Apache-2.0
"""Tutorial 7: its kernel compiles without a spill, for sizes of any kind."""

from __future__ import annotations

import runpy

import jax
import jax.numpy as jnp
import pytest

from pallas_gpu import offline
from tools.source_tree import ROOT

TUTORIAL = ROOT / "tutorials" / "07_library_product.py"


@pytest.mark.offline
def test_the_kernel_compiles_and_spills_nothing():
    product = runpy.run_path(str(TUTORIAL))["product"]
    for m, n, k in ((4096, 4096, 4096), (1000, 1048, 520)):
        a = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
        b = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
        (report,) = offline.compile(product, a, b)
        assert report.resources.spill_store_bytes == 0
        assert report.instruction_counts["setmaxnreg"] == 2
