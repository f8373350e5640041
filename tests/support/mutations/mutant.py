# SPDX-License-Identifier: Apache-2.0
"""What a mutant is: a kernel with one mistake, and the report that it must give.

A kernel's body asks `m("name")` where a mistake can be; the answer is True for the
mutant of that name alone. A line that a report must name ends with `# at: mark`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

import pallas_gpu as plgpu
from pallas_gpu.errors import PallasGpuError
from tests.support import everywhere


class Wrong:
    """The kernel runs without a report, and its result is wrong."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a mutant gives.

    Attributes:
      error: the error's class, or `Wrong`.
      marks: of the lines that the error names, all of them.
    """

    error: type[PallasGpuError] | type[Wrong]
    marks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
      name: as the kernel's body asks for it.
      kind: the class of mistakes, e.g. "waits".
      reports: what it gives; one of several where that is the schedule's choice.
    """

    name: str
    kind: str
    reports: tuple[Report, ...]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel as it is called.

    Attributes:
      call: takes `interpret=` and returns the function of arrays.
      arguments: the arrays.
      expected: the results of the kernel without a mistake.
      tolerance: absolute, of the results.
      on_devices: as `call`, of a kernel on a mesh, to be run by `emulate_mesh`.
    """

    call: Callable[[Any], Callable[..., Any]]
    arguments: Sequence[Any]
    expected: Any
    tolerance: float = 0.0
    on_devices: Callable[[Any], Callable[..., Any]] | None = None

    @classmethod
    def of(
        cls,
        body: Callable[..., None],
        arguments: Sequence[Any],
        expected: Any,
        *scratch: Any,
        tolerance: float = 0.0,
        **options: Any,
    ) -> Launch:
        """Of `everywhere.kernel`, whose results have the types of `expected`."""
        call = everywhere.kernel(body, expected, *scratch, **options)
        return cls(call, arguments, expected, tolerance)

    @classmethod
    def on_mesh(
        cls,
        mesh: dict[str, int],
        body: Callable[..., None],
        arguments: Sequence[Any],
        expected: Any,
        *scratch: Any,
        launches: int = 1,
        **options: Any,
    ) -> Launch:
        """Of a kernel on all devices of a mesh, each with its part of the first axis.

        Args:
          mesh: the sizes of its axes by name.
          body, arguments, expected, scratch, options: as of `of`.
          launches: of which each gets the results of the one before it.
        """
        count, spec = math.prod(mesh.values()), jax.P(tuple(mesh))
        devices = abstract_mesh(**mesh)
        own = jax.tree.map(lambda x: x[: len(x) // count], expected)
        make = everywhere.kernel(body, own, *scratch, **options)

        def sharded(interpret: Any) -> Callable[..., Any]:
            kernel = make(interpret)

            def repeated(*args: Any) -> Any:
                for _ in range(launches):
                    args = kernel(*args)
                    args = args if isinstance(args, list | tuple) else (args,)
                return args

            return jax.shard_map(repeated, mesh=devices, in_specs=spec, out_specs=spec)

        def call(interpret: Any) -> Callable[..., Any]:
            return plgpu.emulate_mesh(sharded(interpret))

        return cls(call, arguments, expected, on_devices=sharded)


def abstract_mesh(**sizes: int) -> Any:
    """A mesh without devices, whose axes belong to `jax.shard_map`."""
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), auto)


class Switches:
    """Answers whether a mistake is switched on, and records which were asked for."""

    def __init__(self, chosen: str | None = None):
        self.chosen = chosen
        self.asked: set[str] = set()

    def __call__(self, name: str) -> bool:
        self.asked.add(name)
        return name == self.chosen


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel and its mutants.

    Attributes:
      make: takes the switches and returns the launch.
      mutants: its mistakes.
      variants: switches that change the kernel and leave it correct.
    """

    make: Callable[[Switches], Launch]
    mutants: tuple[Mutant, ...]
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.make.__module__.rpartition(".")[2]

    def line(self, mark: str) -> str:
        """`file:line` of a marked line of its file."""
        file = inspect.getsourcefile(self.make)
        assert file is not None
        with open(file) as source:
            text = source.read().splitlines()
        ending = re.compile(rf"# at: {re.escape(mark)}$")
        (number,) = (i for i, line in enumerate(text, 1) if ending.search(line))
        return f"{os.path.basename(file)}:{number}"


def rows(kind: str, *found: tuple[Any, ...]) -> tuple[Mutant, ...]:
    """Mutants of one kind: (name, error, marks ...); a name may have several rows."""
    reports: dict[str, list[Report]] = {}
    for name, error, *marks in found:
        reports.setdefault(name, []).append(Report(error, tuple(marks)))
    return tuple(Mutant(name, kind, tuple(r)) for name, r in reports.items())
