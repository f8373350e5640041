# SPDX-License-Identifier: Apache-2.0
"""docs/mosaic.md: its code runs."""

from __future__ import annotations

import re

import numpy as np

from tools.source_tree import ROOT


def test_the_code_of_the_page():
    text = (ROOT / "docs" / "mosaic.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names: dict = {}
    exec(block, names)
    x = np.arange(256 * 128).reshape(256, 128).astype(np.float16) % 100
    np.testing.assert_array_equal(names["double"](x), 2 * x)
