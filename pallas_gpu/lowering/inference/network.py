# SPDX-License-Identifier: Apache-2.0
"""What inference knows of a kernel: variables, cells, edges, arrays in memory.

A variable represents one operation on vectors (or one carry of a loop, one result of a
branch): its label determines the layouts in which the operation consumes its operands
and produces its result. An edge leads from the variable that defines a value to one
that uses it; where the two layouts differ, the edge is a relayout. Cells are sets of
values of one shape that can exchange layouts: they share their candidates.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxlib.mlir import ir

from pallas_gpu import errors, types
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.layouts.registers.placement import Placement, is_of_warp
from pallas_gpu.lowering import memrefs
from pallas_gpu.lowering.inference import sources
from pallas_gpu.lowering.inference.relations import Relation
from pallas_gpu.lowering.memrefs import Part
from pallas_gpu.mosaic import logical

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
    "alloc",
    "constrain",
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
    tmem: dict[ir.Value, None] = dataclasses.field(default_factory=dict)
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
      op: the operation.
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
      in_flight: whether its result may be an accumulator of a WGMMA in flight: nothing
        may read its registers, not even a relayout.
      key: a number that does not depend on the order of operations.
    """

    index: int
    op: ir.Operation
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
    in_flight: bool = False

    @property
    def in_warp(self) -> bool:
        """Whether a single warp executes it."""
        return self.source.in_warp

    @property
    def name(self) -> str:
        """Its name in error messages, with its line."""
        name = sources.named(self.op)
        return f"{self.role} of {name}" if self.role else name


@dataclasses.dataclass(eq=False)
class Use:
    """One operation's use of an array in memory.

    Attributes:
      op: the operation.
      kind: how it uses the array; "indexed" accesses elements by an address each,
        "pointer" uses the array's address and sees it as it is stored. "mma" is an
        operand of tcgen05 in SMEM; "alloc" declares an array in TMEM, "constrain"
        restricts its layout.
      part: the part it uses.
      weight: how often it runs.
      optimized: whether the author asked for an access without bank conflicts.
      other: the GMEM side of a TMA copy.
      pieces: number of equal parts into which a TMA copy is divided, or the columns of
        an "mma".
      allow_line: whether a TMA copy may be one of adjacent bytes.
      in_bounds: whether the author promises that the GMEM side is in bounds.
      role: which operand the array is; empty where that is clear.
      admitted: the layouts in TMEM that a "constrain" admits.
    """

    op: ir.Operation
    kind: UseKind
    part: Part
    weight: int
    optimized: bool = False
    other: Part | None = None
    pieces: int = 1
    allow_line: bool = False
    in_bounds: bool = False
    role: str = ""
    admitted: tuple[TmemLayout, ...] = ()


@dataclasses.dataclass(eq=False)
class SmemArray:
    """An array in SMEM, whose storage is to be assigned.

    Attributes:
      index: its number.
      base: the `slice_smem`'s result.
      shape: of the whole array.
      bits: width of an element in memory.
      uses: its uses, in program order.
      transforms: the `with_transforms` the user gave it, if any.
      key: a number that does not depend on the order of operations.
    """

    index: int
    base: ir.Value
    shape: tuple[int, ...]
    bits: int
    transforms: ir.Operation | None
    key: int
    uses: list[Use] = dataclasses.field(default_factory=list)

    @property
    def op(self) -> ir.Operation:
        """The operation that declares it."""
        return _declaration(self.base)


@dataclasses.dataclass(eq=False)
class TmemArray:
    """An array in TMEM, whose layout is to be assigned.

    Attributes:
      index: its number, among all arrays.
      base: the result of the `tmem_alloc` or `slice_tmem`.
      shape: of the whole array.
      bits: width of an element in memory.
      key: a number that does not depend on the order of operations.
      uses: its uses, in program order; its declaration is the first.
    """

    index: int
    base: ir.Value
    shape: tuple[int, ...]
    bits: int
    key: int
    uses: list[Use] = dataclasses.field(default_factory=list)

    @property
    def op(self) -> ir.Operation:
        """The operation that declares it."""
        return _declaration(self.base)


def _declaration(base: Any) -> Any:
    return base.owner.operation if isinstance(base, ir.Value) else base


Array = SmemArray | TmemArray


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
      rigid: whether a relayout is forbidden here.
    """

    producer: Port
    consumer: Port
    bits: int
    weight: int
    rigid: bool


@dataclasses.dataclass(frozen=True)
class Move:
    """An operation that moves data through scratch where it cannot rename registers.

    Attributes:
      operand, result: the two variables of the operation.
      relation: the result's layout where registers are only renamed.
      bits: width of an element, 1 for a bool.
      weight: how often it runs.
    """

    operand: Variable
    result: Variable
    relation: Relation
    bits: int
    weight: int


class Key:
    """The key of an operation; its text is computed when a rule needs it."""

    def __init__(self, network: Network, op: ir.Operation) -> None:
        self._network, self._op = network, op

    def __str__(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        return str(self._network.key_of(self._op))


class Network:
    """Everything collected from a kernel, and the methods that collect it.

    Attributes:
      cluster: CTAs of a cluster per axis.
      weight: how often the operations that are being collected run: the product of the
        trip counts of the enclosing loops, of which each counts at most 8; 8 where it
        is unknown.
      uses_wgmma: whether the kernel multiplies with wgmma.
      in_warp: whether a single warp executes the operations that are being collected.
    """

    def __init__(self, cluster: tuple[int, ...] = ()) -> None:
        self.cluster = cluster
        self.variables: list[Variable] = []
        self.edges: list[Edge] = []
        self.moves: list[Move] = []
        self.arrays: dict[ir.Value, Array] = {}
        self.results: dict[ir.Value, Port] = {}
        self.operands: dict[tuple[ir.Operation, int], Port] = {}
        self.deferred: dict[ir.Value, Deferral] = {}
        self.weight = 1
        self.uses_wgmma = False
        self.in_warp = False
        self._keys: dict[ir.Value, int] = {}
        self._parts: dict[ir.Value, Part | None] = {}
        self._types: dict[ir.Type, tuple[tuple[int, ...], int]] = {}
        self._texts: dict[ir.Attribute | ir.Type, str] = {}

    # --- types ------------------------------------------------------------------------

    def vector_type(self, type_: ir.Type) -> tuple[tuple[int, ...], int]:
        """Shape and width of an element in a register, 1 for a bool."""
        known = self._types.get(type_)
        if known is None:
            vector = ir.VectorType(type_)
            known = tuple(vector.shape), logical.register_bits(vector.element_type)
            self._types[type_] = known
        return known

    def part(self, memref: ir.Value) -> Part | None:
        """The part of an array behind a memref; see `memrefs.resolve`."""
        if memref not in self._parts:
            self._parts[memref] = memrefs.resolve(memref)
        return self._parts[memref]

    # --- keys -------------------------------------------------------------------------

    def key_of(self, op: ir.Operation) -> int:
        """A hash of name, attributes, types and the operands' keys.

        Keys are computed on demand: few operations on arrays depend on an address.
        """
        # Each access to an operation's operands creates them as new Python objects.
        pending = [(op, list(op.operands))]
        while True:
            op, operands = pending[-1]
            keys = [self._keys.get(operand) for operand in operands]
            if None in keys:
                missing = [x for x, k in zip(operands, keys, strict=True) if k is None]
                owners = {x.owner for x in missing}
                makers = [x.operation for x in owners if not isinstance(x, ir.Block)]
                if makers:
                    pending += [(maker, list(maker.operands)) for maker in makers]
                    continue
            pending.pop()
            key = self._name(op, keys)
            if not pending:
                return key

    def _name(self, op: ir.Operation, operands: Sequence[int | None]) -> int:
        results, text = list(op.results), self._text
        parts = [op.name]
        parts += [f"{name}={text(value)}" for name, value in op.attributes.items()]
        parts += [text(result.type) for result in results]
        parts += [str(key or 0) for key in operands]
        name = digest(*parts)
        for i, result in enumerate(results):
            self._keys[result] = digest(str(name), str(i))
        return name

    def _key_of_array(self, base: ir.Value) -> int:
        """The key of the array that an operation declares."""
        if base not in self._keys:
            self.key_of(base.owner.operation)
        return self._keys[base]

    def _text(self, part: ir.Attribute | ir.Type) -> str:
        """The text of an attribute or a type, printed once per kernel."""
        found = self._texts.get(part)
        if found is None:
            found = self._texts[part] = str(part)
        return found

    def name_arguments(self, block: ir.Block, key: Key) -> None:
        """Assigns keys to a region's arguments."""
        for i, argument in enumerate(block.arguments):
            self._keys[argument] = digest(str(key), "argument", str(i))

    # --- variables --------------------------------------------------------------------

    def variable(
        self,
        op: ir.Operation,
        type_: ir.Type,
        key: Key | int,
        *,
        role: str = "",
        result: tuple[int, ...] | None = None,
        relation: Relation | None = None,
        fixed: Placement | None = None,
        access: Use | None = None,
        cycles_per_element: float = 0.0,
        moved_bits: int = 0,
        in_flight: bool = False,
    ) -> Variable:
        """Adds a variable.

        Args:
          op: the operation.
          type_: vector type of the operand (or of the result if there is none).
          key: the operation's.
          result: the result's shape where it differs.
          role, relation, fixed, access, cycles_per_element, moved_bits, in_flight: see
            `Variable`.
        """
        shape, bits = self.vector_type(type_)
        source = Cell(shape, bits={bits}, in_warp=self.in_warp)
        target = source
        if relation is not None:
            other = shape if result is None else result
            target = Cell(other, bits={bits}, in_warp=self.in_warp)
        variable = Variable(
            len(self.variables),
            op,
            role,
            self.weight,
            bits,
            source,
            target,
            digest(str(key), role),
            relation,
            fixed,
            access,
            cycles_per_element,
            moved_bits,
            in_flight,
        )
        if fixed is not None:
            source.required[fixed] = None
        self.variables.append(variable)
        return variable

    def consume(
        self,
        op: ir.Operation,
        i: int,
        variable: Variable,
        side: Side = "source",
        *,
        rigid: bool = False,
    ) -> None:
        """Declares that an operation consumes operand `i` in a variable's layout.

        Args:
          rigid: without a relayout: in the layout in which it was produced.
        """
        consumer = Port(variable, side)
        self.operands[op, i] = consumer
        value = op.operands[i]
        producer = self.results.get(value)
        if producer is None:
            self._require_known(value, op)
            return
        _, bits = self.vector_type(value.type)
        producer.cell.join(consumer.cell)
        consumer.cell.bits.add(bits)
        rigid = rigid or producer.variable.in_flight
        self.edges.append(Edge(producer, consumer, bits, self.weight, rigid))

    def produce(
        self, value: ir.Value, variable: Variable, side: Side = "target"
    ) -> None:
        """Declares that a value is produced in the layout of a variable."""
        self.results[value] = Port(variable, side)
        self.results[value].cell.bits.add(self.vector_type(value.type)[1])

    def move(self, operand: Variable, result: Variable, relation: Relation) -> None:
        """Declares that an operation renames registers, or else moves their data."""
        self.moves.append(Move(operand, result, relation, operand.bits, self.weight))

    def links(self) -> Iterator[tuple[Cell, Cell, Relation, int]]:
        """Cells whose layouts are related, the relation, and the width of elements."""
        for v in self.variables:
            if v.relation is not None:
                yield v.source.find(), v.target.find(), v.relation, v.bits
        for m in self.moves:
            cells = m.operand.source.find(), m.result.source.find()
            yield *cells, m.relation, m.bits

    def defer(self, value: ir.Value, how: Deferral) -> None:
        """Declares that a value has no layout: it is materialized at its uses."""
        self.deferred[value] = how

    def _require_known(self, value: ir.Value, op: ir.Operation) -> None:
        if value not in self.deferred:
            raise errors.InternalError(
                "Inference has not collected the definition of a vector",
                got=f"{value} in {op.name}",
                where=sources.where(op),
            )

    # --- memory -----------------------------------------------------------------------

    def use_memory(self, use: Use) -> None:
        """Records the use of an array in memory."""
        if use.part.space is not types.GMEM:
            self.array(use.part).uses.append(use)

    def array(self, part: Part) -> Array:
        """The array that a part belongs to."""
        base = part.base
        found = self.arrays.get(base)
        if found is None:
            whole = memrefs.resolve(base)
            assert whole is not None
            shape, bits = whole.window.array_shape, whole.bits
            key = self._key_of_array(base)
            number = len(self.arrays)
            if part.space is types.TMEM:
                found = TmemArray(number, base, shape, bits, key)
            else:
                transforms = memrefs.user_transforms(base)
                found = SmemArray(number, base, shape, bits, transforms, key)
            self.arrays[base] = found
        return found

    def cells(self) -> Iterator[Cell]:
        """The representatives of all cells, once each."""
        seen = dict.fromkeys(
            cell.find() for v in self.variables for cell in (v.source, v.target)
        )
        yield from seen


def digest(*parts: str) -> int:
    """A number that is the same in every process."""
    text = "\0".join(parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
