# SPDX-License-Identifier: Apache-2.0
"""The SMEM of another CTA of the cluster, as a step on a reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClusterStep:
    """Moves a reference to the same array of another CTA; it selects no elements.

    Attributes:
      axes: cluster axes.
      positions: that of the CTA on each of them: integers or scalars. On the axes that
        are not named it is that of the executing CTA.
    """

    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    positions: tuple[Any, ...]

    @classmethod
    def at(cls, positions: Mapping[str, Any]) -> ClusterStep:
        """Returns the step to a position on some axes."""
        return cls(tuple(positions), tuple(positions.values()))


def split(steps: Sequence[Any]) -> tuple[tuple[Any, ...], ClusterStep | None]:
    """Returns the steps that select elements, and the one to another CTA or None.

    Of several positions on one axis the last one counts.
    """
    positions: dict[str, Any] = {}
    rest = []
    for step in steps:
        if isinstance(step, ClusterStep):
            positions |= dict(zip(step.axes, step.positions, strict=True))
        else:
            rest.append(step)
    return tuple(rest), ClusterStep.at(positions) if positions else None
