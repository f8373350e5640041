# SPDX-License-Identifier: Apache-2.0
"""Both sides of a kernel, counted: PTX by class, SASS as a whole."""

from __future__ import annotations

import dataclasses
import re

import pallas_gpu as plgpu
from pallas_gpu.runtime.ptx_stats import CLASSES, class_counts
from tests.differential import upstream
from tests.differential.kernels import KERNELS

# Without nvdisasm there is no SASS, and no column of that name.
COLUMNS = (*CLASSES, "sass")
SEMANTICS = ("Lane",)

# What nvdisasm prints before an instruction is its address; ptxas fills the end of a
# kernel up with NOPs.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?!NOP\b)\S")


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
    names = upstream.Names()
    # Upstream's compiles while ours is lowered and compiled.
    pending = upstream.compile(
        entry.theirs(names, _params(names, semantics)), *entry.args
    )
    function = entry.ours(plgpu, _params(plgpu, semantics))
    (ours,) = plgpu.offline.compile(function, *entry.args, target=upstream.TARGET)
    theirs = pending.result()
    mine, other = _count(ours.ptx, ours.sass), _count(theirs.ptx, theirs.sass)
    return {name: Pair(mine[name], other[name]) for name in COLUMNS if name in mine}


def _params(names, semantics: str):
    choice = getattr(names.LoweringSemantics, semantics)
    return names.CompilerParams(lowering_semantics=choice)


def _count(ptx: str, sass: str | None) -> dict[str, int]:
    counts = class_counts(ptx)
    if sass is not None:
        counts["sass"] = len(_INSTRUCTION.findall(sass))
    return counts
