# SPDX-License-Identifier: Apache-2.0
"""The interface of all targets: name, machine, budgets, features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from pallas_gpu import errors


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


class Featured:
    """What a target says of its features, by their set.

    Attributes:
      name: the target's.
      features: what it has.
    """

    name: str
    features: frozenset[Any]

    @property
    def others(self) -> Iterable[Featured]:
        """All targets of the machine."""
        raise NotImplementedError

    @property
    def described(self) -> str:
        """The target, for messages."""
        return self.name

    def has(self, feature: Any) -> bool:
        """True if the target has the feature."""
        return feature in self.features

    def require(self, feature: Any, who: str) -> None:
        """Raises TargetError unless the target has the feature.

        Args:
          feature: the required feature.
          who: the operation that requires it; the message starts with it.
        """
        if self.has(feature):
            return
        owners = ", ".join(t.name for t in self.others if t.has(feature))
        raise errors.TargetError(
            f"{who} needs {feature.value}, which {self.name} does not have",
            expected=f"one of the targets {owners}",
            got=self.described,
            hint=f"choose another target, or avoid {who}",
        )
