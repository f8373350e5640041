# SPDX-License-Identifier: Apache-2.0
"""Programs as text: a line for each operation, with its source line at the end.

What is known of an index stands in parentheses: its value as a function of positions on
the grid and in loops, or what it is a multiple of.

double(%0: gmem f32[512,128], %1: gmem f32[512,128])
  run_scoped {names=('x', 'full of x', 'o')}
    scope(%2: smem f32[128,128], %3: barrier u32[], %4: smem f32[128,128])
      %5 = axis_index {axis_name=i}
      %6 = mul %5, 128 (128*i)
      copy_gmem_to_smem barrier=%3, dst=%2, src=%0[%6+:128, :]      # double.py:14
      ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import _jax, types
from pallas_gpu.layouts.window import Sum, Window
from pallas_gpu.primitives.indices.facts import Fact, is_integer
from pallas_gpu.program.facts import Facts, all_facts_of
from pallas_gpu.program.nodes import Access, Constant, Fault, Kind, Op, Region, Value

_INDENT = "  "
# The column in which source lines start, where the operation leaves room for them.
_LINE_COLUMN = 72
# More elements of a constant than these are left out.
_MOST_ELEMENTS = 4
# Parameters that are written as regions, or restate the types of operands.
_HIDDEN = {
    *("jaxpr", "cond_jaxpr", "body_jaxpr", "branches", "cond_nconsts", "body_nconsts"),
    *("ft_in", "ft_out", "linear", "_split_transpose", "num_consts", "num_carry"),
    *("sharding", "weak_type", "out_sharding"),
}


def text(
    region: Region, name: str = "program", note: Callable[[Op], str] = lambda op: ""
) -> str:
    """Returns a program as text; equal programs have equal texts.

    What a region gets unchanged from outside keeps its name there.

    Args:
      note: returns what is known of an operation besides, written behind it.
    """
    printer = _Printer(all_facts_of(region), note)
    names = [printer.name() for _ in region.inputs]
    inputs = ", ".join(map(_declared, names, region.inputs))
    lines = [f"{name}({inputs})", *printer.body(region, names, 1)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


class _Printer:
    """Numbers the values of a program, those of inner regions included."""

    def __init__(self, facts: Facts, note: Callable[[Op], str]) -> None:
        self._facts, self._note = facts, note
        self._count = 0
        self._counters: dict[Op, str] = {}

    def name(self) -> str:
        """Returns a name that no other value has."""
        self._count += 1
        return f"%{self._count - 1}"

    def body(self, region: Region, names: list[str], depth: int) -> Iterator[str]:
        """Yields the lines of a region whose inputs have names."""
        within = _Names(names + [""] * (region.size - len(names)))
        for op in region.ops:
            for result in op.results:
                within.of[result.index] = self.name()
            yield from self._op(op, within, depth)
        if region.results:
            yield f"{_INDENT * depth}return {within.listed(region.results)}"

    def _op(self, op: Op, within: _Names, depth: int) -> Iterator[str]:
        indent = _INDENT * depth
        made = f"{within.listed(op.results)} = " if op.results else ""
        line = f"{indent}{made}{op.name}{within.operands(op)}{_params(op.params)}"
        line += self._known(op, within)
        if said := self._note(op):
            line += f": {said}"
        where = op.where
        yield line if where is None else f"{line.ljust(_LINE_COLUMN)}  # {where}"
        carried = {i for i, _ in op.carries}
        regions = zip(_titles(op), op.regions, op.entries, strict=True)
        for position, (title, region, entries) in enumerate(regions):
            # Of a loop with a condition both regions get the carries.
            kept = len(entries) - len(carried)
            starts = (
                carried
                if position == len(op.regions) - 1
                else {*range(kept, len(entries))}
            )
            names, shown = [], []
            for i, (value, entry) in enumerate(
                zip(region.inputs, entries, strict=True)
            ):
                if entry is not None and i not in starts:
                    names.append(within.operand(entry))
                    continue
                names.append(self.name())
                self._name_counter(names[-1], self._facts.of(value))
                first = "" if entry is None else f" = {within.operand(entry)}"
                shown.append(f"{_declared(names[-1], value)}{first}")
            yield f"{indent}{_INDENT}{title}({', '.join(shown)})"
            yield from self.body(region, names, depth + 2)

    def _name_counter(self, name: str, fact: Fact) -> None:
        """Takes the name of a value that counts the iterations of a loop."""
        if fact.is_linear and len(fact.terms) == 1:
            axis, _ = fact.terms[0]
            if fact == Fact.along(axis) and isinstance(axis.of, Op):
                self._counters[axis.of] = name

    def _known(self, op: Op, within: _Names) -> str:
        """What is known of the result of an operation on indices."""
        if op.kind is not Kind.PLAIN or len(op.results) != 1 or op.results[0].shape:
            return ""
        fact = self._facts.of(op.results[0])
        same = any(fact == self._facts.of(x) for x in op.inputs)
        if same or op.name == "axis_index" or not is_integer(op.results[0].aval):
            return ""
        names = [self._counters.get(axis.of, axis.of) for axis, _ in fact.terms]
        if fact.is_linear and all(isinstance(name, str) for name in names):
            factors = [factor for _, factor in fact.terms]
            shown = _sum(zip(factors, names, strict=True), fact.rest)
            restated = shown == " + ".join(map(within.operand, op.inputs))
            return "" if restated else f" ({shown})"
        return f" (multiple of {fact.divisor})" if fact.divisor > 1 else ""


def _sum(terms: Iterable[tuple[int, str]], constant: int) -> str:
    shown = [name if factor == 1 else f"{factor}*{name}" for factor, name in terms]
    if constant or not shown:
        shown.append(str(constant))
    return " + ".join(shown).replace("+ -", "- ")


def _titles(op: Op) -> Sequence[str]:
    match op.kind:
        case Kind.WHILE:
            return "while", "do"
        case Kind.IF:
            return [f"case {i}" for i in range(len(op.regions))]
        case Kind.FOR:
            return ("for",)
        case Kind.SCOPE:
            return ("scope",)
        case Kind.WARPS:
            return ("warps",)
        case _:
            return ()


class _Names:
    """The names of a region's values.

    Attributes:
      of: by their numbers.
    """

    def __init__(self, of: list[str]):
        self.of = of

    def operands(self, op: Op) -> str:
        """Returns the operands of an operation that are not written at its regions."""
        if op.kind is Kind.IF:
            return f" {self.operand(op.inputs[0])}"
        if op.kind is not Kind.PLAIN:
            return ""
        match op.operands:
            case Fault(error):
                return f" <{error.what}>"
            case dict() as named:
                shown = [
                    f"{k}={self.tree(v)}" for k, v in named.items() if v is not None
                ]
                return f" {', '.join(shown)}" if shown else ""
            case list() | tuple() as several:
                return f" {', '.join(map(self.tree, several))}" if several else ""
            case alone:
                return f" {self.tree(alone)}"

    def tree(self, operand: Any) -> str:
        """Returns a pytree of operands."""
        match operand:
            case dict():
                shown = [f"{k}={self.tree(v)}" for k, v in operand.items()]
                return f"{{{', '.join(shown)}}}"
            case list() | tuple():
                return f"({', '.join(map(self.tree, operand))})"
            case _:
                return self.operand(operand)

    def listed(self, operands: Sequence[Any]) -> str:
        return ", ".join(map(self.operand, operands))

    def operand(self, operand: Any) -> str:
        """Returns a value's name, a constant, or an access."""
        match operand:
            case Value(index=index):
                return self.of[index]
            case Constant(value=value):
                array = np.asarray(value)
                if array.size > _MOST_ELEMENTS:
                    return f"<{array.dtype}{list(array.shape)}>"
                return str(array.tolist())
            case Access(buffer=buffer, window=window, viewed=viewed, owner=owner):
                seen = "" if viewed is None else f" as {viewed[1]}{list(viewed[0])}"
                part = f"{self.of[buffer.index]}{self.window(window)}{seen}"
                return part + self.owner(owner)
            case _:
                return str(operand)

    def owner(self, owner: types.Owner | None) -> str:
        """Returns whose memory a reference names; nothing for the own device's."""
        match owner:
            case types.PeerMemRef(device_id=device):
                return f" of device {self.operand(device)}"
            case types.MulticastRef():
                return " of all devices"
            case _:
                return ""

    def window(self, window: Window) -> str:
        """Returns `[start, start+:size, :]`; nothing for a whole array."""
        if window.is_whole:
            return ""
        parts = []
        ranges = zip(window.starts, window.sizes, window.array_shape, strict=True)
        for axis, (start, size, whole) in enumerate(ranges):
            first = self._start(start)
            if axis not in window.axes:
                parts.append(first)
            else:
                parts.append(
                    ":" if start == 0 and size == whole else f"{first}+:{size}"
                )
        order = f".T{list(window.order)}" if window.is_transposed else ""
        return f"[{', '.join(parts)}]{order}"

    def _start(self, start: Any) -> str:
        if not isinstance(start, Sum):
            return str(start)
        constant = [str(start.constant)] if start.constant else []
        return "+".join([*map(self.operand, start.terms), *constant])


def _params(params: dict[str, Any]) -> str:
    shown = [
        f"{name}={_param(value)}"
        for name, value in sorted(params.items())
        if name not in _HIDDEN
        and value is not None
        and value != ()
        and value is not False
    ]
    return f" {{{', '.join(shown)}}}" if shown else ""


def _param(value: Any) -> str:
    if isinstance(value, (_jax.Jaxpr, _jax.ClosedJaxpr)):
        return "..."
    name = getattr(value, "name", "..." if callable(value) else value)
    return str(name)


def _declared(name: str, value: Value) -> str:
    return f"{name}: {_type(value.aval)}"


def _type(aval: Any) -> str:
    if isinstance(aval, _jax.AbstractRef):
        space = getattr(aval, "memory_space", None)
        return f"{space if space is not None else 'any'} {_type(aval.inner_aval)}"
    short = getattr(aval, "str_short", None)
    return str(aval) if short is None else short(short_dtypes=True)
