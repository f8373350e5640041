# SPDX-License-Identifier: Apache-2.0
"""PTX by loops: how often a persistent kernel executes each instruction per tile.

A persistent kernel has a loop over tiles, and in it loops over steps along K, which
LLVM may have unrolled and peeled. A role of the kernel (the warps that copy, that
multiply, that store) is known by an instruction that only it executes, its marker. From
the number of markers per tile follow the iterations of its inner loop.

What is under a condition counts as executed, as in the steady state, where all waits
take place. A spin loop counts as one wait.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping

from pallas_gpu.runtime.ptx_stats import mnemonics

_LABEL = re.compile(r"^(\$L__BB\w+):")
_BRANCH = re.compile(r"^\s*(@!?%p\d+ )?\s*bra(?:\.uni)?\s+(\$L__BB\w+);")
_END = re.compile(r"^\s*(ret|exit|trap);")
_IMMEDIATE = re.compile(r"^\s*mov\.[bus]\d+\s+(%\w+), (\d+);", re.MULTILINE)
_EXPECT = re.compile(r"mbarrier\.arrive\.expect_tx[^;]*, (%\w+|\d+);")
# Copies to SMEM arrive on a barrier; those to GMEM do not.
MARKERS = {
    "load": re.compile(r"cp\.async\.bulk\.tensor.*complete_tx"),
    "multiply": re.compile(r"tcgen05\.mma\."),
    "store": re.compile(r"tcgen05\.ld\."),
}


@dataclasses.dataclass
class Block:
    """A basic block: its instructions, and the numbers of those that may follow."""

    text: str
    successors: list[int]

    @property
    def instructions(self) -> list[str]:
        """The mnemonics."""
        return list(mnemonics(self.text))

    def count(self, marker: re.Pattern[str]) -> int:
        """The number of instructions that a pattern matches."""
        return sum(bool(marker.match(name)) for name in self.instructions)


def blocks(ptx: str) -> list[Block]:
    """Divides the one kernel of a PTX module into basic blocks; assembly is a unit."""
    texts, falls, inline = [""], [True], False
    labels: dict[str, int] = {}
    jumps: list[list[str]] = [[]]

    def begin() -> None:
        texts.append("")
        jumps.append([])
        falls.append(True)

    for line in ptx[ptx.index("{") + 1 :].splitlines():
        inline = (inline or "begin inline asm" in line) and "end inline asm" not in line
        if not inline and (label := _LABEL.match(line)):
            begin()
            labels[label[1]] = len(texts) - 1
            continue
        texts[-1] += line + "\n"
        if inline:
            continue
        if branch := _BRANCH.match(line):
            jumps[-1].append(branch[2])
            falls[-1] = branch[1] is not None
            begin()
        elif _END.match(line):
            falls[-1] = False
            begin()
    made = []
    for i, (text, targets) in enumerate(zip(texts, jumps, strict=True)):
        follows = [labels[x] for x in targets]
        if falls[i] and i + 1 < len(texts):
            follows.append(i + 1)
        made.append(Block(text, follows))
    return made


@dataclasses.dataclass(frozen=True)
class Loop:
    """A natural loop: the number of its header, and of all its blocks."""

    header: int
    body: frozenset[int]


class Program:
    """The control flow of a kernel."""

    def __init__(self, ptx: str):
        self.blocks = blocks(ptx)
        self._immediates = dict(_IMMEDIATE.findall(ptx))
        self._before: list[list[int]] = [[] for _ in self.blocks]
        # Blocks that nothing reaches, as after a jump, must not disturb the dominators.
        reached, todo = {0}, [0]
        while todo:
            i = todo.pop()
            for j in self.blocks[i].successors:
                self._before[j].append(i)
                if j not in reached:
                    reached.add(j)
                    todo.append(j)
        self._dominators = self._find_dominators()
        self.loops = self._find_loops()

    def _find_dominators(self) -> list[set[int]]:
        everything = set(range(len(self.blocks)))
        found = [{0}, *(set(everything) for _ in self.blocks[1:])]
        changed = True
        while changed:
            changed = False
            for i in range(1, len(found)):
                before = [found[j] for j in self._before[i]]
                new = {i} | (set.intersection(*before) if before else set())
                changed |= new != found[i]
                found[i] = new
        return found

    def _find_loops(self) -> list[Loop]:
        bodies: dict[int, set[int]] = {}
        for i, block in enumerate(self.blocks):
            for header in block.successors:
                if header not in self._dominators[i]:
                    continue
                body, todo = bodies.setdefault(header, {header}), [i]
                while todo:
                    if (j := todo.pop()) not in body:
                        body.add(j)
                        todo.extend(self._before[j])
        return [Loop(header, frozenset(body)) for header, body in bodies.items()]

    def _marked(self, role: str) -> set[int]:
        marker = MARKERS[role]
        return {i for i, block in enumerate(self.blocks) if block.count(marker)}

    def _own(self, role: str, within: frozenset[int]) -> set[int]:
        """Blocks of a role alone: dominated by one that dominates its markers."""
        others = set().union(*(self._marked(r) for r in MARKERS if r != role))
        above = set.intersection(*(self._dominators[i] for i in self._marked(role)))
        own: set[int] = set()
        for top in above & within:
            below = {i for i in within if top in self._dominators[i]}
            if not below & others:
                own |= below
        return own

    def per_tile(self, role: str, markers: int) -> dict[int, int]:
        """Returns how often the warps of a role execute each block per tile.

        Args:
          role: of `MARKERS`.
          markers: how often a tile needs the marker.
        """
        marker, marked = MARKERS[role], self._marked(role)
        containing = [loop for loop in self.loops if loop.body & marked]
        outer = max((loop.body for loop in containing), key=len)
        inner: frozenset[int] = frozenset()
        if smaller := [x.body for x in containing if len(x.body) < len(outer)]:
            (inner,) = smaller
        path = set(outer)
        for other in MARKERS:
            if other != role and self._marked(other) & outer:
                path -= self._own(other, outer)
        count = {i: self.blocks[i].count(marker) for i in path}
        once = sum(n for i, n in count.items() if i not in inner)
        repeated = sum(n for i, n in count.items() if i in inner)
        iterations, rest = divmod(markers - once, repeated) if inner else (1, 0)
        if rest or (not inner and once != markers):
            raise ValueError(f"{once} and {repeated} markers do not make {markers}")
        return {i: iterations if i in inner else 1 for i in path}

    def counts(self, executed: Mapping[int, int]) -> collections.Counter[str]:
        """Returns the number of executions of each mnemonic."""
        total: collections.Counter[str] = collections.Counter()
        for i, times in executed.items():
            for name in self.blocks[i].instructions:
                total[name] += times
        return total

    def bytes_expected(self, executed: Mapping[int, int]) -> int | None:
        """Returns the bytes of copies that barriers are told to expect.

        None where an amount is not a constant.
        """
        total = 0
        for i, times in executed.items():
            for size in _EXPECT.findall(self.blocks[i].text):
                amount = self._immediates.get(size, size)
                if not amount.isdigit():
                    return None
                total += times * int(amount)
        return total
