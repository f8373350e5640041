# SPDX-License-Identifier: Apache-2.0
"""Every operation, what is true of it, and every rule, JAX's operations included.

`define` makes a primitive of ours and says everything that is true of the operation:
its family, who can issue it, what it reads and writes, what the target must have.
Checks, the choice of fences and the coverage table follow from that. A rule has
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

import jax

from pallas_gpu import _jax, arch, errors


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


# Who can issue an operation: a whole warpgroup, or one warp inside of `warp_map`.
SCOPES = ("warpgroup", "warp")


@dataclasses.dataclass(frozen=True)
class Operation:
    """What is true of an operation, said where it is defined.

    Attributes:
      primitive: what it binds.
      family: stem of its files in every room.
      scopes: who can issue it, of `SCOPES`.
      reads: names of the operands whose memory it reads. An access of a barrier's state
        counts too.
      writes: names of the operands whose memory it writes.
      atomic: whether its accesses are atomic.
      asynchronous: whether it returns before its accesses are complete.
      feature: what the target must have.
    """

    primitive: Any
    family: str
    scopes: tuple[str, ...] = ("warpgroup",)
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    atomic: bool = False
    asynchronous: bool = False
    feature: arch.Feature | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.scopes) - set(SCOPES))
        if unknown or not self.scopes or len(set(self.scopes)) < len(self.scopes):
            raise self._invalid("no such scopes", f"some of {SCOPES}", self.scopes)
        if not self.family.isidentifier():
            raise self._invalid("its family is no stem", "a module's name", self.family)
        for names in (self.reads, self.writes):
            if isinstance(names, str) or len(set(names)) < len(names):
                raise self._invalid("no list of operands", "different names", names)
        accesses = self.reads or self.writes
        if (self.atomic or self.asynchronous) and not accesses:
            raise self._invalid(
                "it is atomic or asynchronous and accesses nothing",
                "names of operands in reads or writes",
                "none",
            )
        if self.atomic and not self.writes:
            raise self._invalid("it is atomic and writes nothing", "writes=...", "none")

    def _invalid(self, what: str, expected: str, got: Any) -> errors.InternalError:
        return errors.InternalError(
            f"define {self.name}: {what}", expected=expected, got=repr(got)
        )

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name

    @property
    def accesses(self) -> tuple[str, ...]:
        """Names of the operands whose memory it reads or writes."""
        return tuple(dict.fromkeys((*self.reads, *self.writes)))


# Operations of ours, and those of JAX that are more than a computation, by name.
PRIMITIVES: dict[str, Operation] = {}
JAX_PRIMITIVES: dict[str, Operation] = {}
_OPERATIONS: dict[Any, Operation] = {}
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


def define(
    name: str,
    family: str,
    *,
    result: Callable[..., Any] | None = None,
    results: Callable[..., list[Any]] | None = None,
    **facts: Any,
) -> Any:
    """Makes a primitive of ours and enters what is true of it into the registry.

    It has an effect, which keeps JAX from dropping it, unless all it does is to compute
    its result.

    Args:
      name: the public function's name.
      family: stem of its files in every room.
      result: gives the type of the result from the pytree of the operands' types and
        the parameters; None for an operation without a result.
      results: for an operation with several results, the list of their types, from the
        types of the operands one by one.
      **facts: the other fields of `Operation`: scopes, reads, writes, atomic,
        asynchronous, feature.

    Raises:
      InternalError: the name is taken, or the facts contradict each other.
    """
    if name in PRIMITIVES:
        raise errors.InternalError(f"the primitive {name} is defined twice")
    primitive = _jax.Primitive(name)
    primitive.multiple_results = result is None
    primitive.def_impl(lambda *_, **__: _outside_of_a_kernel(name))
    _jax.batching.fancy_primitive_batchers[primitive] = _refuse_vmap(name)
    operation = Operation(primitive, family, **facts)
    _give_types(operation, result, results)
    PRIMITIVES[name] = _OPERATIONS[primitive] = operation
    return primitive


def _give_types(
    operation: Operation,
    result: Callable[..., Any] | None,
    results: Callable[..., list[Any]] | None,
) -> None:
    effects = {KERNEL_EFFECT}
    primitive = operation.primitive
    if results is not None:
        primitive.def_effectful_abstract_eval(
            lambda *avals, **params: (results(*avals, **params), effects)
        )
    elif result is None:
        primitive.def_effectful_abstract_eval(lambda *_, **__: ([], effects))
    else:

        def type_of(*avals: Any, tree: Any, **params: Any) -> Any:
            return result(jax.tree.unflatten(tree, avals), **params)

        if operation.accesses:
            primitive.def_effectful_abstract_eval(
                lambda *avals, **params: (type_of(*avals, **params), effects)
            )
        else:
            primitive.def_abstract_eval(type_of)


def describe(primitive: Any, family: str, **facts: Any) -> None:
    """Enters what is true of a primitive of JAX's that accesses memory.

    Args:
      primitive: the primitive.
      family: stem of its files, or of the group of operations it belongs to.
      **facts: the other fields of `Operation`. A single warp may issue it unless
        `scopes` says otherwise: JAX's operations on scalars are code of a thread.
    """
    if primitive in _OPERATIONS:
        raise errors.InternalError(f"the primitive {primitive.name} is described twice")
    operation = Operation(primitive, family, **{"scopes": SCOPES, **facts})
    JAX_PRIMITIVES[primitive.name] = _OPERATIONS[primitive] = operation


def operation(primitive: Any) -> Operation | None:
    """Returns what is true of a primitive; None for JAX's on values."""
    return _OPERATIONS.get(primitive)


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


_CHECKS: dict[Any, Callable[..., None]] = {}


def checks(*primitives: Any) -> Callable[[Callable], Callable]:
    """Returns a decorator that enters a check of equations: `check(eqn, mesh)`.

    It replaces the check that all operations have: that the references among their
    operands stay inside of their arrays.
    """

    def enter(check: Callable) -> Callable:
        for primitive in primitives:
            if primitive in _CHECKS:
                raise errors.InternalError(f"two checks for the primitive {primitive}")
            _CHECKS[primitive] = check
        return check

    return enter


def check_of(primitive: Any) -> Callable[..., None] | None:
    """Returns the check of a primitive's equations, or None."""
    return _CHECKS.get(primitive)


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
