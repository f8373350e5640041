# SPDX-License-Identifier: Apache-2.0
"""The registry of operations, including JAX's: their properties and their rules.

`define` creates a primitive of ours and declares the properties of the operation: its
family, the threads that can issue it, its reads and writes, the required features.
Checks, the choice of fences and the coverage table are derived from them. There are
four kinds of rules for a primitive: how the emulator executes it, how the compiler
emits it, which layouts of arrays it admits (its relation), and by what other primitives
it is replaced (a composite). The completeness test and the coverage table read this
registry. Each machine has operations, rules and checks of its own.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal

import jax

from pallas_gpu import _jax, arch, errors


class RuleKind(enum.Enum):
    """The kinds of rules.

    A primitive of JAX has either a composite rule, which replaces it by others, or a
    rule that emits it.
    """

    EMULATE = "emulate"
    EMIT = "emit"
    RELATION = "relation"
    COMPOSITE = "composite"

    # That of `Enum` is a function in Python: a kernel looks up thousands of rules.
    __hash__ = object.__hash__


class KernelEffect(_jax.Effect):
    """Keeps a primitive that accesses state: JAX drops primitives without effects."""

    def __str__(self) -> str:
        return "kernel"

    def __eq__(self, other):
        return isinstance(other, KernelEffect)

    def __hash__(self):
        return hash(KernelEffect)


KERNEL_EFFECT = KernelEffect()
_jax.allow_effect_in_control_flow(KernelEffect)


Proxy = Literal["generic", "async"]
GPU = "gpu"  # the machine of operations and rules that name none


@dataclasses.dataclass(frozen=True)
class Operation:
    """The properties of an operation, as declared by `define` or `describe`.

    Attributes:
      family: name of its files in every package.
      called: its name in messages; by default that of the primitive.
      by_warp: whether one warp can issue it, inside `warp_map`; a warpgroup always can.
      reads: names of the operands whose memory it reads. An access to a barrier's state
        also counts.
      writes: names of the operands whose memory it writes.
      clipped: names of the operands whose part may exceed the array.
      remote: names of the operands that may be in another device's memory.
      multicast: names of the operands that may be in the memory of all devices.
      atomic: whether its accesses are atomic.
      asynchronous: whether it returns before its accesses are complete.
      proxies: who accesses memory (PTX ISA, "Proxies"): threads, through the generic
        proxy, or the async proxy. Default: threads, or for an asynchronous operation
        the async proxy.
      releases: whether it signals to others that its issuer is done with what it has
        accessed. Of an operation with a parameter `sem`, that says so.
      waits: whether its issuer goes on when others have done something; a profile has
        it as a span.
      feature: the feature that the target must have.
      needs: yields what else an operation (`program.nodes.Op`) needs by its operands
        and parameters: features, and who needs them.
      observable: whether the user may see it without any result of the kernel: it
        prints, or ends the program.
      opaque: whether its accesses are only what it may do: nobody knows what it does.
    """

    primitive: Any
    family: str
    called: str = ""
    by_warp: bool = True
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    clipped: tuple[str, ...] = ()
    remote: tuple[str, ...] = ()
    multicast: tuple[str, ...] = ()
    atomic: bool = False
    asynchronous: bool = False
    proxies: tuple[Proxy, ...] = ()
    releases: bool = False
    waits: bool = False
    feature: arch.Feature | None = None
    needs: Callable[[Any], Iterator[tuple[arch.Feature, str]]] | None = None
    observable: bool = False
    opaque: bool = False
    machine: str = GPU

    def __post_init__(self) -> None:
        if not self.proxies:
            proxy: Proxy = "async" if self.asynchronous else "generic"
            object.__setattr__(self, "proxies", (proxy,))
        if not self.family.isidentifier():
            raise self._invalid(
                "its family is not a module's name", "a module's name", self.family
            )
        for names in (self.reads, self.writes):
            if isinstance(names, str) or len(set(names)) < len(names):
                raise self._invalid("not a list of operands", "different names", names)
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

    @functools.cached_property
    def accesses(self) -> tuple[str, ...]:
        """Names of the operands whose memory it reads or writes."""
        return tuple(dict.fromkeys((*self.reads, *self.writes)))

    def features(self, op: Any) -> Iterator[tuple[arch.Feature, str]]:
        """Yields the features that the target must have, and who needs them."""
        if self.feature is not None and not op.params.get("if_supported", False):
            yield self.feature, self.name
        if self.needs is not None:
            yield from self.needs(op)

    @property
    def copies(self) -> bool:
        """Whether it copies a part of memory, `src`, to another one, `dst`."""
        return "src" in self.reads and "dst" in self.writes


# Our operations on each machine, and those of JAX that access memory, by name.
MACHINES: defaultdict[str, dict[str, Operation]] = defaultdict(dict)
PRIMITIVES = MACHINES[GPU]
JAX_PRIMITIVES: dict[str, Operation] = {}
_OPERATIONS: dict[Any, Operation] = {}
_RULES: defaultdict[tuple[str, RuleKind], dict[Any, Callable[..., Any]]]
_RULES = defaultdict(dict)


def define(
    name: str,
    family: str,
    *,
    result: Callable[..., Any] | None = None,
    results: Callable[..., list[Any]] | None = None,
    **properties: Any,
) -> Any:
    """Creates a primitive of ours and registers the properties of its operation.

    It has an effect, which keeps JAX from dropping it, unless it only computes its
    result.

    Args:
      name: the public function's name.
      family: name of its files in every package.
      result: maps the pytree of the operands' types, and the parameters, to the type of
        the result; None for an operation without a result.
      results: for an operation with several results, maps the types of the operands,
        one by one, to the list of the results' types.
      **properties: the other fields of `Operation`: called, by_warp, reads, writes,
        clipped, remote, multicast, atomic, asynchronous, proxies, releases, waits,
        feature, needs, observable, opaque, machine.

    Raises:
      InternalError: the name is defined twice, or the properties contradict each other.
    """
    own = MACHINES[properties.get("machine", GPU)]
    if name in own:
        raise errors.InternalError(f"the primitive {name} is defined twice")
    primitive = _jax.Primitive(name)
    primitive.multiple_results = result is None
    primitive.def_impl(lambda *_, **__: _outside_of_a_kernel(name))
    refuse_vmap(primitive)
    operation = Operation(primitive, family, **properties)
    _define_types(operation, result, results)
    own[name] = _OPERATIONS[primitive] = operation
    return primitive


def _define_types(
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


def describe(primitive: Any, family: str, **properties: Any) -> None:
    """Registers the properties of a primitive of JAX that accesses memory."""
    if primitive in _OPERATIONS:
        raise errors.InternalError(f"the primitive {primitive.name} is described twice")
    operation = Operation(primitive, family, **properties)
    JAX_PRIMITIVES[primitive.name] = _OPERATIONS[primitive] = operation


def operation(primitive: Any) -> Operation | None:
    """Returns the operation of a primitive; None for JAX's operations on values."""
    return _OPERATIONS.get(primitive)


def called(primitive: Any) -> str:
    """Returns what an operation is called in messages."""
    found = operation(primitive)
    return (found and found.called) or primitive.name


def register(
    key: Any, kind: RuleKind, machine: str = GPU
) -> Callable[[Callable], Callable]:
    """Returns a decorator that registers a rule; registering twice is an error."""

    def enter(rule: Callable) -> Callable:
        own = _RULES[machine, kind]
        if key in own:
            raise errors.InternalError(
                f"two {kind.value} rules for the primitive {key.name}"
            )
        own[key] = rule
        return rule

    return enter


# The modules that register something when they are imported, by what that is.
_REGISTERED_BY: dict[Hashable, str] = {}


def registered_by(module: str, *what: Hashable) -> None:
    """Declares what a module registers; it is imported when that is first needed."""
    _REGISTERED_BY.update(dict.fromkeys(what, module))


def needed(what: Hashable) -> None:
    """Imports the module that registers something, unless it was imported."""
    module = _REGISTERED_BY.get(what)
    if module is not None:
        importlib.import_module(module)
        # Not before: another thread must wait for the import, too.
        _REGISTERED_BY.pop(what, None)


_CHECKS: dict[tuple[str, Any], Callable[..., None]] = {}


def checks(*primitives: Any, machine: str = GPU) -> Callable[[Callable], Callable]:
    """Returns a decorator that registers a check of an operation: `check(op, mesh)`.

    It gets a `program.nodes.Op` whose references are in bounds.
    """

    def enter(check: Callable) -> Callable:
        for primitive in primitives:
            if (machine, primitive) in _CHECKS:
                raise errors.InternalError(f"two checks for the primitive {primitive}")
            _CHECKS[machine, primitive] = check
        return check

    return enter


ProgramCheck = Callable[[Any], None]
# Each gets all operations of a kernel, as `program.walk.Site`s.
PROGRAM_CHECKS: list[ProgramCheck] = []


def checks_program(check: ProgramCheck) -> ProgramCheck:
    """Registers a check of all operations together: `check(sites)`."""
    PROGRAM_CHECKS.append(check)
    return check


def check_of(primitive: Any, machine: str = GPU) -> Callable[..., None] | None:
    """Returns the check of a primitive's operations, or None."""
    return _CHECKS.get((machine, primitive))


def rule(key: Any, kind: RuleKind, machine: str = GPU) -> Callable[..., Any] | None:
    """Returns the rule of a primitive, or None."""
    needed(kind)
    return _RULES[machine, kind].get(key)


def rules(kind: RuleKind, machine: str = GPU) -> dict[Any, Callable[..., Any]]:
    """Returns all rules of one kind, those of JAX's primitives included."""
    needed(kind)
    return _RULES[machine, kind]


def _outside_of_a_kernel(name: str) -> None:
    raise errors.KernelError(
        f"{name} is called outside a kernel",
        expected="a call from a body that kernel() or pallas_call() traces",
        got="a call outside a body",
        hint="move the call into the body",
        where=_jax.where_now(),
    )


def refuse_vmap(
    primitive: Any,
    name: str | None = None,
    instead: str = "write the loop with plgpu.loop",
) -> None:
    """Makes `jax.vmap` inside a kernel an error where it reaches a primitive."""
    name = name or primitive.name

    def batch(*_, **__):
        raise errors.UnsupportedError(
            f"jax.vmap inside a kernel reached {name}",
            expected="vmap of pure computations inside a body",
            got=f"a batched operand of {name}",
            hint=f"vmap the whole kernel instead, or {instead}",
        )

    _jax.batching.fancy_primitive_batchers[primitive] = batch
