# SPDX-License-Identifier: Apache-2.0
"""docs/torch.md: its code runs."""

from __future__ import annotations

import re

import pytest

from tools.source_tree import ROOT

TEXT = (ROOT / "docs" / "torch.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_computes_what_it_says():
    torch = pytest.importorskip("torch")
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        exec(block, names)
    assert torch.equal(names["y"], names["x"] * 3)
    assert torch.equal(names["counter"], torch.ones_like(names["counter"]))
    a, b = names["a"], names["b"]
    torch.testing.assert_close(
        a.grad, b.detach().sum(1).expand(a.shape), rtol=1e-2, atol=0
    )
