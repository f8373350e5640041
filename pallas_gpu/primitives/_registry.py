# SPDX-License-Identifier: Apache-2.0
"""Every primitive and every rule, JAX's primitives included.

A primitive of ours belongs to a family, the stem of the files that speak of it. A rule
is found by (primitive, kind), where the kind says who uses it: the emulator, or the
lowering under Lane or Warpgroup semantics. The completeness test and the coverage table
read this registry.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from pallas_gpu import _jax, errors


class RuleKind(enum.Enum):
    """Who uses a rule."""

    EMULATE = "emulate"
    LANE = "lane"
    WARPGROUP = "warpgroup"


class KernelEffect(_jax.Effect):
    """Keeps a primitive that touches state: JAX drops what has no effect."""

    def __str__(self) -> str:
        return "kernel"

    def __eq__(self, other):
        return isinstance(other, KernelEffect)

    def __hash__(self):
        return hash(KernelEffect)


KERNEL_EFFECT = KernelEffect()
_jax.allow_effect_in_control_flow(KernelEffect)


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the registry knows of one primitive of ours."""

    primitive: Any
    family: str


PRIMITIVES: dict[str, Entry] = {}
_RULES: dict[RuleKind, dict[Any, Callable[..., Any]]] = {kind: {} for kind in RuleKind}

# Holes in the table primitive x rule kind, with the reason. It may only shrink.
KNOWN_GAPS: dict[tuple[str, RuleKind], str] = {}


def define(name: str, family: str, *, multiple_results: bool = False) -> Any:
    """Makes a primitive of ours and enters it into the registry.

    Args:
      name: the public function's name.
      family: stem of the files that speak of it.
      multiple_results: whether it binds to a list.
    """
    if name in PRIMITIVES:
        raise errors.InternalError(f"the primitive {name} is defined twice")
    primitive = _jax.Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(lambda *_, **__: _outside_of_a_kernel(name))
    _jax.batching.fancy_primitive_batchers[primitive] = _refuse_vmap(name)
    PRIMITIVES[name] = Entry(primitive, family)
    return primitive


def register(primitive: Any, kind: RuleKind) -> Callable[[Callable], Callable]:
    """Returns a decorator that enters a rule; entering twice is an error."""

    def enter(rule: Callable) -> Callable:
        if primitive in _RULES[kind]:
            raise errors.InternalError(
                f"two {kind.value} rules for the primitive {primitive.name}"
            )
        _RULES[kind][primitive] = rule
        return rule

    return enter


def rule(primitive: Any, kind: RuleKind) -> Callable[..., Any] | None:
    """Returns the rule, or None."""
    return _RULES[kind].get(primitive)


def rules(kind: RuleKind) -> dict[Any, Callable[..., Any]]:
    """Returns all rules of one kind, JAX's primitives included."""
    return _RULES[kind]


def _outside_of_a_kernel(name: str) -> None:
    raise errors.KernelError(
        f"{name} is called outside of a kernel",
        expected="a call from a body that kernel() or pallas_call() traces",
        got="a call while no body is traced",
        hint="move the call into the body",
        where=_jax.where_now(),
    )


def _refuse_vmap(name: str) -> Callable[..., Any]:
    def batch(*_, **__):
        raise errors.UnsupportedError(
            f"jax.vmap inside a kernel reached {name}",
            expected="vmap of pure computations inside a body",
            got=f"a batched operand of {name}",
            hint="vmap the whole kernel instead, or write the loop with plgpu.loop",
            where=_jax.where_now(),
        )

    return batch
