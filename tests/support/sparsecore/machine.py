# SPDX-License-Identifier: Apache-2.0
"""The machine that executes modules: cores, subcores, memories, copies in flight.

One generator per subcore, which yields what it waits for. Copies are in flight until
their waits: a seed decides when each moves its elements, so that a missing wait or an
early overwrite shows in some seed. Written from the facts of the hardware alone.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from tests.support.sparsecore.vector_values import VALUES, dtype_of, poison


class ModuleError(Exception):
    """The module does what no kernel may do: it hangs, leaves its arrays, or races."""


@dataclasses.dataclass
class View:
    """A part of an array in memory.

    Attributes:
      array: the part.
      root: the whole array.
      space: libtpu's name of the memory.
      key: what declares it, and how to find that of another subcore.
    """

    array: np.ndarray
    root: np.ndarray
    space: str
    key: Any = None

    def part(self, array: np.ndarray) -> View:
        return dataclasses.replace(self, array=array)

    def anew(self) -> View:
        """A whole array like that of the part, without contents."""
        root = self.root
        array = np.zeros_like(root)
        if "semaphore" not in self.space:
            array[...] = poison(root.shape, root.dtype)
        return View(array, array, self.space, self.key)

    def moved_to(self, root: np.ndarray) -> View:
        """The same part of another array of the same shape."""
        at = address(self.array) - address(self.root)
        made = np.ndarray(
            self.array.shape, root.dtype, root, offset=at, strides=self.array.strides
        )
        return dataclasses.replace(self, array=made, root=root)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@dataclasses.dataclass
class Copy:
    """A copy in flight; its parts are done in any order."""

    parts: list[Callable[[], None]]
    finish: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Waiting:
    """What a subcore waits for; a barrier where `ready` is None."""

    ready: Callable[[], bool] | None
    what: str


# What a subcore's code is while it runs: it yields what it waits for.
Steps = Generator[Waiting, None, Any]


def space_of(t: Any) -> str:
    return str(ir.MemRefType(t).memory_space).split("<")[1].rstrip(">")


def fresh(t: Any, key: Any = None) -> View:
    """New memory of a type: semaphores are zero, all else is poison."""
    t = ir.MemRefType(t)
    if "semaphore" in str(t.element_type):
        array = np.zeros(t.shape, np.int64)
    else:
        array = poison(tuple(t.shape), dtype_of(t.element_type))
    return View(array, array, space_of(t), key)


class Machine:
    """All cores and subcores that run a module."""

    def __init__(self, module: ir.Module, inputs: Sequence[Any], seed: int):
        function = module.body.operations[0]
        self.function = function
        self.random = random.Random(seed)
        # With seed 0 copies move at once, with seed 1 as late as waits allow.
        self.early, self.late = seed == 0, seed == 1
        self.flying: list[Copy] = []
        self.bounds = list(
            ir.DenseI64ArrayAttr(function.attributes["iteration_bounds"])
        )
        scratch = ir.IntegerAttr(function.attributes["scratch_operands"]).value
        arguments = list(function.regions[0].blocks[0].arguments)
        rank = len(self.bounds)
        arrays = arguments[rank : len(arguments) - scratch]
        self.arrays = []
        for i, argument in enumerate(arrays):
            view = fresh(argument.type)
            if i < len(inputs):
                view.array[...] = np.asarray(inputs[i])
            self.arrays.append(view)
        self.scratch = arguments[len(arguments) - scratch :]
        self.grid = arguments[:rank]
        self.operands = arrays
        self.memory: dict[Any, View] = {}
        self.released: set[Any] = set()
        self.log: list[tuple[tuple[int, int], str, list[Any]]] = []
        cores = range(self.bounds[0])
        subcores = range(self.bounds[1] if rank > 1 else 1)
        self.subcores = [Subcore(self, c, s) for c in cores for s in subcores]

    def allocate(self, value: Any, core: int, subcore: int) -> View:
        """Memory that a scratch argument or an operation declares for a subcore."""
        where: Any = (core, subcore)
        if space_of(value.type) == "vmem_shared":
            where = core
        name = (where, _name(value))
        if name not in self.memory or name in self.released:
            self.memory[name] = fresh(value.type, _name(value))
            self.released.discard(name)
        return self.memory[name]

    def release(self, value: Any, core: int, subcore: int) -> None:
        """Ends the life of what a region has allocated.

        Others may still access it: its contents are lost when it is allocated again.
        """
        name = ((core, subcore), _name(value))
        self.released.add(name)
        view = self.memory[name]
        if view.space == "semaphore_mem" and view.array.any():
            raise ModuleError(f"a semaphore is {view.array} at the end of its region")

    def of_other(self, view: View, core: int, subcore: int) -> View:
        """The same part of another subcore's memory."""
        if not any((s.core, s.subcore) == (core, subcore) for s in self.subcores):
            raise ModuleError(f"there is no subcore {(core, subcore)}")
        name = ((core, subcore), view.key)
        if name not in self.memory:  # it has not entered its region yet
            self.memory[name] = view.anew()
        return view.moved_to(self.memory[name].root)

    def start(self, copy: Copy) -> None:
        self.flying.append(copy)
        if self.early:
            self.complete(copy)

    def complete(self, copy: Copy) -> None:
        self.random.shuffle(copy.parts)
        for part in copy.parts:
            part()
        copy.finish()
        self.flying.remove(copy)

    def run(self) -> None:
        """Runs all subcores to their ends."""
        threads = {
            s: iter(s.run(self.function.regions[0].blocks[0])) for s in self.subcores
        }
        waits: dict[Subcore, Waiting] = {}
        while threads:
            able = [
                s for s in threads if s not in waits or self._ready(s, waits, threads)
            ]
            moves = bool(self.flying) and (
                not able or (not self.late and self.random.random() < 0.3)
            )
            if moves:
                self.complete(self.random.choice(self.flying))
                continue
            if not able:
                who = {(s.core, s.subcore): w.what for s, w in waits.items()}
                raise ModuleError(f"hangs: {who}")
            chosen = self.random.choice(able)
            if waits.get(chosen) and waits[chosen].ready is None:
                for other in self._at_barrier(chosen, threads):
                    waits.pop(other)
                continue
            waits.pop(chosen, None)
            wait = next(threads[chosen], None)
            if wait is None:
                del threads[chosen]
            else:
                waits[chosen] = wait
        if self.flying:
            raise ModuleError("a copy was never awaited")
        for (_, name), view in self.memory.items():
            if view.space == "semaphore_mem" and view.array.any():
                raise ModuleError(f"semaphore {name} is {view.array} at the end")

    def _at_barrier(self, subcore: Subcore, threads: Any) -> list[Subcore]:
        return [s for s in threads if s.core == subcore.core]

    def _ready(self, subcore: Subcore, waits: dict[Any, Any], threads: Any) -> bool:
        wait = waits[subcore]
        if wait.ready is not None:
            return wait.ready()
        others = [s for s in self.subcores if s.core == subcore.core]
        return all(
            s in threads and s in waits and waits[s].ready is None for s in others
        )


def _name(value: Any) -> Any:
    if isinstance(value, ir.BlockArgument):
        return value.arg_number
    return hash(value)


class Subcore:
    """One subcore: the values of its code, and how it executes operations."""

    def __init__(self, machine: Machine, core: int, subcore: int):
        self.machine, self.core, self.subcore = machine, core, subcore
        self.env: dict[Any, Any] = {}
        indices = [np.int32(core), np.int32(subcore)]
        self.env.update(zip(machine.grid, indices, strict=False))
        self.env.update(zip(machine.operands, machine.arrays, strict=True))
        for value in machine.scratch:
            self.env[value] = machine.allocate(value, core, subcore)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def run(self, block: ir.Block) -> Steps:
        """Executes a block; the generator's value is what the block hands on."""
        for op in block.operations:
            name = op.operation.name
            args = [self.env.get(v) for v in op.operands]
            if name in ("scf.yield", "func.return", "scf.condition", "tpu.yield"):
                return args
            if name in VALUES:
                results = VALUES[name](op, args)
            elif name in OPERATIONS:
                results = OPERATIONS[name](self, op, args)
                if isinstance(results, Generator):
                    results = yield from results
            else:
                raise NotImplementedError(name)
            self.env.update(zip(op.results, results or (), strict=True))
        return []

    def operand(self, op: Any, name: str) -> Any:
        """The value of a named operand, or None."""
        value = getattr(op, name)
        return None if value is None else self.env[value]

    def copy(
        self, parts: list[Callable[[], None]], units: int, semaphore: View
    ) -> None:
        def finish() -> None:
            semaphore.array[...] += units

        self.machine.start(Copy(parts, finish))

    def wait(self, semaphore: View, units: int, what: str) -> Steps:
        yield Waiting(lambda: int(semaphore.array) >= units, what)
        semaphore.array[...] -= units


OPERATIONS: dict[str, Callable[[Subcore, Any, list[Any]], Any]] = {}


def operation(*names: str) -> Callable[[Callable], Callable]:
    def enter(f: Callable) -> Callable:
        OPERATIONS.update(dict.fromkeys(names, f))
        return f

    return enter
