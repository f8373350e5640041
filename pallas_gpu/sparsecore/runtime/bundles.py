# SPDX-License-Identifier: Apache-2.0
"""Reads the assembly that libtpu writes: functions, bundles, loops, streams, waits."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

_FUNCTION = re.compile(r"^([A-Za-z_][\w.]*):$")
_LABEL = re.compile(r"^(\.L\w+):$")
_BUNDLE = re.compile(r"^0x[0-9a-f]+:\s*\{(.*)$")
_BRANCH = re.compile(r"sbr\.rel\s+(?:@\S+\s+)?(\.LBB\w+)-\S+?(?:, \$(\d+))?$")
_STREAM = re.compile(r"(stream\.\w+\.[\w.]+|dma\.[\w.]+)")
# What a stream and a DMA count.
_UNIT_BYTES = {"stream.linear": 4, "stream.strided": 4, "dma": 32}
_IMMEDIATE = re.compile(r"\$0x([0-9a-f]+)")
_MEMORY = re.compile(r"\[(\w+):")
# What issues beside scalar code: one load and one store of a vector a bundle.
_LOAD, _STORE = re.compile(r"\bvld\b|\bvld\."), re.compile(r"\bvst\b|\bvst\.|\bvstv?\.")
# A store that adds reads memory, in the slot of a load; sorts and scans are queued.
_READ = re.compile(r"\bvld\b|\bvld\.|\bvst\.(?:idx\.)?add")
_QUEUED = re.compile(r"^\(xrf")
_SCALAR_SUBCORE = ("called_computation", "main")


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Instructions that a subcore issues together.

    Attributes:
      labels: the labels in front of it.
      instructions: their texts.
    """

    labels: tuple[str, ...]
    instructions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Stream:
    """A copy that a subcore starts.

    Attributes:
      kind: `stream.linear.gather`, `stream.strided.gather` where tiles are in between,
        `stream.indirect.scatter.add.f32`, `dma.local` ...
      source: libtpu's name of the memory that is read, e.g. `hbm4b`, `tilespmem`.
      target: that of the memory that is written.
      bytes: its size, if it is constant and not indirect.
    """

    kind: str
    source: str
    target: str
    bytes: int | None


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop.

    Attributes:
      label: its start.
      bundles: the bundles of one iteration, those behind the branch included.
    """

    label: str
    bundles: tuple[Bundle, ...]

    @property
    def instructions(self) -> tuple[str, ...]:
        """The instructions of one iteration."""
        return tuple(i for bundle in self.bundles for i in bundle.instructions)

    @property
    def loads(self) -> int:
        """Vectors that one iteration loads."""
        return sum(bool(_LOAD.search(i)) for i in self.instructions)

    @property
    def stores(self) -> int:
        """Vectors that one iteration stores."""
        return sum(bool(_STORE.search(i)) for i in self.instructions)

    @property
    def slot_bound(self) -> int:
        """Bundles that an iteration takes at least: of its most used slot."""
        slots = (_READ, _STORE, _QUEUED)
        return max(sum(bool(s.search(i)) for i in self.instructions) for s in slots)

    @property
    def bundles_per_vector(self) -> float:
        """Bundles for each vector that is loaded or stored, whichever are more."""
        vectors = max(self.loads, self.stores)
        return len(self.bundles) / vectors if vectors else float("inf")


@dataclasses.dataclass(frozen=True)
class Code:
    """The code of one function.

    Attributes:
      bundles: its bundles, in order.
      branch_delay: bundles behind a branch that are executed, where it does not say so.
    """

    bundles: tuple[Bundle, ...]
    branch_delay: int

    @property
    def instructions(self) -> tuple[str, ...]:
        """All instructions."""
        return tuple(i for bundle in self.bundles for i in bundle.instructions)

    @functools.cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The copies that it starts, in the order of the code."""
        found = ((_STREAM.search(i), i) for i in self.instructions)
        return tuple(_stream(match[1], i) for match, i in found if match)

    @property
    def waits(self) -> tuple[str, ...]:
        """Instructions that wait for a semaphore."""
        return tuple(i for i in self.instructions if "swait" in i)

    @property
    def barriers(self) -> tuple[str, ...]:
        """Arrivals at a barrier of the subcores; libtpu adds two at the end."""
        return tuple(i for i in self.instructions if "sbarrier.arrive" in i)

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The innermost loops, in the order of the code."""
        at = {label: i for i, b in enumerate(self.bundles) for label in b.labels}
        found = []
        for i, label, delay in self._branches():
            first = at.get(label, i + 1)
            if first <= i:
                found.append((label, first, i + delay))
        return tuple(
            Loop(label, self.bundles[first : last + 1])
            for label, first, last in found
            if not any(
                first <= f and e <= last and (f, e) != (first, last)
                for _, f, e in found
            )
        )

    def _branches(self) -> Iterator[tuple[int, str, int]]:
        for i, bundle in enumerate(self.bundles):
            for text in bundle.instructions:
                if branch := _BRANCH.search(text):
                    yield i, branch[1], int(branch[2] or self.branch_delay)


@dataclasses.dataclass(frozen=True)
class BundleProgram:
    """The assembly of one call.

    Attributes:
      functions: the code of each function, by its name.
      text: as libtpu writes it.
    """

    functions: dict[str, Code]
    text: str = dataclasses.field(repr=False)

    @property
    def vector(self) -> Code | None:
        """What each vector subcore executes; None if none runs anything."""
        return next(
            (c for name, c in self.functions.items() if name.startswith("execute")),
            None,
        )

    @property
    def scalar(self) -> Code:
        """What the scalar subcore executes."""
        return next(
            code
            for name, code in self.functions.items()
            if name.startswith(_SCALAR_SUBCORE)
        )


def parse(text: str, branch_delay: int) -> BundleProgram:
    """Returns the functions of an assembly.

    Args:
      text: a file that libtpu's `xla_sc_dump_bundles_to` has written.
      branch_delay: bundles that are executed behind a branch that names no number.
    """
    functions: dict[str, list[tuple[tuple[str, ...], list[str]]]] = {}
    name, labels = "", []
    current: list[str] | None = None
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            name = match[1]
            functions[name] = []
            current = None
        elif match := _LABEL.match(line):
            labels.append(match[1])
        elif match := _BUNDLE.match(line):
            current = [match[1]]
            functions[name].append((tuple(labels), current))
            labels = []
        elif current is not None:
            current.append(line)
    return BundleProgram(
        {
            name: Code(
                tuple(Bundle(labels, _instructions(parts)) for labels, parts in made),
                branch_delay,
            )
            for name, made in functions.items()
        },
        text,
    )


def _instructions(parts: list[str]) -> tuple[str, ...]:
    text = " ".join(parts).rstrip().rstrip("}")
    found = (" ".join(part.split()) for part in text.split(";"))
    return tuple(i for i in found if i and not i.endswith("snop"))


def _stream(kind: str, text: str) -> Stream:
    """`[target], [flag] = stream... [source], size, ...`, the flag first or second."""
    written, _, read = text.partition("=")
    targets = [m for m in _MEMORY.findall(written) if m != "sflag"]
    sources = [m for m in _MEMORY.findall(read) if m != "sflag"]
    # Addresses are in brackets and can be immediates, too.
    size = _IMMEDIATE.search(re.sub(r"\[[^]]*\]", "", read))
    unit = next((n for name, n in _UNIT_BYTES.items() if kind.startswith(name)), None)
    return Stream(
        kind,
        sources[0] if sources else "",
        targets[0] if targets else "",
        unit * int(size[1], 16) if size and unit else None,
    )
