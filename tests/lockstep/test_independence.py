# SPDX-License-Identifier: Apache-2.0
"""The models are written from the PTX ISA, not from the package."""

from __future__ import annotations

from pathlib import Path

from tests.support import lockstep

# What lowers the kernels that the machine runs.
_DOORS = {"kernels.py", "machine.py"}


def test_no_model_imports_the_package():
    files = set(Path(lockstep.__file__).parent.glob("*.py"))
    importing = {f.name for f in files if "pallas_gpu" in f.read_text()}
    assert importing == _DOORS
