# SPDX-License-Identifier: Apache-2.0
"""What inference knows of a kernel: variables, cells, edges, arrays in memory.

A variable represents one operation on vectors (or one carry of a loop, one result of a
branch): its label determines the layouts in which the operation consumes its operands
and produces its result. An edge leads from the variable that defines a value to one
that uses it; where the two layouts differ, the edge is a relayout. Cells are sets of
values of one shape that can exchange layouts: they share their candidates.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.registers.placement import Placement, is_of_warp
from pallas_gpu.layouts.window import Window
from pallas_gpu.lowering.inference.relations import Relation
from pallas_gpu.program.facts import Facts
from pallas_gpu.program.nodes import Op

# The regions around an operation: for each the operation that runs it, which of its
# regions it is, and which copy of an unrolled body.
Path = tuple[tuple[Op, int, int], ...]
Slot = int | str
# "splat": one element, repeated; "made": an iota, or a function of deferred values.
Deferral = Literal["splat", "made"]
Side = Literal["source", "target"]
UseKind = Literal[
    "load",
    "store",
    "indexed",
    "a",
    "b",
    "copy",
    "im2col",
    "pointer",
    "mma",
]


@dataclasses.dataclass(eq=False)
class Cell:
    """Values of one shape that share their candidates, as a union-find set.

    Attributes:
      shape: the arrays' shape.
      required: layouts that operations require.
      loads: widths in memory of what is loaded or stored here, in bits.
      in_smem, in_gmem: whether something is loaded from or stored to there.
      transposed: whether that happens through a transposed view, or an array is
        transposed in registers.
      tmem: the arrays in TMEM that loads and stores of the cell access.
      bits: widths of elements.
      in_warp: whether a single warp has the arrays.
    """

    shape: tuple[int, ...]
    parent: Cell | None = None
    required: dict[Placement, None] = dataclasses.field(default_factory=dict)
    loads: set[int] = dataclasses.field(default_factory=set)
    in_smem: bool = False
    in_gmem: bool = False
    transposed: bool = False
    bits: set[int] = dataclasses.field(default_factory=set)
    tmem: dict[Memory, None] = dataclasses.field(default_factory=dict)
    in_warp: bool = False

    def admits(self, layout: Placement) -> bool:
        """Whether the threads that have the arrays can have them in a layout."""
        return not self.in_warp or is_of_warp(layout)

    def find(self) -> Cell:
        """The representative."""
        cell = self
        while cell.parent is not None:
            cell = cell.parent
        if cell is not self:
            self.parent = cell
        return cell

    def join(self, other: Cell) -> None:
        """Merges two cells."""
        a, b = self.find(), other.find()
        if a is b:
            return
        if a.shape != b.shape:
            raise errors.InternalError(
                "Arrays of different shapes are operands of one operation",
                got=f"{a.shape} and {b.shape}",
            )
        b.parent = a
        a.required.update(b.required)
        a.loads |= b.loads
        a.bits |= b.bits
        a.in_smem |= b.in_smem
        a.in_gmem |= b.in_gmem
        a.transposed |= b.transposed
        a.tmem.update(b.tmem)


@dataclasses.dataclass(eq=False)
class Variable:
    """An operation whose layouts are to be assigned.

    Attributes:
      index: its number.
      node: the operation, a `collect.Node`.
      role: which part of it, e.g. a loop's carry; empty for all of it.
      weight: how often it runs, see `Network.weight`.
      bits: width of the operand's elements, 1 for a bool.
      source, target: cells of operands and of the result; the same without a relation.
      relation: how the result's layout follows from the operand's; None if equal.
      fixed: the only layout that the operation supports.
      access: the part of memory it loads or stores.
      cycles_per_element: cost of elementwise work per element that a thread holds; 0
        for any other operation.
      moved_bits: width in memory of the elements that it stores to scratch, or loads
        from there, to move them between threads; 0 for any other operation.
      key: a number that does not depend on the order of operations.
    """

    index: int
    node: Any
    role: str
    weight: int
    bits: int
    source: Cell
    target: Cell
    key: int
    relation: Relation | None = None
    fixed: Placement | None = None
    access: Use | None = None
    cycles_per_element: float = 0.0
    moved_bits: int = 0

    @property
    def in_warp(self) -> bool:
        """Whether a single warp executes it."""
        return self.source.in_warp

    @property
    def name(self) -> str:
        """Its name in error messages, with its line."""
        name = named(self.node)
        return f"{self.role} of {name}" if self.role else name


@dataclasses.dataclass(eq=False)
class Use:
    """One operation's use of an array in memory.

    Attributes:
      node: the operation, a `collect.Node`.
      kind: how it uses the array; "indexed" accesses elements by an address each,
        "pointer" uses the array's address and sees it as it is stored. "mma" is an
        operand of tcgen05.
      part: the part it uses.
      weight: how often it runs.
      optimized: whether the author asked for an access without bank conflicts.
      other: the GMEM side of a TMA copy.
      pieces: number of equal parts into which a TMA copy is divided, or the columns of
        an "mma".
      allow_line: whether a TMA copy may be one of adjacent bytes.
      in_bounds: whether the author promises that the GMEM side is in bounds.
      role: which operand the array is; empty where that is clear.
      stored: the layout of the array that a "pointer" requires; None for row-major.
    """

    node: Any
    kind: UseKind
    part: Part
    weight: int
    optimized: bool = False
    other: Part | None = None
    pieces: int = 1
    allow_line: bool = False
    in_bounds: bool = False
    role: str = ""
    stored: SmemLayout | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """An array in memory.

    Attributes:
      shape: of the whole array; batch axes first.
      dtype: of its elements.
      batch: number of batch axes.
      origin: returns a number that does not depend on the order of operations.
      words: its name in messages.
      where: the line of its declaration.
      given: its layout in SMEM or TMEM, where the author specified it.
    """

    space: types.MemorySpace
    shape: tuple[int, ...]
    dtype: np.dtype
    batch: int
    origin: Callable[[], int]
    words: str
    where: str | None
    given: Any = None

    @property
    def bits(self) -> int:
        """Width of an element in memory."""
        return memory_bits(self.dtype)


def memory_bits(dtype: Any) -> int:
    """Returns the width of an element in memory."""
    return dtypes.stored_bits(dtypes.memory_dtype(np.dtype(dtype)))


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an array in memory.

    Attributes:
      base: the array.
      bits: width of an element, after a change of type.
      window: the part, in the array's shape or in that in which it is viewed.
    """

    base: Memory
    bits: int
    window: Window

    @property
    def space(self) -> types.MemorySpace:
        """Memory space."""
        return self.base.space


@dataclasses.dataclass(eq=False)
class Array:
    """An array in SMEM or TMEM, whose storage is to be assigned.

    Attributes:
      index: its number.
      base: the array.
      uses: its uses, in program order.
    """

    index: int
    base: Memory
    uses: list[Use] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Port:
    """One side of a variable: the operand or the result of its relation."""

    variable: Variable
    side: Side

    @property
    def cell(self) -> Cell:
        """The representative of the cell on this side."""
        variable = self.variable
        cell = variable.source if self.side == "source" else variable.target
        return cell.find()


@dataclasses.dataclass(frozen=True)
class Edge:
    """A value from the variable that defines it to one that uses it.

    Attributes:
      producer, consumer: the two ends.
      bits: width of the value's elements, 1 for a bool.
      weight: how often a relayout between the two would run.
    """

    producer: Port
    consumer: Port
    bits: int
    weight: int


@dataclasses.dataclass(frozen=True)
class Move:
    """An operation that moves data through scratch where it cannot rename registers.

    Attributes:
      operand, result: the two variables of the operation.
      relation: the result's layout where registers are only renamed.
    """

    operand: Variable
    result: Variable
    relation: Relation


class Network:
    """Everything collected from a kernel.

    Attributes:
      sizes: CTAs of a cluster along each axis, by its name.
      facts: returns what is known of scalars.
      free: the references whose layout in SMEM is inferred although they share bytes.
      lead: returns the sizes of the batch axes of an array that the launch adds.
      approx_math: whether fast approximations are allowed.
      made: what determines the layout of a result, by path, operation and slot.
      taken: likewise of an operand.
      takes: for each operation its operands, by slot.
      declared: the arrays in memory that scopes declare.
      steps: the operations in order, as `collect.Step`s.
      inside: the operations that run the one that is collected.
      weight: how often the operations that are being collected run: the product of the
        trip counts of the enclosing loops, of which each counts at most 8; 8 where it
        is unknown.
      uses_wgmma: whether the kernel multiplies with wgmma.
      in_warp: whether a single warp executes the operations that are being collected.
    """

    def __init__(
        self,
        cluster: Mapping[str, int],
        facts: Callable[[], Facts],
        free: frozenset[Any] = frozenset(),
        lead: Callable[[Any], tuple[int, ...]] = lambda var: (),
        approx_math: bool = False,
    ) -> None:
        self.sizes, self.facts = cluster, facts
        self.free, self.lead, self.approx_math = free, lead, approx_math
        self.variables: list[Variable] = []
        self.edges: list[Edge] = []
        self.moves: list[Move] = []
        self.arrays: dict[Memory, Array] = {}
        self.made: dict[tuple[Path, Op, Slot], Port] = {}
        self.taken: dict[tuple[Path, Op, Slot], Port] = {}
        self.takes: dict[Any, list[tuple[Slot, Any, Port]]]
        self.takes = collections.defaultdict(list)
        self.declared: dict[tuple[Path, Op, int], Memory] = {}
        self.steps: list[Any] = []
        self.inside: tuple[Any, ...] = ()
        self.weight = 1
        self.uses_wgmma = self.in_warp = False

    def links(self) -> Iterator[tuple[Cell, Cell, Relation, int]]:
        """Cells whose layouts are related, the relation, and the width of elements."""
        for v in self.variables:
            if v.relation is not None:
                yield v.source.find(), v.target.find(), v.relation, v.bits
        for m in self.moves:
            cells = m.operand.source.find(), m.result.source.find()
            yield *cells, m.relation, m.operand.bits

    def array(self, part: Part) -> Array:
        """The array that a part belongs to."""
        found = self.arrays.get(part.base)
        if found is None:
            found = self.arrays[part.base] = Array(len(self.arrays), part.base)
        return found

    def cells(self) -> Iterable[Cell]:
        """The representatives of all cells, once each."""
        return dict.fromkeys(
            cell.find() for v in self.variables for cell in (v.source, v.target)
        )


def named(node: Any) -> str:
    """An operation or an array with its line, if known: `wgmma (kernel.py:12)`."""
    if node.where is None:
        return node.words
    line, _, _ = node.where.partition(" (")
    return f"{node.words} ({line})"


def digest(*parts: str) -> int:
    """A number that is the same in every process."""
    text = "\0".join(parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
