# SPDX-License-Identifier: Apache-2.0
"""docs/sparsecore.md: its code runs, and its tables are what the package has."""

from __future__ import annotations

import re

from pallas_gpu import sparsecore as plsc
from pallas_gpu.arch import tpu
from pallas_gpu.sparsecore import ops
from tools.source_tree import ROOT

TEXT = (ROOT / "docs" / "sparsecore.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs():
    names: dict = {}
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks):
        # A body's line is looked up: the name of the file is that of the page.
        exec(compile(block, f"docs/sparsecore.md:{number}", "exec"), names)
    assert len(blocks) == 2


def test_the_page_has_every_public_name():
    modules = [name for name in dir(plsc) if not name.startswith("_")]
    public = [
        name
        for name in modules
        if name not in ("pallas_gpu",) and not hasattr(getattr(plsc, name), "__path__")
    ]
    missing = [
        name for name in (*public, *ops.__all__) if not re.search(rf"\b{name}\b", TEXT)
    ]
    assert missing == []


def test_the_table_of_chips_is_that_of_the_targets():
    for chip in tpu.TARGETS.values():
        kib, mib = chip.vmem_words * 4 // 1024, chip.pool_words * 4 // 2**20
        row = next(
            line for line in TEXT.splitlines() if line.startswith(f"| {chip.name}")
        )
        assert f"| {chip.cores}" in row and f"| {chip.subcores} | {chip.lanes} |" in row
        assert f"{kib} KiB | {mib} MiB" in row
