# SPDX-License-Identifier: Apache-2.0
"""The interface of all targets: name, machine, budgets, features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Target(Protocol):
    """A compilation target; each machine has a class of its own.

    A target is an explicit argument of every stage. Attributes that are specific to a
    machine belong to the machine's class, e.g. `arch.GpuTarget`.
    """

    @property
    def name(self) -> str:
        """The compiler's name of the target, e.g. `sm_90a`."""

    @property
    def machine(self) -> str:
        """The machine, which provides planner, launch and rules for the target."""

    @property
    def budgets(self) -> Mapping[str, int]:
        """The limits of one instance of a kernel, by resource and unit."""

    @property
    def features(self) -> frozenset[Any]:
        """The features of the hardware."""

    def has(self, feature: Any) -> bool:
        """True if the target has the feature."""

    def require(self, feature: Any, who: str) -> None:
        """Raises TargetError unless the target has the feature."""
