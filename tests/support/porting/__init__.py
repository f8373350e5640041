# SPDX-License-Identifier: Apache-2.0
"""Kernels written against upstream's Pallas, each with arguments and expected results.

A file is loaded as it is, for upstream, or with its two import lines changed, for this
package; nothing else is changed.
"""

from __future__ import annotations

import types
from pathlib import Path

FILES = {
    path.stem: path
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem != "__init__"
}
_IMPORTS = {
    "from jax.experimental import pallas as pl\n": "import pallas_gpu as pl\n",
    "from jax.experimental.pallas import mosaic_gpu as plgpu\n": (
        "import pallas_gpu as plgpu\n"
    ),
}


def upstream(name: str) -> types.ModuleType:
    """Loads a file as it is: `kernel`, `arguments(random)` and `expected(*args)`."""
    return _load(name, FILES[name].read_text())


def ported(name: str) -> types.ModuleType:
    """Loads a file with its import lines changed."""
    source = FILES[name].read_text()
    for theirs, ours in _IMPORTS.items():
        source = source.replace(theirs, ours)
    assert "jax.experimental" not in source
    return _load(name, source)


def _load(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(compile(source, str(FILES[name]), "exec"), vars(module))
    return module
