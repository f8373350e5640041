# SPDX-License-Identifier: Apache-2.0
"""Loops in disassembled machine code, and what a thread spills in them.

A loop is the code between a label and a branch back to it. Spills are accesses to
addresses in the thread's stack frame (`STL`, `LDL` relative to R1).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from pallas_gpu.program.walk import Site

_LINE = re.compile(r'//## File ".*", line (\d+)')
_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA(?:\.\w+)* .*`\((\.L_x_\d+)\)")
_SPILL = re.compile(
    r"\b(STL|LDL)(?:\.LU|\.CS|\.LUT)*(?:\.(\d+|[US](?:8|16)))? .*\[R1\b"
)
_REGISTER_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Spilled:
    """What each thread spills in one iteration of an innermost loop, or outside of any.

    Attributes:
      in_loop: whether it is a loop.
      stored_bytes, loaded_bytes: to and from local memory, at most.
      lines: these bytes by line of the source; 0 where it is not known.
    """

    in_loop: bool
    stored_bytes: int
    loaded_bytes: int
    lines: dict[int, int]

    def said(self, loop: Site | None) -> str:
        """Returns what is spilled, in a sentence; the loop is None if not known."""
        where = "the code outside of loops"
        if self.in_loop:
            where = "an iteration of the loop" + (f" at {loop.where}" if loop else "")
        return (
            f"each thread stores {self.stored_bytes} bytes of registers to local "
            f"memory and loads {self.loaded_bytes} in {where}"
        )

    @property
    def bytes(self) -> int:
        """Stored and loaded."""
        return self.stored_bytes + self.loaded_bytes


def spilled(sass: str) -> list[Spilled]:
    """Returns what the code spills: in its loops, most bytes first, then elsewhere."""
    code = sass.splitlines()
    loops = _loops(code)
    found: dict[tuple[int, int] | None, list[tuple[int, bool, int]]] = {}
    line = 0
    for at, text in enumerate(code):
        if match := _LINE.search(text):
            line = int(match[1])
        elif match := _SPILL.search(text):
            inside = [loop for loop in loops if loop[0] <= at <= loop[1]]
            innermost = min(inside, key=lambda loop: loop[1] - loop[0], default=None)
            spill = (line, match[1] == "STL", _bytes(match[2]))
            found.setdefault(innermost, []).append(spill)
    parts = [_part(loop is not None, rows) for loop, rows in found.items()]
    return sorted(parts, key=lambda x: (x.in_loop, x.bytes), reverse=True)


def _loops(code: Sequence[str]) -> list[tuple[int, int]]:
    labels = {m[1]: i for i, text in enumerate(code) if (m := _LABEL.match(text))}
    ends: dict[int, int] = {}
    for at, text in enumerate(code):
        branch = _BRANCH.search(text)
        start = at if branch is None else labels.get(branch[1], at)
        if start < at and _is_loop(code, start, at):
            ends[start] = at
    return list(ends.items())


def _is_loop(code: Sequence[str], start: int, end: int) -> bool:
    """Whether a branch back closes a loop: code that was moved away also returns."""
    return not any(re.search(r"\bEXIT\b", text) and "@" not in text
                   for text in code[start:end])  # fmt: skip


def _bytes(width: str | None) -> int:
    if width is None or not width.isdecimal():
        return _REGISTER_BYTES
    return int(width) // 8


def _part(in_loop: bool, rows: Sequence[tuple[int, bool, int]]) -> Spilled:
    lines: Counter[int] = Counter()
    for line, _, size in rows:
        lines[line] += size
    stored = sum(size for _, stores, size in rows if stores)
    return Spilled(in_loop, stored, sum(lines.values()) - stored, dict(lines))
