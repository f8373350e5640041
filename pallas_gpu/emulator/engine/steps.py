# SPDX-License-Identifier: Apache-2.0
"""The steps of a plan, and how their operands get values."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import errors
from pallas_gpu.emulator.engine.memory import Place, Region
from pallas_gpu.layouts.window import Sum
from pallas_gpu.program.nodes import Access, Constant, Op, Operand, Value

# Places that a template remembers: the slots of a pipeline, the tiles of a small array.
# One holds 0.5 KB and takes 10 us to make (measured).
_PLACES = 64


class RefTemplate:
    """A window of a reference whose dynamic starts are read from slots.

    Args:
      access: the reference and its window.
    """

    __slots__ = (
        "_owner", "_places", "_slots", "_viewed", "dynamic", "slot", "window"
    )  # fmt: skip

    def __init__(self, access: Access):
        window = access.window
        self.slot = access.buffer.index
        self._viewed = access.viewed
        self._owner = None if access.owner is None else binder(_number_of(access.owner))
        self.dynamic = tuple(
            (a, term.index) for a in window.dynamic for term in window.starts[a].terms
        )
        self.window = window.at(
            [s.constant if isinstance(s, Sum) else s for s in window.starts]
        )
        self._slots = [slot for _, slot in self.dynamic]
        self._places: dict[tuple[int, ...], Place] = {}

    def bind(self, env: list[Any]) -> Region:
        """Returns the current part of memory of the reference."""
        slots = self._slots
        offsets = tuple([int(env[slot]) for slot in slots]) if slots else ()
        place = self._places.get(offsets)
        memory = env[self.slot]
        if self._owner is not None:
            owner = self._owner(env)
            memory = memory.owned_by(None if owner is None else int(owner))
        if self._viewed is not None:
            memory = memory.reinterpreted(*self._viewed)
        return Region(memory, place or self._place(offsets))

    def _place(self, offsets: tuple[int, ...]) -> Place:
        starts = list(self.window.starts)
        for (axis, _), offset in zip(self.dynamic, offsets, strict=True):
            starts[axis] += offset
        if len(self._places) >= _PLACES:
            self._places.clear()
        place = self._places[offsets] = Place(self.window.at(starts))
        return place


def _number_of(owner: Any) -> Any:
    """Returns the operand that names the one owner of memory; None: all of them."""
    return getattr(owner, "device_id", None)


def binder(template: Any) -> Callable[[list[Any]], Any]:
    """Returns a function of the slots: a pytree with values and regions at its leaves.

    Args:
      template: a pytree of dicts, lists and tuples, None, operands and accesses.
    """
    match template:
        case None:
            return lambda env: None
        case dict():
            items = [(name, binder(leaf)) for name, leaf in template.items()]
            return lambda env: {name: bind(env) for name, bind in items}
        case list() | tuple():
            leaves, kind = [binder(leaf) for leaf in template], type(template)
            return lambda env: kind([bind(env) for bind in leaves])
        case Value(index=index):
            return operator.itemgetter(index)
        case Constant(value=value):
            return lambda env: value
        case _:
            return RefTemplate(template).bind


def bound(operands: Sequence[Operand], env: list[Any]) -> list[Any]:
    """Returns the values of operands."""
    return [env[x.index] if isinstance(x, Value) else x.value for x in operands]


class Location:
    """The line of an operation, which is looked up when it is needed."""

    __slots__ = ("_text", "op")

    def __init__(self, op: Op):
        self.op = op
        self._text: str | None = None

    @property
    def where(self) -> str | None:
        if self._text is None:
            self._text = self.op.where
        return self._text


@dataclasses.dataclass(slots=True)
class ArithmeticStep:
    """`out = fn(*ins)` in NumPy.

    Attributes:
      op: the operation.
      run: computes it from the slots, with further checks if it is given.
    """

    op: Op
    fn: Callable[..., Any]
    ins: tuple[Any, ...]
    out: int
    run: Callable[[list[Any]], Any] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.run is None:
            self.run = _caller(self.fn, self.ins)


def _caller(fn: Callable[..., Any], ins: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns a function of the slots; most operations have one or two operands."""
    match ins:
        case (Value(index=i),):
            return lambda env: fn(env[i])
        case Value(index=i), Value(index=j):
            return lambda env: fn(env[i], env[j])
        case Value(index=i), Constant(value=b):
            return lambda env: fn(env[i], b)
        case Constant(value=a), Value(index=j):
            return lambda env: fn(a, env[j])
        case _:
            return lambda env: fn(*bound(ins, env))


@dataclasses.dataclass(slots=True)
class EffectStep:
    """An equation with a rule.

    Attributes:
      params: for the rule; `used` marks the results that are read.
      single: whether the rule returns one result rather than several.
    """

    rule: Callable[..., Any]
    operands: Any
    bind: Callable[[list[Any]], Any]
    params: dict[str, Any]
    outs: tuple[int, ...]
    single: bool
    location: Location


@dataclasses.dataclass(slots=True)
class ControlStep:
    """An operation that runs plans: `rule(thread, step, ins)` does."""

    rule: Callable[..., Any]
    op: Op
    plans: tuple[Plan, ...]
    location: Location

    @property
    def params(self) -> dict[str, Any]:
        return self.op.params


@dataclasses.dataclass(slots=True)
class FailStep:
    """An equation that cannot be emulated; raises when it is reached."""

    op: Op
    error: errors.PallasGpuError


@dataclasses.dataclass(slots=True)
class Plan:
    """Steps over `size` slots; inputs come first.

    Attributes:
      size: number of slots.
      steps: in order.
      outs: the results.
      work: steps of the budget: its effects, and its operations on large arrays.
    """

    size: int
    steps: list[Any]
    outs: tuple[Any, ...]
    work: int


def slots_read(step: Any) -> set[int]:
    """Returns the slots that a step reads."""
    match step:
        case ArithmeticStep():
            return {x.index for x in step.ins if isinstance(x, Value)}
        case ControlStep():
            return {x.index for x in step.op.inputs if isinstance(x, Value)}
        case EffectStep():
            found: set[int] = set()
            _collect(step.operands, found)
            return found
        case _:
            return set()


def _collect(template: Any, found: set[int]) -> None:
    match template:
        case dict():
            _collect(list(template.values()), found)
        case list() | tuple():
            for leaf in template:
                _collect(leaf, found)
        case Value():
            found.add(template.index)
        case Access():
            owner = _number_of(template.owner)
            _collect([template.buffer, owner, *template.starts()], found)
