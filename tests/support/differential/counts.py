# SPDX-License-Identifier: Apache-2.0
"""Both sides of a kernel, counted: PTX by class, SASS as a whole."""

from __future__ import annotations

import dataclasses

from tests.support.differential import sides
from tests.support.differential.kernels import KERNELS


@dataclasses.dataclass(frozen=True)
class Pair:
    """One number of each side."""

    ours: int
    theirs: int

    @property
    def margin(self) -> float:
        """How far apart the sides may be: 5 % of upstream's or 4 instructions."""
        return max(4, 0.05 * self.theirs)

    @property
    def more(self) -> bool:
        return self.ours > self.theirs + self.margin

    @property
    def fewer(self) -> bool:
        return self.ours < self.theirs - self.margin

    def __str__(self) -> str:
        return f"{self.ours} / {self.theirs}"


def compare(kernel: str, semantics: str) -> dict[str, Pair]:
    """Compiles a kernel of the table by both sides and counts."""
    entry = KERNELS[kernel]
    ours, theirs = sides.both()
    # Each side compiles on while the other is lowered.
    other = theirs.count(
        entry.theirs(theirs.names, theirs.params(semantics)), *entry.args
    )
    mine = ours.count(entry.ours(ours.names, ours.params(semantics)), *entry.args)
    a, b = mine.result(), other.result()
    return {column: Pair(a[column], b[column]) for column in sides.COLUMNS}
