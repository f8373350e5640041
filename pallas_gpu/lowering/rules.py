# SPDX-License-Identifier: Apache-2.0
"""How a lowering rule enters the registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.primitives._registry import RuleKind, register

Decorator = Callable[[Callable], Callable]


def lane(primitive: Any) -> Decorator:
    """Returns a decorator that enters a rule for Lane semantics.

    Args:
      primitive: a primitive, or the name of one of JAX's.
    """
    return register(find_primitive(primitive), RuleKind.LANE)


def warpgroup(primitive: Any) -> Decorator:
    """As `lane`, for Warpgroup semantics."""
    return register(find_primitive(primitive), RuleKind.WARPGROUP)


def uniform(primitive: Any) -> Decorator:
    """As `lane`, for both semantics: what touches no array has nothing to infer."""
    by_lane, by_warpgroup = lane(primitive), warpgroup(primitive)
    return lambda rule: by_lane(by_warpgroup(rule))


def infers(*names: str) -> Decorator:
    """Returns a decorator that enters the infer rule of some MLIR operations."""
    return _enter(RuleKind.INFER, names)


def expands(*names: str) -> Decorator:
    """Returns a decorator that enters the expand rule of some MLIR operations."""
    return _enter(RuleKind.EXPAND, names)


def _enter(kind: RuleKind, names: Sequence[str]) -> Decorator:
    def enter(rule: Callable) -> Callable:
        for name in names:
            register(name, kind)(rule)
        return rule

    return enter


def find_primitive(primitive: Any) -> Any:
    """Returns a primitive, or that of JAX's with a name.

    Raises:
      InternalError: JAX has none of that name.
    """
    if not isinstance(primitive, str):
        return primitive
    try:
        return _jax.primitive_by_name(primitive)
    except KeyError:
        raise errors.InternalError(f"JAX has no primitive {primitive!r}") from None
