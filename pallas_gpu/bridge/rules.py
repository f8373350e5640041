# SPDX-License-Identifier: Apache-2.0
"""The table of a received body's primitives: what each one becomes, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pallas_gpu import _jax, errors


class Evaluation(Protocol):
    """The evaluation of a body, as rules see it.

    Attributes:
      axes: for each axis that the author's body knows, its number on the whole grid,
        which `jax.vmap` may have extended.
    """

    @property
    def axes(self) -> tuple[int, ...]:
        """See above."""

    def evaluate(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr; returns its results."""


Rule = Callable[[Evaluation, _jax.JaxprEqn, list[Any]], list[Any]]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enters a function as the rule of the primitives with these names.

    Args:
      *names: names of primitives.

    Raises:
      InternalError: a name has a rule.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise errors.InternalError(
                    f"the primitive {name} of received bodies has two rules",
                    expected="one",
                    got=function.__name__,
                )
            RULES[name] = function
        return function

    return register
