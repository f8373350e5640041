# SPDX-License-Identifier: Apache-2.0
"""Every primitive and every rule, JAX's primitives included.

A primitive of ours belongs to a family, the stem of its files in every room. A rule has
one of five kinds: how the emulator runs a primitive, how it is lowered under Lane and
under Warpgroup semantics; and, for the operations on arrays of the warpgroup-level
module, which layouts they permit (infer) and what they become (expand). The first three
are keyed by the primitive, the others by the MLIR operation's name. The completeness
test and the coverage table read this registry.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from pallas_gpu import _jax, errors


class RuleKind(enum.Enum):
    """What a rule is for."""

    EMULATE = "emulate"
    LANE = "lane"
    WARPGROUP = "warpgroup"
    INFER = "infer"
    EXPAND = "expand"

    @property
    def of_operations(self) -> bool:
        """True for rules of MLIR operations, false for rules of primitives."""
        return self in (RuleKind.INFER, RuleKind.EXPAND)


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

_TMEM_GAP = "tensor memory (Blackwell) is not lowered yet"
_TRIAL_GAP = "the trial of a body is erased before inference"

# Holes in the table, with the reason: by the name of a primitive or an MLIR operation,
# and the kind of rule. The list may only shrink.
KNOWN_GAPS: dict[tuple[str, RuleKind], str] = {
    **{
        (f"mosaic_gpu.{name}", RuleKind.EXPAND): _TMEM_GAP
        for name in (
            "async_load_tmem",
            "async_store_scales_smem_to_tmem",
            "async_store_smem_to_tmem",
            "async_store_sparse_metadata_smem_to_tmem",
            "async_store_tmem",
            "slice_tmem",
            "tcgen05_mma",
            "tmem_alloc",
            "tmem_layout_cast",
        )
    },
    ("scf.execute_region", RuleKind.INFER): _TRIAL_GAP,
    ("scf.execute_region", RuleKind.EXPAND): _TRIAL_GAP,
}


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


def register(key: Any, kind: RuleKind) -> Callable[[Callable], Callable]:
    """Returns a decorator that enters a rule; entering twice is an error.

    Args:
      key: a primitive, or the name of an MLIR operation for the kinds `INFER` and
        `EXPAND`.
      kind: what the rule is for.
    """
    if isinstance(key, str) is not kind.of_operations:
        raise errors.InternalError(
            f"{kind.value} rules are keyed by "
            f"{'names of MLIR operations' if kind.of_operations else 'primitives'}",
            got=repr(key),
        )

    def enter(rule: Callable) -> Callable:
        if key in _RULES[kind]:
            name = key if isinstance(key, str) else f"the primitive {key.name}"
            raise errors.InternalError(f"two {kind.value} rules for {name}")
        _RULES[kind][key] = rule
        return rule

    return enter


def rule(key: Any, kind: RuleKind) -> Callable[..., Any] | None:
    """Returns the rule of a primitive or an MLIR operation, or None."""
    return _RULES[kind].get(key)


def rules(kind: RuleKind) -> dict[Any, Callable[..., Any]]:
    """Returns all rules of one kind, those of JAX's primitives included."""
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
