# SPDX-License-Identifier: Apache-2.0
"""The references of a block by their names."""

from __future__ import annotations

import types
from typing import Any


class Memory(types.SimpleNamespace):
    """Inputs, results and scratch of a block: attributes with the names declared."""

    def get(self, name: str) -> Any:
        """Returns a reference, or None if the kernel does not have it."""
        return vars(self).get(name)
