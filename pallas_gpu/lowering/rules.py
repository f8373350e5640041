# SPDX-License-Identifier: Apache-2.0
"""Registration of lowering rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.primitives._registry import RuleKind, register

Decorator = Callable[[Callable], Callable]


def lane(primitive: Any) -> Decorator:
    """Returns a decorator that registers a rule for Lane semantics.

    Args:
      primitive: a primitive, or the name of a primitive of JAX.
    """
    return register(find_primitive(primitive), RuleKind.LANE)


def warpgroup(primitive: Any) -> Decorator:
    """As `lane`, for Warpgroup semantics."""
    return register(find_primitive(primitive), RuleKind.WARPGROUP)


def uniform(primitive: Any) -> Decorator:
    """As `lane`, for both semantics: for rules that do not depend on layouts."""
    by_lane, by_warpgroup = lane(primitive), warpgroup(primitive)
    return lambda rule: by_lane(by_warpgroup(rule))


def relates(*primitives: Any) -> Decorator:
    """Returns a decorator that registers the layout relation of some primitives."""

    def enter(rule: Callable) -> Callable:
        for primitive in primitives:
            register(find_primitive(primitive), RuleKind.RELATION)(rule)
        return rule

    return enter


def infers(*names: str) -> Decorator:
    """Returns a decorator that registers the infer rule of MLIR operations."""
    return _enter(RuleKind.INFER, names)


def expands(*names: str) -> Decorator:
    """Returns a decorator that registers the expand rule of MLIR operations."""
    return _enter(RuleKind.EXPAND, names)


def _enter(kind: RuleKind, names: Sequence[str]) -> Decorator:
    def enter(rule: Callable) -> Callable:
        for name in names:
            register(name, kind)(rule)
        return rule

    return enter


def find_primitive(primitive: Any) -> Any:
    """Returns a primitive, looked up by name if it is one of JAX.

    Raises:
      InternalError: JAX has no primitive of that name.
    """
    if not isinstance(primitive, str):
        return primitive
    try:
        return _jax.primitive_by_name(primitive)
    except KeyError:
        raise errors.InternalError(f"JAX has no primitive {primitive!r}") from None
