# SPDX-License-Identifier: Apache-2.0
"""How a lowering rule enters the registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.primitives._registry import RuleKind, register

Decorator = Callable[[Callable], Callable]


def lane(primitive: Any) -> Decorator:
    """Returns a decorator that enters a rule for Lane semantics.

    Args:
      primitive: a primitive, or the name of one of JAX's.
    """
    return register(_primitive(primitive), RuleKind.LANE)


def warpgroup(primitive: Any) -> Decorator:
    """As `lane`, for Warpgroup semantics."""
    return register(_primitive(primitive), RuleKind.WARPGROUP)


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


def _primitive(primitive: Any) -> Any:
    if isinstance(primitive, str):
        return _jax.primitive_by_name(primitive)
    return primitive
