# SPDX-License-Identifier: Apache-2.0
"""The instructions of a kernel's PTX, counted by family.

PTX is text with one instruction before each semicolon (PTX ISA section 4.3.2), so
counting requires no compiler. The counts show whether a kernel uses wide shared memory
accesses, TMA or the tensor core. An instruction in a loop counts once.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator

# Instructions whose cost depends on the memory: the family includes the state space.
_MEMORY_OPERATIONS = frozenset({"ld", "st", "atom", "red", "ldu"})
_STATE_SPACES = frozenset({"shared", "global", "local", "param", "const"})
# Families of more than one word; every other family is the mnemonic's first word.
_FAMILIES = (
    "barrier.cluster",
    "cp.async",
    "cp.async.bulk",
    "cp.async.bulk.prefetch",
    "cp.async.bulk.prefetch.tensor",
    "cp.async.bulk.tensor",
    "cp.reduce.async.bulk",
    "cp.reduce.async.bulk.tensor",
    "fence.proxy",
    "multimem.ld_reduce",
    "multimem.red",
    "multimem.st",
    "tcgen05.alloc",
    "tcgen05.commit",
    "tcgen05.cp",
    "tcgen05.dealloc",
    "tcgen05.fence",
    "tcgen05.ld",
    "tcgen05.mma",
    "tcgen05.st",
    "tcgen05.wait",
)
_LONGEST_FIRST = sorted(_FAMILIES, key=len, reverse=True)

# The classes in a comparison of two kernels. The first pattern that is a prefix of a
# mnemonic applies, so the waits of a family precede the family.
_CLASSES = (
    (
        "waits",
        r"mbarrier\.(try|test)_wait|wgmma\.wait_group|cp\.async(\.bulk)?\.wait_"
        r"|barrier\.cluster\.wait|griddepcontrol\.wait|tcgen05\.wait",
    ),
    ("wgmma", r"wgmma\.mma_async"),
    ("tma", r"cp\.(reduce\.)?async\.bulk\.(?!commit_group)"),
    ("matrix", r"ldmatrix|stmatrix"),
    ("barriers", r"bar|mbarrier"),
    ("fences", r"fence|membar|wgmma\.fence"),
    ("shuffles", r"shfl|redux|vote"),
    ("memory", r"(ld|st|atom|red|multimem)\.(?!param|const)"),
)
CLASSES = (*(name for name, _ in _CLASSES), "total")
"""Names of the classes that `class_counts` counts, in the order of a table."""
_CLASS_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _CLASSES)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# Directives that end without a semicolon, e.g. `.loc 1 12 0`, `.maxntid 128, 1, 1`.
_DIRECTIVE_LINE = re.compile(r"^[ \t]*\.[^;\n]*$", re.MULTILINE)
_LABEL = re.compile(r"^\s*[$%\w]+\s*:(?!:)")
_MNEMONIC = re.compile(r"^\s*(?:@!?[%\w]+\s+)?([a-z]\w*(?:[.:]+[\w]+)*)")


def mnemonics(ptx: str) -> Iterator[str]:
    """Yields the full mnemonic of each instruction, e.g. `ld.shared.v4.b32`."""
    text = _DIRECTIVE_LINE.sub("", _COMMENT.sub("", ptx))
    for statement in _statements(text):
        if match := _MNEMONIC.match(statement):
            yield match[1]


def family(mnemonic: str) -> str:
    """The family of a mnemonic in `instruction_counts`.

    Loads, stores and atomics include the state space (`ld.shared.v4.b32` is
    `ld.shared`), `generic` if none is given; a few families have several words
    (`cp.async.bulk.tensor`); any other is the first word (`ex2`, `wgmma`).
    """
    words = mnemonic.split(".")
    if words[0] in _MEMORY_OPERATIONS:
        spaces = (word.split("::")[0] for word in words[1:])
        space = next((s for s in spaces if s in _STATE_SPACES), "generic")
        return f"{words[0]}.{space}"
    for name in _LONGEST_FIRST:
        if _begins_with(mnemonic, name):
            return name
    return words[0]


def instruction_counts(ptx: str) -> dict[str, int]:
    """Counts a kernel's instructions by family, the most frequent first.

    Args:
      ptx: PTX text of a module.

    Example:
      >>> instruction_counts(compiled.ptx)["cp.async.bulk.tensor"]
      2
    """
    return dict(collections.Counter(map(family, mnemonics(ptx))).most_common())


def class_counts(ptx: str) -> dict[str, int]:
    """Counts a kernel's instructions by purpose: one number per class.

    The classes are `waits` (of every kind), `wgmma` (products, without fences and
    groups), `tma` (bulk copies and their prefetches), `matrix` (ldmatrix and
    stmatrix), `barriers` (arrivals and initialization), `fences`, `shuffles` (redux and
    vote among them), `memory` (loads, stores and atomics, except those of parameters)
    and `total`: all instructions, including those in no class.

    Example:
      >>> class_counts(compiled.ptx)["waits"]
      3
    """
    counts = dict.fromkeys(CLASSES, 0)
    for mnemonic in mnemonics(ptx):
        counts["total"] += 1
        for name, pattern in _CLASS_PATTERNS:
            if pattern.match(mnemonic):
                counts[name] += 1
                break
    return counts


def count(ptx: str, prefix: str) -> int:
    """Counts the instructions whose mnemonic is `prefix` or continues it.

    Example:
      >>> count(compiled.ptx, "ld.shared.v4")
      8
    """
    return sum(_begins_with(mnemonic, prefix) for mnemonic in mnemonics(ptx))


def _begins_with(mnemonic: str, prefix: str) -> bool:
    # A colon begins a modifier: tcgen05.wait::ld.
    return mnemonic == prefix or mnemonic.startswith((prefix + ".", prefix + "::"))


def _statements(text: str) -> Iterator[str]:
    """The text before each semicolon, without labels and the braces of blocks."""
    statement = ""
    in_vector = False
    for piece in re.split(r"([;{}])", text):
        if piece == "{" and statement:
            # A brace after a mnemonic is a vector operand: `mov.b64 {lo, hi}, %rd`.
            in_vector = True
        elif piece == "}" and in_vector:
            in_vector = False
        elif piece in (";", "{", "}"):
            yield statement
            statement = ""
        else:
            statement = _without_labels(statement + piece)


def _without_labels(statement: str) -> str:
    while label := _LABEL.match(statement):
        statement = statement[label.end() :]
    return statement.lstrip()
