# SPDX-License-Identifier: Apache-2.0
"""The seam for a machine: what one brings to the compilation pipeline.

A machine is a planner, a launch, a kernel state and its own passes, all behind the
protocols of this file. `launch.py` has NVIDIA's; another machine registers its own and
changes nothing of theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxlib.mlir import ir

from pallas_gpu import _jax, arch, errors, walk
from pallas_gpu.entry.call import CallParams


class Plan(Protocol):
    """What a machine's planner says of the memory of a kernel."""

    def table(self) -> str:
        """The allocations, for people."""


class Launch(Protocol):
    """The shell of a kernel's module: rules emit inside its `with` block.

    Attributes:
      module: complete when the block has ended.
    """

    module: ir.Module

    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> Any: ...


class State(Protocol):
    """What is common to a kernel's equations while they are lowered.

    Attributes:
      plan: the planner's, as it is by now: rules may find that they need more.
    """

    plan: Any

    @property
    def rules(self) -> Mapping[Any, Callable[..., Any]]:
        """The rule of each primitive: `rule(context, *operands)` gives its results."""

    @property
    def jaxpr_numbers(self) -> walk.Numbers:
        """The number of each jaxpr of the kernel, by which equations are known."""

    @property
    def keeps_lines(self) -> bool:
        """Whether operations carry the lines of their equations."""

    def constant(self, value: Any, dtype: Any) -> Any:
        """Returns a scalar that is known in advance."""

    def no_rule(self, eqn: _jax.JaxprEqn) -> errors.PallasGpuError:
        """Returns the error for a primitive without a rule."""


class Machine[PlanT: Plan, LaunchT: Launch, StateT: State](Protocol):
    """One kind of hardware, as the compilation pipeline sees it.

    Attributes:
      name: what the machine's targets call it.
      passes: the machine's own stages, by the name of the stage.
    """

    name: str
    passes: dict[str, Pass]

    def plan(self, params: CallParams, target: Any) -> PlanT:
        """Plans memory against the target's budgets.

        Raises:
          OutOfResources: the kernel does not fit.
        """

    def launch(self, params: CallParams, target: Any, plan: PlanT) -> LaunchT:
        """Returns the empty shell of the kernel."""

    def state(
        self, params: CallParams, target: Any, plan: PlanT, launch: LaunchT
    ) -> StateT:
        """Returns the state that the rules begin with; the launch is open."""

    def prologue(self, state: StateT) -> Sequence[Any]:
        """Emits what precedes the body; returns what its references have become."""

    def epilogue(self, state: StateT) -> None:
        """Emits what follows the body."""


@dataclasses.dataclass(frozen=True)
class Build:
    """A kernel on its way through the stages: what one hands to the next.

    The module is changed in place, and a stage reads what it needs out of it. Three
    things travel beside the module: the plan, since code may come to need scratch; the
    inferred layouts, which name values of this very module; and the launch, which knows
    what it has emitted once. A module that was read from a text goes without the
    launch: its prologue may then have another order.

    Attributes:
      params: the kernel primitive's parameters.
      target: what is compiled for.
      plan: from the stage `plan` on.
      module: from the stage `rules` on.
      launch: the launch that has built this module, if it is at hand.
      layouts: what the stage `layouts` has inferred, where it infers any.
      serialized: the module as bytes, from the stage `serialize` on.
      compiled: the machine's code and figures, from the stage `compile` on.
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
        """Returns the build with other fields."""
        return dataclasses.replace(self, **fields)


Pass = Callable[[Build], Build]

_MACHINES: dict[str, Machine] = {}


def register_machine(machine: Machine) -> None:
    """Makes a machine known to the compilation pipeline."""
    if machine.name in _MACHINES:
        raise errors.InternalError(f"two machines named {machine.name!r}")
    _MACHINES[machine.name] = machine


def machine_of(target: arch.Target) -> Machine:
    """Returns the machine that compiles for a target.

    Raises:
      TargetError: none does.
    """
    machine = _MACHINES.get(target.machine)
    if machine is None:
        raise errors.TargetError(
            f"no machine compiles for {target.name}",
            expected="a target of " + " or ".join(_MACHINES),
            got=f"a target of {target.machine!r}",
        )
    return machine
