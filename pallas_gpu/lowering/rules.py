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


def relates_uses(*primitives: Any, **kinds: UseKind) -> None:
    """Registers the relation of primitives without arrays in registers.

    Args:
      primitives: their results are scalars.
      kinds: how they use the parts of arrays in memory that are operands, by name.
    """

    def relate(node: Node, *_: Any) -> list[Any]:
        for name, kind in kinds.items():
            node.use(node.part(node.operands[name]), kind)
        return [node.scalar(x, i) for i, x in enumerate(node.op.results)]

    relates(*primitives)(relate)


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
