# SPDX-License-Identifier: Apache-2.0
"""What a program consists of: values, accesses, operations, regions.

A program is a region: inputs, operations in order, results. An operation names its
operands, the windows of memory that it accesses, and the regions that it runs. A region
sees its own inputs and results of its own operations alone, as a jaxpr does; values are
numbered in each region.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from pallas_gpu import _jax, errors, types
from pallas_gpu.layouts.window import Sum, Window
from pallas_gpu.primitives import _registry as registry


class Kind(enum.Enum):
    """How an operation runs its regions."""

    PLAIN = "plain"  # it has none
    FOR = "for"  # one region, a known number of times
    WHILE = "while"  # a condition and a body
    IF = "if"  # one of several; the first operand says which
    SCOPE = "scope"  # one, with memory that it allocates
    WARPS = "warps"  # one, by each of the four warps


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Value:
    """An input of a region, or a result of an operation in it.

    Attributes:
      index: its number in the region; the inputs come first.
      aval: its type: an array, or a reference.
    """

    index: int
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self.aval, "shape", ())

    @property
    def dtype(self) -> Any:
        return getattr(self.aval, "dtype", None)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A number or an array that is known when the program is made."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> Any:
        return self.value.dtype


Operand = Value | Constant


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Access:
    """The part of a reference that an operation reads, writes or updates.

    Attributes:
      buffer: the reference.
      window: the part; dynamic starts are values, or sums of values.
      transforms: the steps that select it, with values at their leaves.
      viewed: shape and dtype that the reference has first; None for its own.
      owner: whose memory it is; None: that of the executing device.
      operation: what accesses it.
      name: of the operand.
    """

    buffer: Value
    window: Window
    transforms: tuple[Any, ...]
    viewed: tuple[tuple[int, ...], Any] | None
    owner: types.Owner | None
    operation: registry.Operation
    name: str

    @property
    def reads(self) -> bool:
        return self.name in self.operation.reads

    @property
    def writes(self) -> bool:
        return self.name in self.operation.writes

    @property
    def space(self) -> types.MemorySpace:
        return self.buffer.aval.memory_space

    @property
    def dtype(self) -> Any:
        """The type of the elements."""
        viewed = None if self.viewed is None else self.viewed[1]
        return self.buffer.dtype if viewed is None else viewed

    @property
    def aligning(self) -> list[int]:
        """The axes with a dynamic start of which the layout depends on what it divides.

        It does not where one index of an axis takes whole rows of every unit that
        memory is accessed in, and in SMEM whole tiles, which have two dimensions.
        """
        window, space = self.window, self.space
        if space is types.TMEM:
            return list(window.dynamic)
        if space not in (types.GMEM, types.SMEM):
            return []
        # PTX ISA: addresses of TMA in GMEM are multiples of 16 bytes; the atom of a
        # swizzle has 1024. An element has a bit or more.
        tiled, unit = (0, 128) if space is types.GMEM else (2, 8192)
        last, strides = len(window.sizes) - tiled, window.array_strides
        return [
            a
            for a in window.dynamic
            if window.sizes[a] > 1 or strides[a] % unit or a >= last
        ]

    @property
    def device(self) -> Operand | None:
        """The logical id of the one other device whose memory it is, if it is one."""
        owner = self.owner
        return owner.device_id if isinstance(owner, types.PeerMemRef) else None

    def starts(self, axes: Iterable[int] | None = None) -> Iterator[Operand]:
        """The values among the starts along all axes, or some of them."""
        for axis in self.window.dynamic if axes is None else axes:
            start = self.window.starts[axis]
            yield from start.terms if isinstance(start, Sum) else (start,)


def mapped(function: Callable[[Any], Any], operands: Any) -> Any:
    """Returns a pytree of operands with a function of each access, value and constant.

    As `jax.tree.map`, in its order, in a third of the time.
    """
    if isinstance(operands, (Access, Value, Constant)):
        return function(operands)
    if operands is None:
        return None
    if type(operands) is dict:
        return {name: mapped(function, operands[name]) for name in sorted(operands)}
    if type(operands) in (list, tuple):
        return type(operands)(mapped(function, x) for x in operands)
    is_operand = Access | Value | Constant
    return jax.tree.map(function, operands, is_leaf=lambda x: isinstance(x, is_operand))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """Operands that name no part of their reference: an error where they are used."""

    error: errors.PallasGpuError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operation.

    Attributes:
      kind: how it runs its regions.
      primitive: what it does.
      inputs: its operands, as a flat sequence.
      operands: the same as a pytree, by name, with an `Access` for each reference; or
        a `Fault`.
      operation: the properties of the primitive; None for JAX's operations on values.
      accesses: the memory that it reads or writes itself, not in its regions.
      results: what it makes.
      params: static parameters.
      regions: what it runs: of a loop with a condition that comes first.
      entries: for each region and input of it the operand, of a carry the initial one;
        None for what the operation makes: counters, allocated memory.
      carries: of a loop: (input, result) of the last region that are one carry.
      equation: where it comes from.
      calls: the calls around it that are inlined, outermost first.
      jaxpr: a weak reference to the jaxpr that has the equation: programs are kept as
        long as their jaxprs are.
    """

    kind: Kind
    primitive: Any
    inputs: tuple[Operand, ...]
    operands: Any
    operation: registry.Operation | None
    accesses: tuple[Access, ...]
    results: tuple[Value, ...]
    params: dict[str, Any]
    regions: tuple[Region, ...]
    entries: tuple[tuple[Operand | None, ...], ...]
    carries: tuple[tuple[int, int], ...]
    equation: Any
    calls: tuple[Any, ...]
    jaxpr: weakref.ref[_jax.Jaxpr]

    @property
    def name(self) -> str:
        return self.primitive.name

    def access_to(self, space: types.MemorySpace) -> Access:
        """Returns the first access to a memory space."""
        return next(access for access in self.accesses if access.space is space)

    @property
    def made(self) -> tuple[Value, ...]:
        """What it makes for its last region: allocated memory, a counter."""
        if not self.regions:
            return ()
        pairs = zip(self.regions[-1].inputs, self.entries[-1], strict=True)
        return tuple(value for value, entry in pairs if entry is None)

    @property
    def where(self) -> str | None:
        """The user's line, or that of the innermost call around it that has one.

        Functions of jax.numpy are jitted: their equations have no line of the user's.
        """
        lines = (_jax.where(eqn) for eqn in (self.equation, *reversed(self.calls)))
        return next((line for line in lines if line is not None), None)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Region:
    """Operations in order.

    Attributes:
      inputs: the values with which it starts.
      ops: the operations.
      results: what it returns.
      size: how many values it has.
    """

    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    results: tuple[Operand, ...]
    size: int
