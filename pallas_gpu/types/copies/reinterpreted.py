# SPDX-License-Identifier: Apache-2.0
"""All of a reference, seen in another shape or as another type, as a step on it.

Copies replace the reshapes and bitcasts that an author writes by one such step, the
first one of a reference; the steps after it select a window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reinterpreted:
    """The bytes of a reference in row-major order, as an array.

    Attributes:
      shape: of the array.
      dtype: of its elements; None for those of the reference.
    """

    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})


def reinterpreted(steps: Sequence[Any]) -> Reinterpreted | None:
    """Returns the step that reinterprets a reference, if its first one does."""
    return steps[0] if steps and isinstance(steps[0], Reinterpreted) else None
