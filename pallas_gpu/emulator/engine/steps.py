# SPDX-License-Identifier: Apache-2.0
"""The steps of a plan, and their operands: slots, constants, references."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.emulator.engine.memory import Place, Region
from pallas_gpu.layouts.window import Sum, Window


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The storage of a value while a plan runs."""

    index: int
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self.aval, "shape", ())

    @property
    def dtype(self) -> Any:
        return getattr(self.aval, "dtype", None)

    def bind(self, env: list[Any]) -> Any:
        """Returns the value."""
        return env[self.index]


@dataclasses.dataclass(frozen=True, slots=True)
class Const:
    """A constant value."""

    value: Any

    def bind(self, env: list[Any]) -> Any:
        """Returns the value."""
        return self.value


# Places that a template remembers: the slots of a pipeline, the tiles of a small array.
# One holds 0.5 KB and takes 10 us to make (measured).
_PLACES = 64


class RefTemplate:
    """A window of a reference whose dynamic starts are read from slots.

    Args:
      slot: of the reference.
      window: the window; dynamic starts are sums of slots.
      viewed: shape and type that the reference has first; None for its own.
    """

    __slots__ = ("_places", "_slots", "_viewed", "dynamic", "slot", "window")

    def __init__(
        self,
        slot: Slot,
        window: Window,
        viewed: tuple[tuple[int, ...], Any] | None = None,
    ):
        self.slot = slot.index
        self._viewed = viewed
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


def binder(template: Any) -> Callable[[list[Any]], Any]:
    """Returns a function of the slots: a pytree with values and regions at its leaves.

    Args:
      template: a pytree of dicts, lists and tuples, None and the classes above.
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
        case _:
            return template.bind


class Location:
    """An equation and its line, which is looked up when it is needed."""

    __slots__ = ("_text", "eqn")

    def __init__(self, eqn: Any):
        self.eqn = eqn
        self._text: str | None = None

    @property
    def where(self) -> str | None:
        if self._text is None:
            self._text = _jax.where(self.eqn)
        return self._text


@dataclasses.dataclass(slots=True)
class ArithmeticStep:
    """`out = fn(*ins)` in NumPy.

    Attributes:
      run: computes it from the slots, with further checks if it is given.
    """

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
        case (Slot(i),):
            return lambda env: fn(env[i])
        case Slot(i), Slot(j):
            return lambda env: fn(env[i], env[j])
        case Slot(i), Const(b):
            return lambda env: fn(env[i], b)
        case Const(a), Slot(j):
            return lambda env: fn(a, env[j])
        case _:
            return lambda env: fn(*[x.bind(env) for x in ins])


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
    """An equation whose body is a plan: a loop, a branch, a scope.

    Its rule runs the jaxprs among its parameters: `rule(thread, step, ins)`.
    """

    rule: Callable[..., Any]
    ins: tuple[Any, ...]
    outs: tuple[int, ...]
    params: dict[str, Any]
    location: Location


@dataclasses.dataclass(slots=True)
class FailStep:
    """An equation that cannot be emulated; raises when it is reached."""

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
        case ArithmeticStep() | ControlStep():
            return {x.index for x in step.ins if isinstance(x, Slot)}
        case EffectStep():
            found: set[int] = set()
            _collect(step.operands, found)
            return found
        case _:
            return set()


def _collect(template: Any, found: set[int]) -> None:
    if isinstance(template, dict):
        template = list(template.values())
    if isinstance(template, list | tuple):
        for leaf in template:
            _collect(leaf, found)
    elif isinstance(template, Slot):
        found.add(template.index)
    elif isinstance(template, RefTemplate):
        found.add(template.slot)
        found.update(slot for _, slot in template.dynamic)
