# SPDX-License-Identifier: Apache-2.0
"""What tutorial 6 says beside its cells holds, and its pictures are there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_gpu import errors, offline
from tools.source_tree import ROOT

TUTORIAL = ROOT / "tutorials" / "06_profiler.py"


def test_copies_cannot_start_earlier():
    names = runpy.run_path(str(TUTORIAL))
    with pytest.raises(errors.RaceError):
        names["product_of"](names["a"], names["b"], ahead=names["STAGES"] + 1)


@pytest.mark.offline
def test_no_kernel_spills():
    product = runpy.run_path(str(TUTORIAL))["product_of"]
    shapes = [
        jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((1024, 4096), (4096, 1024))
    ]
    for ahead in (1, 4):
        f = jax.jit(lambda a, b, ahead=ahead: product(a, b, ahead))
        (report,) = offline.compile(f, *shapes, target="sm_90a")
        assert report.resources.spill_store_bytes == 0


@pytest.mark.parametrize("page", [TUTORIAL, ROOT / "docs" / "profiler.md"])
def test_its_pictures_show_waits(page: Path):
    links = re.findall(r"!\[[^\]]*\]\((\S+\.svg)\)", page.read_text())
    assert links
    for link in links:
        assert "wait for full[.]" in (page.parent / link).read_text()
