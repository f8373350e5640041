# SPDX-License-Identifier: Apache-2.0
"""A kernel's body as Python functions, one for each operation, made once.

Each file of a hardware unit registers how its operations run: a factory takes the
operation and returns a function of the strand that runs it, a generator where it can
block.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.not_modelled import NotModelled

Step = Callable[[Any], Any]  # of the strand; a generator function where it can block
Factory = Callable[["Program", ir.Operation], Step | None]

_FACTORIES: dict[str, Factory] = {}
_PLACE = re.compile(r'"(?P<file>[^"]+)":(?P<line>\d+)')
_ENDS = ("gpu.terminator", "func.return", "scf.yield", "scf.condition")


def runs(*names: str) -> Callable[[Factory], Factory]:
    """Registers a factory for operations of some names."""

    def register(factory: Factory) -> Factory:
        for name in names:
            assert name not in _FACTORIES, name
            _FACTORIES[name] = factory
        return factory

    return register


class Block:
    """A block of operations.

    Attributes:
      arguments, results: slots of the block's arguments, and of the operands of its
        terminator.
      blocks: True when some operation can block.
    """

    def __init__(self, program: Program, block: ir.Block) -> None:
        self.arguments = [program.slot(x) for x in block.arguments]
        self.results: list[int] = []
        self._steps: list[tuple[bool, Step]] = []
        self._lines: dict[Step | None, str | None] = {}
        for op in block.operations:
            inner = op.operation
            if inner.name in _ENDS:
                self.results = [program.slot(x) for x in inner.operands]
                continue
            step = program.compile(inner)
            if step is not None:
                generates = step.__code__.co_flags & inspect.CO_GENERATOR
                self._steps.append((bool(generates), step))
                self._lines[step] = _line(inner.location)
        self.blocks = any(blocks for blocks, _ in self._steps)
        self._plain = [step for _, step in self._steps]

    def run(self, strand: Any) -> None:
        """Runs the operations, none of which can block."""
        step = None
        try:
            for step in self._plain:
                step(strand)
        except PtxError as error:
            raise error.with_location(self._lines.get(step)) from None

    def run_blocking(self, strand: Any) -> Iterator[Any]:
        """Runs the operations; yields where it waits."""
        if not self.blocks:
            self.run(strand)
            return
        step = None
        try:
            for blocks, step in self._steps:
                if blocks:
                    yield from step(strand)
                else:
                    step(strand)
        except PtxError as error:
            raise error.with_location(self._lines.get(step)) from None

    def values(self, strand: Any) -> list[Any]:
        """The operands of the terminator."""
        env = strand.env
        return [env[i] for i in self.results]


def without_waits(run: Step) -> Step:
    """The step of a generator that never yields."""

    def step(strand: Any) -> None:
        for _ in run(strand):
            raise AssertionError("an operation that cannot block has waited")

    return step


def _line(location: ir.Location) -> str | None:
    """Returns `file:line (kernel)` of an operation's location, if it has one."""
    found = _PLACE.search(str(location))
    return f"{found['file']}:{found['line']} (kernel)" if found else None


class Program:
    """The body of a kernel, compiled for the machine.

    Attributes:
      body: its block.
      size: number of slots of an environment.
      constants: the slots that never change, with their values.
      polls: whether threads wait for what other clusters do.
    """

    def __init__(self, block: ir.Block) -> None:
        self._slots: dict[ir.Value, int] = {}
        self.constants: dict[int, Any] = {}
        self.polls = False
        self.body = Block(self, block)

    @property
    def size(self) -> int:
        return len(self._slots)

    def slot(self, value: ir.Value) -> int:
        """Where an environment keeps a value."""
        return self._slots.setdefault(value, len(self._slots))

    def inputs(self, op: ir.Operation) -> list[int]:
        """The slots of an operation's operands."""
        return [self.slot(x) for x in op.operands]

    def segments(self, op: ir.Operation) -> list[list[int]]:
        """The slots of an operation's operands, by groups of operands."""
        sizes = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
        rest, groups = self.inputs(op), []
        for size in sizes:
            groups.append(rest[:size])
            rest = rest[size:]
        return groups

    def outputs(self, op: ir.Operation) -> list[int]:
        """The slots of an operation's results."""
        return [self.slot(x) for x in op.results]

    def compile(self, op: ir.Operation) -> Step | None:
        """The function that runs an operation; None where it does nothing.

        Raises:
          NotModelled: no file registers the operation, or not in this form.
        """
        factory = _FACTORIES.get(op.name)
        if factory is None:
            raise NotModelled(op.name, str(op)[:500])
        return factory(self, op)
