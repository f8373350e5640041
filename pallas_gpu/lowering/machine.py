# SPDX-License-Identifier: Apache-2.0
"""The interface of a machine: what one implements for the compilation pipeline.

A machine consists of a planner, a launch, a kernel state and its own passes, behind the
protocols of this file. `launch.py` implements NVIDIA's; another machine registers its
own without changes to the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxlib.mlir import ir

from pallas_gpu import arch, errors
from pallas_gpu.entry.call import CallParams
from pallas_gpu.program.nodes import Access, Op


class Plan(Protocol):
    """A planner's allocation of the memory of a kernel."""

    def table(self) -> str:
        """The allocations as readable text."""


class Launch(Protocol):
    """The module of a kernel, empty at first: rules emit inside its `with` block.

    Attributes:
      module: complete on exit from the block.
    """

    module: ir.Module

    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> Any: ...


class State(Protocol):
    """The state of a kernel while its equations are lowered.

    Attributes:
      plan: the planner's, as extended by rules that need scratch.
      where: returns the line of the equation that is lowered, for warnings.
    """

    plan: Any
    where: Callable[[], str | None]

    @property
    def rules(self) -> Mapping[Any, Callable[..., Any]]:
        """The rule of each primitive: `rule(context, *operands)`."""

    @property
    def keeps_lines(self) -> bool:
        """Whether operations carry the lines of their equations."""

    def finished(self, ctx: Any, results: Sequence[Any]) -> Sequence[Any]:
        """Returns the results of a rule as they are used."""

    def constant(self, value: Any, dtype: Any) -> Any:
        """Returns a scalar that is known in advance."""

    def part(self, access: Access, read: Callable[[Any], Any]) -> Any:
        """Returns a part of a reference; `read` returns the values of operands."""

    def no_rule(self, op: Op) -> errors.PallasGpuError:
        """Returns the error for a primitive without a rule."""


class Machine[PlanT: Plan, LaunchT: Launch, StateT: State](Protocol):
    """One kind of hardware, as the compilation pipeline sees it.

    Attributes:
      name: the value of `machine` in its targets.
      passes: the stages that the machine implements, by name.
    """

    name: str
    passes: dict[str, Pass]

    def plan(self, params: CallParams, target: Any) -> PlanT:
        """Plans memory against the target's budgets.

        Raises:
          OutOfResources: the kernel does not fit.
        """

    def launch(self, params: CallParams, target: Any, plan: PlanT) -> LaunchT:
        """Returns the launch of the kernel, without a body."""

    def state(
        self,
        params: CallParams,
        target: Any,
        plan: PlanT,
        launch: LaunchT,
        layouts: Any = None,
    ) -> StateT:
        """Returns the initial state of the rules; the launch is open."""

    def prologue(self, state: StateT) -> Sequence[Any]:
        """Emits the code before the body; returns the handles of its references."""

    def epilogue(self, state: StateT) -> None:
        """Emits the code after the body."""


@dataclasses.dataclass(frozen=True)
class Build:
    """A kernel between two stages of the compilation pipeline.

    The module is modified in place, and a stage reads what it needs from it. Three
    other things are passed along: the plan, since code may come to need scratch; the
    inferred layouts; and the launch, which records what it has emitted once. A module
    parsed from text has no launch: the order of its prologue may then differ.

    Attributes:
      params: the kernel primitive's parameters.
      target: the target of the compilation.
      plan: from the stage `plan` on.
      module: from the stage `rules` on.
      launch: the launch that has built this module, if available.
      layouts: the result of the stage `layouts`, where the machine has one.
      serialized: the module as bytes, from the stage `serialize` on.
      compiled: the machine code and its statistics, from the stage `compile` on.
    """

    params: CallParams
    target: arch.Target
    plan: Any = None
    module: Any = None
    launch: Any = None
    layouts: Any = None
    serialized: Any = None
    compiled: Any = None

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.params.name

    def replace(self, **fields: Any) -> Build:
        """Returns the build with some fields replaced."""
        return dataclasses.replace(self, **fields)

    def with_body(self, jaxpr: Any) -> Build:
        """Returns the build of the kernel with another body."""
        return self.replace(params=self.params.with_body(jaxpr))


Pass = Callable[[Build], Build]

_MACHINES: dict[str, Machine] = {}


def register_machine(machine: Machine) -> None:
    """Registers a machine with the compilation pipeline."""
    if machine.name in _MACHINES:
        raise errors.InternalError(f"two machines named {machine.name!r}")
    _MACHINES[machine.name] = machine


def machine_of(target: arch.Target) -> Machine:
    """Returns the machine that compiles for a target.

    Raises:
      TargetError: there is none.
    """
    machine = _MACHINES.get(target.machine)
    if machine is None:
        raise errors.TargetError(
            f"no machine compiles for {target.name}",
            expected="a target of " + " or ".join(_MACHINES),
            got=f"a target of {target.machine!r}",
        )
    return machine
