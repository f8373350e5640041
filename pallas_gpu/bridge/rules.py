# SPDX-License-Identifier: Apache-2.0
"""The table of a received body's primitives: what each one becomes, by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.program.rewrite import Retrace


class Evaluation(Retrace):
    """The evaluation of a body, as rules see it.

    Args:
      axes: for each axis that the author's body knows, its number on the whole grid,
        which `jax.vmap` may have extended.
    """

    def __init__(self, axes: tuple[int, ...] = ()):
        self.axes = axes


Rule = Callable[[Any, _jax.JaxprEqn, list[Any]], list[Any]]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enters a function as the rule of the primitives with these names.

    Args:
      *names: names of primitives.
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
