# SPDX-License-Identifier: Apache-2.0
"""How a lowering rule enters the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.primitives._registry import RuleKind, register


def lane(primitive: Any) -> Callable[[Callable], Callable]:
    """Returns a decorator that enters a rule for Lane semantics.

    Args:
      primitive: a primitive, or the name of one of JAX's.
    """
    if isinstance(primitive, str):
        primitive = _jax.primitive_by_name(primitive)
    return register(primitive, RuleKind.LANE)
