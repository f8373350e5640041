# SPDX-License-Identifier: Apache-2.0
"""What any target says of itself: its name, its machine, its budgets, its features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Target(Protocol):
    """What a kernel is compiled for; each machine has a class of its own.

    A target is an explicit argument all the way down. What depends on the machine's
    kind of hardware stands in the machine's class, as in `arch.GpuTarget`.
    """

    @property
    def name(self) -> str:
        """The compiler's name of the target, e.g. `sm_90a`."""

    @property
    def machine(self) -> str:
        """The machine, whose planner, launch and rules compile for the target."""

    @property
    def budgets(self) -> Mapping[str, int]:
        """What one instance of a kernel may use at most, by resource and unit."""

    @property
    def features(self) -> frozenset[Any]:
        """What the hardware can do."""

    def has(self, feature: Any) -> bool:
        """True when the target has the feature."""

    def require(self, feature: Any, who: str) -> None:
        """Raises TargetError unless the target has the feature."""
