# SPDX-License-Identifier: Apache-2.0
"""Which modules have been executed in lockstep and were right.

An execution is known by its test, semantics and number in the test; what is stored is a
digest of all that it depends on: the modules, the arrays, the models of the machine. It
lies in pytest's folder of caches; a file that is torn is another digest.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.support import tiers

_folder: Path | None = None
_counts: collections.Counter[tuple[str, str]] = collections.Counter()


def configure(folder: Path | None) -> None:
    """Sets where the digests lie."""
    global _folder
    _folder = folder / "executions" if folder else None
    if _folder:
        _folder.mkdir(exist_ok=True)


def test_name() -> str:
    """The node id of the test that runs."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]


test_name.__test__ = False  # type: ignore[attr-defined]


class Execution:
    """One execution of a function's kernels, in a test.

    Args:
      variant: which of the executions of the same body.
      kernels: what is executed: each has a `module`.
      arrays: pytree of the inputs and of what is expected.
    """

    def __init__(self, variant: str, kernels: Sequence[Any], arrays: Any):
        name = test_name()
        number = _counts[name, variant]
        _counts[name, variant] += 1
        key = hashlib.sha256(f"{name} {variant} {number}".encode()).hexdigest()
        self._path = None if _folder is None else _folder / key[:32]
        self._kernels, self._arrays = kernels, arrays

    def is_due(self, chosen: bool) -> bool:
        """Whether it is to be done: always, unless a tier leaves it out.

        Args:
          chosen: it is the one of its body that a tier executes.
        """
        if tiers.runs_everything():
            return True
        known = self._known()
        return chosen if known is None else known != self._digest

    def record(self) -> None:
        """Stores that it was right."""
        if self._path is not None:
            self._path.write_text(self._digest)

    def _known(self) -> str | None:
        if self._path is None or not self._path.exists():
            return None
        return self._path.read_text()

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(_models().encode())
        for kernel in self._kernels:
            code = io.BytesIO()
            kernel.module.operation.write_bytecode(code)
            digest.update(code.getvalue())
        leaves, tree = jax.tree.flatten(self._arrays)
        digest.update(str(tree).encode())
        for leaf in leaves:
            array = np.asarray(leaf)
            digest.update(pickle.dumps((array.shape, str(array.dtype))))
            digest.update(array.tobytes())
        return digest.hexdigest()


@functools.cache
def _models() -> str:
    """A digest of the sources that execute modules."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "lockstep").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
