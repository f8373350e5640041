# SPDX-License-Identifier: Apache-2.0
"""The references of a block by their names."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any


class Memory(types.SimpleNamespace):
    """Inputs, results and scratch of a block: attributes with the names declared."""

    @classmethod
    def of(cls, names: Iterable[str], refs: Iterable[Any], **others: Any) -> Memory:
        """Returns the references with their names, in order, and others."""
        return cls(**dict(zip(names, refs, strict=True)), **others)

    def get(self, name: str) -> Any:
        """Returns a reference, or None if the kernel does not have it."""
        return vars(self).get(name)

    def but(self, **changes: Any) -> Memory:
        """Returns a memory of which some references are others."""
        return Memory(**{**vars(self), **changes})
