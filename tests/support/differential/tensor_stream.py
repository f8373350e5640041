# SPDX-License-Identifier: Apache-2.0
"""The tcgen05, mbarrier and TMA instructions of a kernel's PTX, with their constants.

The PTX of a kernel without loops is executed in the order of its text, as thread 0 of
a block whose dynamic SMEM and whose columns of TMEM start at 0; what depends on memory
is 0, too. So addresses are offsets, and descriptors have all their bits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_STATEMENT = re.compile(r"(?:@(!?[%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_PIECES = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]][^,]*")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction as thread 0 executes it.

    Attributes:
      opcode: with all its qualifiers.
      operands: integers; of a group in braces or brackets those in it.
    """

    opcode: str
    operands: tuple[int | tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Mma:
    """A tcgen05.mma.

    Attributes:
      opcode: with all its qualifiers.
      d: column of the accumulator, its lane in the upper half.
      a, b: shared memory descriptor; of A in TMEM its address, and `in_tmem`.
      idesc: the instruction descriptor.
      accumulate: enable-input-d.
    """

    opcode: str
    d: int
    a: int
    b: int
    idesc: int
    accumulate: int
    in_tmem: bool


def products(instructions: list[Instruction]) -> list[Mma]:
    """The dense products among the instructions, in order."""
    found = []
    for x in instructions:
        if x.opcode.startswith("tcgen05.mma."):
            (d,), a, b, idesc, accumulate = x.operands
            in_tmem = isinstance(a, tuple)
            a = a[0] if in_tmem else a
            found.append(Mma(x.opcode, d, a, b, idesc, accumulate, in_tmem))
    return found


def stream(ptx: str) -> list[Instruction]:
    """The tcgen05, mbarrier and TMA instructions of a kernel, in order."""
    chosen = ("tcgen05.", "mbarrier.", "cp.async.bulk")
    return [x for x in execute(ptx) if x.opcode.startswith(chosen)]


def execute(ptx: str) -> list[Instruction]:
    """All instructions of the one kernel of a PTX text, in the order of the text."""
    registers: dict[str, int] = {}
    done = []
    for opcode, pieces in _statements(ptx):
        names = [_names(piece) for piece in pieces]
        values = tuple(
            tuple(_value(registers, x) for x in name)
            if isinstance(name, tuple)
            else _value(registers, name)
            for name in names
        )
        done.append(Instruction(opcode, values))
        if names and opcode.startswith(_COMPUTED):
            _assign(registers, opcode, names, values)
    return done


# What `_result` computes; results of other instructions are 0.
_COMPUTED = (
    *("mov.", "add.", "sub.", "shl.", "shr.", "and.", "or.", "xor.", "bfe.", "cvt."),
    *("mul.", "mad.", "setp.", "not.pred", "cvta."),
)


def _statements(ptx: str) -> Iterator[tuple[str, list[str]]]:
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".entry") :])
    body = body[body.index("\n{") + 2 :]
    # Braces of a scope in inline assembly stand alone; groups are within statements.
    for statement in re.split(r";|\$L\w+:|LAB_WAIT:|DONE:", body):
        text = statement.strip().lstrip("{} \t\n").strip()
        text = re.sub(r"^\.loc[^\n]*\n?", "", text).strip()
        match = _STATEMENT.fullmatch(text)
        if match is None or text.startswith("."):
            continue
        yield match[2], [piece.strip() for piece in _PIECES.findall(match[3])]


def _names(piece: str) -> str | tuple[str, ...]:
    if piece[0] not in "{[":
        return piece
    return tuple(x.strip() for x in re.split(r"[{}\[\],]", piece) if x.strip())


def _value(registers: dict[str, int], name: str) -> int:
    base, _, offset = name.partition("+")
    if base.lstrip("-").isdigit():
        return int(base)
    return registers.get(base, 0) + (int(offset) if offset else 0)


def _assign(registers, opcode, names, values) -> None:
    target, sources = names[0], values[1:]
    if isinstance(target, tuple):  # two halves of a register
        low, high = target
        registers[low], registers[high] = sources[0] & 0xFFFFFFFF, sources[0] >> 32
        return
    width = re.search(r"\.[busf](\d+)$", opcode)
    bits = int(width[1]) if width else 64
    registers[target.partition("|")[0]] = _result(opcode, sources, bits)


def _result(opcode: str, sources, bits: int) -> int:
    if isinstance(sources[0], tuple):  # mov of two halves
        low, high = sources[0]
        return low & 0xFFFFFFFF | (high & 0xFFFFFFFF) << 32
    match opcode.split(".")[0]:
        case "mov" | "cvt" | "cvta":
            value = sources[0]
        case "add":
            value = sources[0] + sources[1]
        case "sub":
            value = sources[0] - sources[1]
        case "mul":
            value = sources[0] * sources[1]
        case "mad":
            value = sources[0] * sources[1] + sources[2]
        case "shl":
            value = sources[0] << sources[1]
        case "shr":
            value = sources[0] >> sources[1]
        case "and":
            value = sources[0] & sources[1]
        case "or":
            value = sources[0] | sources[1]
        case "xor":
            value = sources[0] ^ sources[1]
        case "bfe":
            value = sources[0] >> sources[1] & (1 << sources[2]) - 1
        case "not":
            return int(not sources[0])
        case "setp":
            return int((sources[0] == sources[1]) == (".eq." in opcode))
    return value & (1 << bits) - 1
