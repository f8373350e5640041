# SPDX-License-Identifier: Apache-2.0
"""A kernel between two stages of the compilation pipeline, and the machines' stages.

A machine is a name, which its targets have, and the stages that it implements: it plans
memory, lowers the operations by its rules, and processes the module. `launch.py` has
those of NVIDIA GPUs; another machine registers its own without changes to the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pallas_gpu import arch, errors
from pallas_gpu.entry.call import CallParams
from pallas_gpu.primitives import _registry as registry


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

_MACHINES: dict[str, dict[str, Pass]] = {}


def register_machine(name: str, **passes: Pass) -> None:
    """Registers a machine with the compilation pipeline.

    Args:
      name: the value of `machine` in its targets.
      **passes: the stages of `compiler.STAGES` that it implements.
    """
    if name in _MACHINES:
        raise errors.InternalError(f"two machines named {name!r}")
    _MACHINES[name] = passes


def add_passes(name: str, **passes: Pass) -> None:
    """Adds the stages of a machine that process the finished module."""
    _MACHINES[name].update(passes)


def passes_of(target: arch.Target) -> Mapping[str, Pass]:
    """Returns the stages of the machine that compiles for a target.

    Raises:
      TargetError: there is none.
    """
    registry.needed(target.machine)
    if target.machine not in _MACHINES:
        raise errors.TargetError(
            f"no machine compiles for {target.name}",
            expected="a target of " + " or ".join(_MACHINES),
            got=f"a target of {target.machine!r}",
        )
    return _MACHINES[target.machine]
