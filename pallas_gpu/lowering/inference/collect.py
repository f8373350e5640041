# SPDX-License-Identifier: Apache-2.0
"""Collects the layout constraints of a program, by one relation for each primitive.

The relation of a primitive adds the operation's variables to the network, takes its
operands and makes its results. It is called at each instance of an operation: a body
that is unrolled has one for each copy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from pallas_gpu import _jax, errors, types
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts.window import Window
from pallas_gpu.lowering.inference.network import (
    Cell,
    Deferral,
    Edge,
    Memory,
    Network,
    Part,
    Path,
    Port,
    Side,
    Slot,
    Use,
    UseKind,
    Variable,
    digest,
    memory_bits,
)
from pallas_gpu.lowering.inference.relations import Relation
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import (
    Access,
    Constant,
    Op,
    Operand,
    Region,
    Value,
    mapped,
)

# Maximum assumed trip count of a loop, and the count where it is unknown; nested loops
# multiply, up to a limit that keeps sums of costs small.
MAX_TRIPS = 8
_MAX_WEIGHT = MAX_TRIPS**4


@dataclasses.dataclass(eq=False)
class Symbol:
    """A scalar or an array, as inference sees it.

    Attributes:
      shape, dtype: its type.
      origin: returns a number that does not depend on the order of operations.
      port: what determines its layout; None for a scalar and a deferred array.
      deferred: how an array without a layout is materialized at its uses.
      known: the value of a constant scalar.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    origin: Callable[[], int]
    port: Port | None = None
    deferred: Deferral | None = None
    known: Any = None

    @property
    def bits(self) -> int:
        """Width of an element in a register, 1 for a bool."""
        return dtypes.bits(self.dtype)


_text_of = functools.lru_cache(maxsize=1024)(str)


class _Once:
    """A function that is called once; `functools.cache` takes longer to make one."""

    __slots__ = ("_known", "_make")

    def __init__(self, make: Callable[[], int]):
        self._make = make
        self._known: int | None = None

    def __call__(self) -> int:
        if self._known is None:
            self._known = self._make()
        return self._known


@dataclasses.dataclass(eq=False)
class Node:
    """An instance of an operation.

    Attributes:
      network: what its relation adds to.
      op: the operation.
      path: the regions around it.
      inputs: its operands: symbols, arrays in memory, other references.
      env: those of all values in its region, while that is collected.
      users: the values that the region reads.
    """

    network: Network
    op: Op
    path: Path
    inputs: tuple[Any, ...]
    env: dict[Value, Any]
    users: Set[Value]

    # --- names ------------------------------------------------------------------------

    @property
    def params(self) -> dict[str, Any]:
        """The operation's static parameters."""
        return self.op.params

    @property
    def words(self) -> str:
        """The operation's name in messages."""
        name = self.op.name
        return "reduction" if name.startswith("reduce_") else _NAMES.get(name, name)

    @property
    def where(self) -> str | None:
        """The operation's line."""
        lines = (op.where for op in (self.op, *(op for op, *_ in reversed(self.path))))
        return next((line for line in lines if line is not None), None)

    @functools.cached_property
    def _number(self) -> Callable[[], int]:
        """Returns a hash of name, parameters, types and the operands' numbers."""
        op, inputs = self.op, self.inputs  # no cycle: the node refers to its results

        def number() -> int:
            params = (f"{k}={v}" for k, v in op.params.items() if _is_plain(v))
            results = (_text_of(x.aval) for x in op.results)
            operands = (str(x.origin()) for x in inputs if hasattr(x, "origin"))
            return digest(op.name, *params, *results, *operands)

        return _Once(number)

    @property
    def key(self) -> int:
        """A number that does not depend on the order of operations."""
        return self._number()

    def _origin(self, slot: Slot) -> Callable[[], int]:
        number = self._number
        return lambda: digest(str(number()), str(slot))

    # --- operands ---------------------------------------------------------------------

    @functools.cached_property
    def operands(self) -> Any:
        """The operands by name: symbols, and an `Access` for each reference."""
        if hasattr(self.op.operands, "error"):
            raise self.op.operands.error
        return mapped(
            lambda x: x if isinstance(x, Access) else _read(x, self.env),
            self.op.operands,
        )

    def named(self, names: Sequence[str], inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns the operands of some names."""
        return [self.operands[name] for name in names]

    @property
    def is_read(self) -> bool:
        """Whether anything reads the single result."""
        return self.op.results[0] in self.users

    def reference(self, access: Access) -> Any:
        """Returns what is behind a reference: a `Memory`, a barrier, an accumulator."""
        return self.env[access.buffer]

    def part(self, access: Access) -> Part:
        """Returns the part of an array in memory that an operand is."""
        memory = self.reference(access)
        window, bits = access.window, memory.bits
        if memory.space is types.TMEM:
            return Part(memory, bits, self._tmem_window(memory, window))
        if access.viewed is not None and access.viewed[1] is not None:
            bits = memory_bits(access.viewed[1])
        aligning = access.aligning
        multiples = [
            start
            if isinstance(start, int)
            else (self._multiple(start) if axis in aligning else 1)
            for axis, start in enumerate(window.starts)
        ]
        window = window.at(window.starts, list(map(abs, multiples)))
        lead = memory.shape[: memory.batch]
        return Part(memory, bits, window.behind((None,) * len(lead), lead))

    def _tmem_window(self, memory: Memory, window: Window) -> Window:
        """The window of rows and columns, over which other dimensions are spread."""
        *lead, _, columns = window.array_shape
        starts = window.starts[:-2] + window.starts[-1:]
        strides = [math.prod(lead[i + 1 :]) * columns for i in range(len(lead))]
        first: Any = None
        multiple = 0
        if all(isinstance(start, int) for start in starts):
            first = math.sumprod(starts, [*strides, 1])
            multiple = first
        else:
            known = [s if isinstance(s, int) else self._multiple(s) for s in starts]
            multiple = math.gcd(
                *(k * s for k, s in zip(known, [*strides, 1], strict=True))
            )
        return Window.whole(memory.shape).slice(
            (window.starts[-2], first),
            window.sizes[-2:],
            (0, multiple),
            add=lambda a, b: None,
        )

    def _multiple(self, start: Any) -> int:
        """A known divisor of a dynamic start."""
        return self.network.facts().start(start).divisor

    # --- variables --------------------------------------------------------------------

    def variable(
        self,
        like: Any,
        role: str = "",
        *,
        result: tuple[int, ...] | None = None,
        relation: Relation | None = None,
        fixed: Any = None,
        **options: Any,
    ) -> Variable:
        """Adds a variable for arrays of a shape and dtype.

        Args:
          like: the operand, or the result if there is none.
          result: the result's shape where it differs.
          role, relation, fixed, **options: see `Variable`.
        """
        network, bits = self.network, dtypes.bits(np.dtype(like.dtype))
        shape, in_warp = tuple(like.shape), network.in_warp
        source = target = Cell(shape, bits={bits}, in_warp=in_warp)
        if relation is not None:
            other = shape if result is None else result
            target = Cell(other, bits={bits}, in_warp=in_warp)
        if fixed is not None:
            source.required[fixed] = None
        variable = Variable(
            len(network.variables), self, role, network.weight, bits, source, target,
            digest(str(self.key), role), relation, fixed, **options,
        )  # fmt: skip
        network.variables.append(variable)
        return variable

    def take(
        self, x: Symbol, variable: Variable, slot: Slot = 0, side: Side = "source"
    ) -> None:
        """Declares that the operation consumes an array in a variable's layout.

        Args:
          slot: which operand: what the emission asks for.
        """
        consumer = Port(variable, side)
        self.network.taken[self.path, self.op, slot] = consumer
        self.network.takes[self].append((slot, x, consumer))
        if x.port is not None:
            x.port.cell.join(consumer.cell)
            consumer.cell.bits.add(x.bits)
            edge = Edge(x.port, consumer, x.bits, self.network.weight)
            self.network.edges.append(edge)

    def taken(self, x: Symbol, variable: Variable, slot: Slot) -> None:
        """As `take`, of an operand that may be a scalar, which is broadcast."""
        if x.shape:
            self.take(x, variable, slot)
        else:
            self.network.taken[self.path, self.op, slot] = Port(variable, "source")

    def make(
        self,
        variable: Variable,
        aval: Any,
        slot: Slot = 0,
        side: Side = "target",
    ) -> Symbol:
        """Declares that the operation produces an array in a variable's layout."""
        port = Port(variable, side)
        self.network.made[self.path, self.op, slot] = port
        dtype = np.dtype(aval.dtype)
        port.cell.bits.add(dtypes.bits(dtype))
        return Symbol(tuple(aval.shape), dtype, self._origin(slot), port)

    def defer(self, how: Deferral, aval: Any, slot: Slot = 0) -> Symbol:
        """Declares that a result has no layout: it is materialized at its uses."""
        dtype = np.dtype(aval.dtype)
        return Symbol(tuple(aval.shape), dtype, self._origin(slot), deferred=how)

    def is_splat(self, x: Symbol) -> bool:
        """Whether all elements of an operand are known to be equal."""
        return x.deferred == "splat" or not x.shape

    def splat(self, x: Symbol, aval: Any, slot: Slot = 0) -> Symbol:
        """Returns a result whose elements are all that of a splat."""
        if not aval.shape:
            return self.scalar(aval, slot)
        return self.defer("splat", aval, slot)

    def scalar(self, aval: Any, slot: Slot = 0) -> Symbol:
        """Returns a scalar result."""
        return Symbol((), np.dtype(aval.dtype), self._origin(slot))

    def use(self, part: Part, kind: UseKind, **options: Any) -> Use:
        """Records the use of a part of an array in memory; see `Use`."""
        use = Use(self, kind, part, self.network.weight, **options)
        if part.space is not types.GMEM:
            self.network.array(part).uses.append(use)
        return use

    def accessing(
        self, part: Part, kind: UseKind, like: Any, **options: Any
    ) -> Variable:
        """Adds a variable for an array that is loaded from memory, or stored to it."""
        use = self.use(part, kind, **options)
        variable = self.variable(like, access=use)
        cell = variable.source
        cell.loads.add(part.bits)
        if part.space is types.TMEM:
            cell.tmem[part.base] = None
        else:
            cell.in_smem |= part.space is types.SMEM
            cell.in_gmem |= part.space is not types.SMEM
            cell.transposed |= part.window.is_transposed
        return variable

    def declare(self, i: int, var: Any, *, row_major: bool = False) -> Memory:
        """Returns an array in memory that the operation declares.

        Args:
          i: its number.
          var: the variable of its reference.
          row_major: whether it has to be, where its type leaves that open.
        """
        aval, space = var.aval, var.aval.memory_space
        lead = self.network.lead(var) if space is types.GMEM else ()
        given: Any = None
        shape = (*lead, *aval.shape)
        if space is types.TMEM:
            given, (*leading, rows, columns) = aval.storage.layout, aval.shape
            shape = rows, math.prod(leading) * columns
        elif space is types.SMEM and (aval.transforms or row_major):
            given = types.smem_layout(aval.shape, aval.dtype, aval.transforms)
        memory = Memory(
            space,
            shape,
            np.dtype(aval.dtype),
            len(lead),
            self._origin(i),
            f"{str(space).upper()} array",
            self.where,
            given,
        )
        self.network.declared[self.path, self.op, i] = memory
        self.network.steps[-1].declared.append(memory)
        return memory

    def related(
        self,
        x: Symbol,
        aval: Any,
        relation: Relation,
        slot: Slot = 0,
        *,
        splat: bool = False,
        **options: Any,
    ) -> Symbol:
        """Returns a result whose layout follows from that of an operand.

        Args:
          splat: whether a splat, too, needs a layout.
        """
        if not (splat and x.shape) and (x.deferred == "splat" or not x.shape):
            return self.defer("splat", aval, slot)
        variable = self.variable(
            x, result=tuple(aval.shape), relation=relation, **options
        )
        self.take(x, variable, slot)
        if not aval.shape:
            return self.scalar(aval, slot)
        return self.make(variable, aval, slot)

    def alike(
        self,
        operands: Sequence[Symbol],
        aval: Any,
        slots: Sequence[Slot] | None = None,
        slot: Slot = 0,
        **options: Any,
    ) -> Symbol:
        """Returns the result of an operation whose arrays have one layout.

        Args:
          operands: arrays of the result's shape, and scalars.
          aval: the result's type.
          slots, slot: of operands and result.
        """
        if not aval.shape:
            return self.scalar(aval, slot)
        names = range(len(operands)) if slots is None else slots
        arrays = [(x, n) for x, n in zip(operands, names, strict=True) if x.shape]
        if all(x.deferred for x, _ in arrays):
            return self.defer("made", aval, slot)
        variable = self.variable(aval, **options)
        for x, name in arrays:
            self.take(x, variable, name)
        return self.make(variable, aval, slot)

    # --- regions ----------------------------------------------------------------------

    def argument(self, value: Value, slot: Slot, variable: Variable | None) -> Symbol:
        """Returns an array or a scalar that a region is given."""
        dtype = np.dtype(value.dtype)
        port = None if variable is None else Port(variable, "target")
        if port is not None:
            port.cell.bits.add(dtypes.bits(dtype))
        return Symbol(tuple(value.shape), dtype, self._origin(f"argument {slot}"), port)

    def run(self, i: int, args: Sequence[Any], copy: int = 0) -> list[Any]:
        """Collects a region of the operation; returns its results."""
        network, path = self.network, (*self.path, (self.op, i, copy))
        outer, step = network.inside, network.steps[-1]
        if step.node is self:
            own = set(map(id, self.inputs))
            step.arguments.extend(x for x in args if id(x) not in own)
        network.inside = (*outer, self)
        results = run(network, self.op.regions[i], args, path)
        network.inside = outer
        network.steps.append(Step(self, outer, results, is_end=True))
        return results


@dataclasses.dataclass(eq=False)
class Step:
    """An operation in its order, or the end of one of its regions.

    Attributes:
      node: the operation.
      inside: the operations that run it, outermost first.
      operands: what it reads; at the end of a region, the region's results.
      is_end: whether it is such an end.
      arguments: what a loop passes to its body, other than its operands.
      results: what the operation makes.
      declared: the arrays in memory that it declares.
    """

    node: Node
    inside: tuple[Node, ...]
    operands: Sequence[Any]
    is_end: bool = False
    arguments: list[Symbol] = dataclasses.field(default_factory=list)
    results: list[Any] = dataclasses.field(default_factory=list)
    declared: list[Memory] = dataclasses.field(default_factory=list)


# --- the operations in order ----------------------------------------------------------


def run(
    network: Network, region: Region, args: Sequence[Any], path: Path = ()
) -> list[Any]:
    """Collects the operations of a region; returns its results."""
    env: dict[Value, Any] = dict(zip(region.inputs, args, strict=True))
    rules = registry.rules(registry.RuleKind.RELATION)
    # Nodes are kept by the network, without a cycle of references.
    is_proxy = isinstance(network, weakref.ProxyType)
    itself: Any = network if is_proxy else weakref.proxy(network)
    reads = (*(op.inputs for op in region.ops), region.results)
    users = {x for operands in reads for x in operands if isinstance(x, Value)}
    for op in region.ops:
        inputs = tuple(_read(x, env) for x in op.inputs)
        node = Node(itself, op, path, inputs, env, users)
        step = Step(node, network.inside, inputs)
        network.steps.append(step)
        results = rules.get(op.primitive, without_arrays)(node, *inputs)
        if results is None:  # nothing reads them
            results = [node.defer("splat", x, i) for i, x in enumerate(op.results)]
        elif not isinstance(results, list | tuple):
            results = [results]
        step.results.extend(results)
        env.update(zip(op.results, results, strict=True))
    results = [_read(x, env) for x in region.results]
    # Nodes refer to what stands for values, and that to variables of nodes.
    env.clear()
    return results


def _read(operand: Operand, env: dict[Value, Any]) -> Any:
    """Returns what stands for an operand."""
    if not isinstance(operand, Constant):
        return env[operand]
    shape, dtype = operand.shape, operand.dtype
    known = None if shape else operand.value.item()
    return Symbol(tuple(shape), dtype, lambda: digest(f"{dtype}{shape}"), known=known)


def collect(
    region: Region, args: Sequence[Memory], cluster: Mapping[str, int], **options: Any
) -> Network:
    """Collects a kernel.

    Args:
      region: its program.
      args: its operands and results in GMEM.
      cluster: CTAs of a cluster along each axis, by its name.
      **options: as of `Network`.

    Raises:
      LayoutError: a layout that an operation requires does not fit its array.
    """
    network = Network(cluster, **options)
    run(network, region, args)
    return network


def _has_arrays(op: Op) -> bool:
    """Whether an operation handles arrays in registers or in memory."""
    for x in (*op.inputs, *op.results):
        aval = getattr(x, "aval", None)
        if isinstance(aval, (types.SemaphoreRef, types.BarrierRef)):
            continue
        if isinstance(aval, _jax.AbstractRef) or x.shape:
            return True
    return False


def without_arrays(node: Node, *inputs: Any) -> list[Any]:
    """The relation of an operation on scalars."""
    if _has_arrays(node.op):
        raise errors.InternalError(
            f"Layout inference has no relation for {node.op.name}", where=node.where
        )
    return [node.scalar(x, i) for i, x in enumerate(node.op.results)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | str | float | np.dtype | None.__class__)


def inside(weight: int, trips: int) -> int:
    """Returns how often the body of a loop runs."""
    return min(weight * min(max(trips, 1), MAX_TRIPS), _MAX_WEIGHT)


# Names of primitives in messages, where the kernel's source has another one.
_NAMES = {
    "swap": "store",
    "get": "load",
    "scan": "loop",
    "while": "while loop",
    "cond": "branch",
    "broadcast_in_dim": "broadcast",
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "scan"),
}
