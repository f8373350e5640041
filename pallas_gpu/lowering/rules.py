# SPDX-License-Identifier: Apache-2.0
"""Registration of lowering rules.

A rule gets its context, then the operands of its operation: by name those of ours, and
of JAX's accesses to references; one by one those of others. What it has behind a `*`
are static parameters. It returns the results, or None where there are none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.emitters.control import predicated
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.inference.network import UseKind
from pallas_gpu.primitives._registry import GPU, RuleKind, register
from pallas_gpu.program.nodes import Fault

Decorator = Callable[[Callable], Callable]


def emits(
    primitive: Any, machine: str = GPU, **uses: UseKind | tuple[UseKind, str] | None
) -> Decorator:
    """Returns a decorator that registers the rule which emits a primitive.

    Args:
      primitive: a primitive, or the name of a primitive of JAX.
      machine: the machine for which the rule emits code.
      **uses: of an operation without arrays in registers how it uses the parts of
        arrays in memory that are operands, and their role: its relation. None in GMEM,
        whose layout is given.
    """
    found = find_primitive(primitive)

    def enter(rule: Callable) -> Callable:
        register(found, RuleKind.EMIT, machine)(_by_name(rule))
        if uses:
            relation = functools.wraps(rule)(lambda node, *_: _used(node, uses))
            register(found, RuleKind.RELATION, machine)(relation)
        return rule

    return enter


def emitted_by(primitive: Any, *emitters: Callable[..., None], **uses: Any) -> None:
    """Registers what emits a primitive without results, where nothing is to be decided.

    Its arguments are the operands and the parameters of their names, and attributes of
    the context; others have defaults. What has no argument `predicate` is emitted where
    that operand is true.

    Args:
      primitive: one of ours.
      *emitters: they follow each other.
      **uses: as those of `emits`.
    """
    wanted = [list(inspect.signature(emit).parameters) for emit in emitters]

    def rule(ctx: Any, *invals: Any) -> None:
        operands, params = ctx.operands(invals) or {}, ctx.op.params
        for emit, names in zip(emitters, wanted, strict=True):
            given = {}
            for name in names:
                if name in operands:
                    given[name] = ctx.argument(operands[name])
                elif name in params:
                    given[name] = params[name]
                elif hasattr(type(ctx), name):
                    given[name] = getattr(ctx, name)
            under = None if "predicate" in given else operands.get("predicate")
            with predicated(ctx.argument(under)):
                # By its name: tests replace emitters.
                getattr(inspect.getmodule(emit), emit.__name__)(**given)

    emits(primitive, **uses)(rule)


def relates(*primitives: Any) -> Decorator:
    """Returns a decorator that registers the layout relation of some primitives."""

    def enter(rule: Callable) -> Callable:
        for primitive in primitives:
            register(find_primitive(primitive), RuleKind.RELATION)(_by_name(rule))
        return rule

    return enter


def emits_and_relates(*primitives: Any) -> Decorator:
    """Returns a decorator that registers one function as the rules of both kinds.

    It is given a `RuleContext` with values, or a `Node` with symbols.
    """

    def enter(rule: Callable) -> Callable:
        for primitive in primitives:
            emits(primitive)(rule)
        return relates(*primitives)(rule)

    return enter


def _by_name(rule: Callable) -> Callable:
    """Returns a rule that is called with all operands of an operation, in order."""
    parameters = list(inspect.signature(rule).parameters.values())
    static = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    names = [p.name for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    if takes_all and not static:
        return rule

    @functools.wraps(rule)
    def called(on: Any, *operands: Any) -> Any:
        op = on.op
        if isinstance(op.operands, Fault):
            raise op.operands.error
        if isinstance(op.operands, dict) and not takes_all:
            operands = on.named(names, operands)
        return rule(on, *operands, **{name: op.params[name] for name in static})

    return called


def _used(node: Node, uses: Mapping[str, Any]) -> list[Any]:
    for name, kind in uses.items():
        if kind is not None:
            kind, role = kind if isinstance(kind, tuple) else (kind, "")
            node.use(node.part(node.operands[name]), kind, role=role)
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
