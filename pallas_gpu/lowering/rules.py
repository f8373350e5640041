# SPDX-License-Identifier: Apache-2.0
"""Registration of lowering rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.network import UseKind
from pallas_gpu.primitives._registry import RuleKind, register

Decorator = Callable[[Callable], Callable]


def emits(primitive: Any) -> Decorator:
    """Returns a decorator that registers the rule which emits a primitive.

    Args:
      primitive: a primitive, or the name of a primitive of JAX.
    """
    return register(find_primitive(primitive), RuleKind.EMIT)


def relates(*primitives: Any) -> Decorator:
    """Returns a decorator that registers the layout relation of some primitives."""

    def enter(rule: Callable) -> Callable:
        for primitive in primitives:
            register(find_primitive(primitive), RuleKind.RELATION)(rule)
        return rule

    return enter


def used(node: Node, **kinds: UseKind) -> list[Any]:
    """The relation of an operation without arrays in registers.

    Args:
      node: the operation; its results are scalars.
      kinds: how it uses the parts of arrays in memory that are operands, by name.
    """
    for name, kind in kinds.items():
        node.use(node.part(node.operands[name]), kind)
    return [node.scalar(x, i) for i, x in enumerate(node.op.results)]


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
