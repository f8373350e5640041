# SPDX-License-Identifier: Apache-2.0
"""Composites: operations of JAX that the compiler replaces by others before it plans.

A family of `composites/` registers a rule with `composite`: a function of JAX values,
which is traced for the types of an equation. The equation becomes a call of that
function. A rule may use everything that a kernel may: references, scopes, products.

Planner, checks and lowering see the expanded body; the emulator evaluates the original
one and takes only the memory plan from the expanded one. So what a rule computes is
compared with JAX wherever the emitted code is.

A rule is given values. A family that can do without some of them rewrites the bodies
first, with `prepares`: it may give its equations references as operands, in place of
values that are loaded from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_gpu import _jax, arch, errors, resources, types
from pallas_gpu.checks.equations import check_jaxpr
from pallas_gpu.entry import scope
from pallas_gpu.entry.call import CallParams
from pallas_gpu.layouts.registers.linear import THREADS, WARP_LANES
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.program.bodies import bodies, equations, kept
from pallas_gpu.program.rewrite import Rewrite, at_line_of, call_of
from pallas_gpu.program.walk import walk


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the rules know about the kernel whose body is expanded.

    Attributes:
      mesh: the launch.
      stored: shapes and types of the arrays in SMEM that threads store to.
      staging_bytes: SMEM that each of several warpgroups has for copies of operands;
        None for as much as they take.
      in_warp: whether the body is that of a `warp_map`.
    """

    mesh: types.Mesh
    target: arch.Target
    semantics: types.LoweringSemantics
    stored: frozenset[Any] = frozenset()
    staging_bytes: int | None = None
    in_warp: bool = False

    @property
    def threads(self) -> int:
        """The number of threads that execute the body together."""
        return WARP_LANES if self.in_warp else THREADS


@dataclasses.dataclass(frozen=True)
class Composite:
    """What a rule knows about the equation that it replaces.

    Attributes:
      params: the equation's parameters.
      out_avals: the types of its results.
    """

    params: Mapping[str, Any]
    out_avals: tuple[Any, ...]
    kernel: Kernel

    @property
    def out_aval(self) -> Any:
        """The type of the only result."""
        (aval,) = self.out_avals
        return aval


Rule = Callable[..., Any]
_Condition = Callable[[_jax.JaxprEqn], bool]
_CONDITIONS: dict[Any, _Condition] = {}


def composite(*names: str, when: _Condition | None = None) -> Callable[[Rule], Rule]:
    """Returns a decorator that registers the rule of one or more primitives of JAX.

    It is called as `rule(composite, *operands)` with a `Composite` and JAX values, and
    returns a value, or a sequence of values for several results. Equations for which
    `when` does not hold are lowered by the rules of their family.
    """

    def enter(rule: Rule) -> Rule:
        for name in names:
            primitive = _jax.primitive_by_name(name)
            registry.register(primitive, registry.RuleKind.COMPOSITE)(rule)
            if when is not None:
                _CONDITIONS[primitive] = when
        return rule

    return enter


Preparation = Callable[[_jax.Jaxpr, Kernel], _jax.Jaxpr]
_PREPARATIONS: list[Preparation] = []


def prepares(rewrite: Preparation) -> Preparation:
    """Registers `rewrite(jaxpr, kernel)`, which each body passes before expansion.

    It returns the jaxpr itself, or one in which equations of composites have other
    parameters and operands, references among them. Only their rules see these.
    """
    _PREPARATIONS.append(rewrite)
    return rewrite


def expanded(params: CallParams, target: arch.Target) -> CallParams:
    """Returns a kernel whose body has no composites; checks what their rules use."""
    mesh, semantics = params.mesh, params.compiler_params.lowering_semantics
    if not _has_composites(params.jaxpr):
        return params
    of_staging = functools.partial(_expanded, params.jaxpr, mesh, target, semantics)
    body = of_staging(None)
    if (
        isinstance(target, arch.GpuTarget)
        and mesh.warpgroups > 1
        and resources.staging_bytes(body, target, mesh.warpgroups) < 0
    ):
        # Copies of a warpgroup's products follow each other in the same bytes: each
        # product whose copies fit by themselves has them.
        left = resources.staging_bytes(of_staging(0), target, mesh.warpgroups)
        body = of_staging(max(left, 0))
    return params.with_body(body)


def planned(params: CallParams, target: arch.GpuTarget) -> resources.Plan:
    """Plans the memory of a kernel without its composites.

    Raises:
      OutOfResources: the kernel does not fit the target.
    """
    scratch_bytes = params.compiler_params.reduction_scratch_bytes
    body, warpgroups = expanded(params, target).jaxpr, params.mesh.warpgroups
    return resources.plan(body, target, params.name, scratch_bytes, warpgroups)


@kept
def _has_composites(jaxpr: _jax.Jaxpr) -> bool:
    return any(map(_rule_of, equations(jaxpr)))


@kept
def _expanded(
    jaxpr: _jax.Jaxpr,
    mesh: types.Mesh,
    target: arch.Target,
    semantics: types.LoweringSemantics,
    staging_bytes: int | None,
) -> _jax.Jaxpr:
    kernel = Kernel(mesh, target, semantics, _stored_in_smem(jaxpr), staging_bytes)
    result = _Expansion(kernel).body(jaxpr)
    check_jaxpr(result, mesh)
    return result


def _stored_in_smem(jaxpr: _jax.Jaxpr) -> frozenset[Any]:
    found = (
        access.buffer.aval
        for site in walk(jaxpr)
        for access in site.op.accesses
        if access.writes and not access.operation.asynchronous
    )
    return frozenset(
        (tuple(aval.shape), aval.dtype)
        for aval in found
        if aval.memory_space is types.SMEM
    )


def _rule_of(eqn: _jax.JaxprEqn) -> Rule | None:
    applies = _CONDITIONS.get(eqn.primitive)
    if applies is not None and not applies(eqn):
        return None
    return registry.rule(eqn.primitive, registry.RuleKind.COMPOSITE)


class _Expansion(Rewrite):
    """The expansion of one body."""

    def __init__(self, kernel: Kernel):
        super().__init__()
        self._kernel = kernel
        # Calls that replace equations, by what determines them.
        self._calls: dict[Any, _jax.JaxprEqn] = {}
        # Parameters are compared by identity, as long as their equations live.
        self._prepared: list[_jax.Jaxpr] = []

    @functools.cached_property
    def _in_warps(self) -> _Expansion:
        return _Expansion(dataclasses.replace(self._kernel, in_warp=True))

    def within(self, eqn: _jax.JaxprEqn) -> Rewrite:
        return self._in_warps if eqn.primitive is warp_map_p else self

    def key(self, jaxpr: _jax.Jaxpr, caller: _jax.JaxprEqn | None) -> Any:
        # What replaces equations without a line has the line of the caller.
        return jaxpr, None if caller is None else _jax.where(caller)

    def prepared(self, jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        for rewrite in _PREPARATIONS:
            jaxpr = rewrite(jaxpr, self._kernel)
        self._prepared.append(jaxpr)
        return jaxpr

    def replacement(
        self, eqn: _jax.JaxprEqn, caller: _jax.JaxprEqn | None
    ) -> list[_jax.JaxprEqn] | None:
        rule = _rule_of(eqn)
        if rule is None:
            return None
        call = self._call(rule, eqn, caller)
        invars, outvars = eqn.invars, eqn.outvars
        return [
            call.replace(invars=invars, outvars=outvars, source_info=eqn.source_info)
        ]

    def _call(
        self, rule: Rule, eqn: _jax.JaxprEqn, located: _jax.JaxprEqn | None
    ) -> _jax.JaxprEqn:
        """Returns the call that replaces an equation, with variables of its own."""
        composite = Composite(
            eqn.params,
            tuple(v.aval for v in eqn.outvars),
            self._kernel,
        )
        operands = tuple(_plain(v.aval) for v in eqn.invars)
        line = None if located is None else _jax.where(located)
        # Parameters such as jaxprs hash by identity; those that do not hash at all are
        # compared by identity too.
        params = tuple(sorted((k, _hashable(v)) for k, v in eqn.params.items()))
        key = (eqn.primitive, repr(params), operands, line)
        if key not in self._calls:
            traced = self._trace(rule, composite, eqn, operands, located)
            self._calls[key] = self._storing(traced).with_bodies(traced, located)
        return self._calls[key]

    def _storing(self, traced: _jax.JaxprEqn) -> _Expansion:
        """Returns the expansion of a rule's call, which may store to scratch memory."""
        inner, stored = [b.jaxpr for b in bodies(traced)], self._kernel.stored
        if any(_rule_of(eqn) for body in inner for eqn in equations(body)):
            stored = stored.union(*map(_stored_in_smem, inner))
        if stored == self._kernel.stored:
            return self
        return _Expansion(dataclasses.replace(self._kernel, stored=stored))

    def _trace(
        self,
        rule: Rule,
        composite: Composite,
        eqn: _jax.JaxprEqn,
        operands: Sequence[Any],
        located: _jax.JaxprEqn | None,
    ) -> _jax.JaxprEqn:
        def call(*values: Any) -> list[Any]:
            results = rule(composite, *values)
            return list(results) if isinstance(results, (list, tuple)) else [results]

        name = eqn.primitive.name
        with scope.tracing(self._kernel.mesh), _at(located):
            traced, closed = call_of(call, operands, self._kernel.mesh.axes, name)
        made = [_plain(aval) for aval in closed.out_avals]
        wanted = [_plain(aval) for aval in composite.out_avals]
        if made != wanted or traced is None:
            raise errors.InternalError(
                f"the rule of the composite {name} gives another type",
                expected=wanted,
                got=made,
            )
        if closed.consts or any(b.jaxpr.constvars for b in bodies(traced)):
            # Made while the rule is traced.
            raise errors.InternalError(
                f"the rule of the composite {name} closes over an array",
                expected="scalars, and arrays that operations make",
            )
        return traced


def _at(located: _jax.JaxprEqn | None) -> Any:
    return contextlib.nullcontext() if located is None else at_line_of(located)


def _plain(aval: Any) -> Any:
    """Returns the type of a value without JAX's additions; a reference's as it is."""
    if isinstance(aval, _jax.AbstractRef):
        return aval
    return _jax.ShapedArray(aval.shape, aval.dtype)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else id(value)
