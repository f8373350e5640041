# SPDX-License-Identifier: Apache-2.0
"""The models are written from the PTX ISA, not from the package."""

from __future__ import annotations

import re
from pathlib import Path

from pallas_gpu import lockstep

# What lowers the kernels that the machine runs.
_DOORS = {"run.py", "__init__.py"}
_IMPORT = re.compile(r"^(?:from|import) (pallas_gpu[\w.]*)(?: import (\w+))?", re.M)


def test_no_model_imports_the_package():
    files = set(Path(lockstep.__file__).parent.rglob("*.py"))
    imported = {
        (file.name, module if name is None or module != "pallas_gpu" else name)
        for file in files
        for module, name in _IMPORT.findall(file.read_text())
    }
    assert imported
    importing = {
        file
        for file, module in imported
        if not module.startswith(("pallas_gpu.lockstep", "pallas_gpu.errors"))
        and module != "errors"
    }
    assert importing <= _DOORS
