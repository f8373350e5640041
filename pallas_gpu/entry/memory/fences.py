# SPDX-License-Identifier: Apache-2.0
"""Fences between what threads do in SMEM and the copies that overwrite it.

Threads access SMEM through the generic proxy, copies through the async proxy: a copy
comes after an access of threads only across a proxy fence, also after a load (PTX ISA,
"Proxies", "Causality order"). So threads that may have accessed what a copy overwrites
fence before they signal that they are done: before an arrival, a copy that they issue
themselves, and where warps or warpgroups meet. What wgmma and tcgen05 read needs none.

`with_fences` inserts these fences as equations. They are what the compiler emits, and
what the emulator takes into account.

For each operation and each warpgroup the analysis determines which arrays the warpgroup
may have accessed since its last fence. Branches that depend on the index of the
warpgroup alone are known; of others, all may be taken.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pallas_gpu import _jax, resources, types, walk
from pallas_gpu.entry.call import CallParams
from pallas_gpu.entry.memory import sharing
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives._accesses import Access, accesses
from pallas_gpu.primitives.grids.launch_control import query_cluster_cancel_p
from pallas_gpu.primitives.indices.facts import Fact, kind
from pallas_gpu.primitives.tma import commit_smem_p, fence_smem_p
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts
from pallas_gpu.program.nodes import Kind, Op, Operand, Region, Value

# Operations that contain a fence of what their issuer has accessed.
_FENCES = (commit_smem_p, fence_smem_p, query_cluster_cancel_p)

# Arrays that a warpgroup may have accessed since its last fence; with True, those of
# another CTA.
_Pending = frozenset[tuple[Any, bool]]
_NOTHING: _Pending = frozenset()

# None where nothing changes: a body that its own entry holds would stay for ever.
_DONE: weakref.WeakKeyDictionary[_jax.Jaxpr, dict[Any, _jax.Jaxpr | None]]
_DONE = weakref.WeakKeyDictionary()


def with_fences(params: CallParams) -> CallParams:
    """Returns a kernel whose threads fence what copies overwrite.

    `unsafe_no_auto_barriers` leaves all fences to the author but those at the ends of
    scopes, whose memory the author does not know.
    """
    mesh, jaxpr = params.mesh, params.jaxpr
    automatic = not params.compiler_params.unsafe_no_auto_barriers
    key = mesh.warpgroups, mesh.thread_name, automatic
    done = _DONE.setdefault(jaxpr, {})
    if key not in done:
        result = _inserted(jaxpr, mesh, automatic)
        done[key] = None if result is jaxpr else result
    found = done[key]
    return params if found is None else dataclasses.replace(params, jaxpr=found)


def _inserted(jaxpr: _jax.Jaxpr, mesh: types.Mesh, automatic: bool) -> _jax.Jaxpr:
    found = (access for site in walk.walk(jaxpr) for access in accesses(site.eqn))
    if not any(map(_is_overwriting, found)):
        return jaxpr
    region, arrays = region_of(jaxpr), _Arrays()
    arrays.run(region, arrays.inputs_of(region))
    kernel = _Kernel(
        *_bytes_of(arrays.written, resources.scopes(jaxpr)), arrays.smem_of
    )
    fences = _Fences({}, {})
    for warpgroup in range(mesh.warpgroups):
        path = _Path(kernel, mesh, warpgroup, fences, automatic)
        path.run(region, path.inputs_of(region))
    return walk.with_equations(jaxpr, {}, fences.before, fences.at_end)


@dataclasses.dataclass(frozen=True)
class _Fences:
    """The fences to insert; see `walk.with_equations`."""

    before: dict[int, _jax.JaxprEqn]
    at_end: dict[_jax.Jaxpr, _jax.JaxprEqn]


def _fence(
    at: _jax.JaxprEqn, pending: _Pending, other: _jax.JaxprEqn | None
) -> _jax.JaxprEqn:
    """Returns a fence with the line of an equation, for another path as well."""
    remote = any(elsewhere for _, elsewhere in pending)
    remote = remote or (other is not None and other.params["remote"])
    return at.replace(
        primitive=fence_smem_p,
        invars=[],
        outvars=[],
        params={"remote": remote},
        effects=frozenset({registry.KERNEL_EFFECT}),
    )


# Accesses to SMEM with the references that they are to.
_Found = dict[Op, list[tuple[Access, Operand]]]


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What the analysis of each warpgroup has in common.

    Attributes:
      overwritten: arrays whose bytes the async proxy writes in their scope.
      reused: arrays whose bytes it writes in another scope, or another visit.
      found: the accesses of operations.
    """

    overwritten: set[Any]
    reused: set[Any]
    found: _Found


class _Smem(Facts):
    """Follows references to arrays in SMEM: these are the variables of their scopes."""

    def __init__(self, found: _Found, positions: Mapping[Any, int]):
        super().__init__(positions=positions)
        self.smem_of = found
        self._variables: dict[Any, Any] = {}

    def made(self, op: Op, value: Value) -> Fact:
        if op.kind is Kind.SCOPE:
            position = op.regions[0].inputs.index(value)
            self._variables[value] = op.params["jaxpr"].invars[position]
        return super().made(op, value)

    def results(self, op: Op, operands: Sequence[Fact]) -> Sequence[Fact]:
        return [Fact()] * len(op.results)

    def accessed(self, op: Op) -> Iterator[tuple[Access, Any]]:
        """Yields an operation's accesses to SMEM with the arrays."""
        if op not in self.smem_of:
            invars = list(op.equation.invars)
            self.smem_of[op] = [
                (access, op.inputs[invars.index(access.ref)])
                for access in accesses(op.equation)
                if access.space is types.SMEM
            ]
        for access, ref in self.smem_of[op]:
            origin = self.origin(ref)
            yield access, self._variables.get(origin, origin)


class _Arrays(_Smem):
    """Finds the arrays in SMEM that the async proxy writes."""

    def __init__(self) -> None:
        super().__init__({}, {})
        self.written: set[Any] = set()

    def visit(self, op: Op, operands: Sequence[Fact]) -> None:
        found = self.accessed(op)
        self.written |= {array for access, array in found if _is_overwriting(access)}


def _is_overwriting(access: Access) -> bool:
    by_copy = "async" in access.operation.proxies
    return by_copy and access.writes and access.space is types.SMEM


def _bytes_of(written: set[Any], scopes: list[walk.Site]) -> tuple[set[Any], set[Any]]:
    """Returns the arrays whose bytes the async proxy writes: in their scope, later."""
    found = [site for site in scopes if sharing.arrays(site)]
    overwritten, reused = set(written), set[Any]()
    for site in found:
        for var, others in sharing.members(site).items():
            if written.intersection(others):
                overwritten.add(var)
    for site in found:
        later = sharing.later_scopes(site, found)
        if any(written.intersection(sharing.arrays(other)) for other in later):
            reused.update(sharing.arrays(site))
    return overwritten, reused


class _Path(_Smem):
    """One warpgroup's path through a kernel; the state is what is pending."""

    def __init__(
        self,
        kernel: _Kernel,
        mesh: types.Mesh,
        warpgroup: int,
        fences: _Fences,
        automatic: bool,
    ):
        super().__init__(kernel.found, {mesh.thread_name: warpgroup})
        self.state = _NOTHING
        self._kernel = kernel
        self._warpgroups = mesh.warpgroups
        self._fences = fences
        self._automatic = automatic

    def merged(self, a: _Pending, b: _Pending) -> _Pending:
        return a | b

    def results(self, op: Op, operands: Sequence[Fact]) -> Sequence[Fact]:
        """Follows scalars alone, which decide on branches."""
        kinds = [None if value.shape else kind(value.aval) for value in op.results]
        if not {*kinds} <= {"i", "u", "b"}:
            return [Fact()] * len(op.results)
        return super().results(op, operands)

    def visit(self, op: Op, operands: Sequence[Fact]) -> None:
        """Inserts a fence before an operation that signals, if something is pending."""
        needed = any(array in self._kernel.overwritten for array, _ in self.state)
        if needed and self._automatic and self._is_release(op):
            before, key = self._fences.before, id(op.equation)
            before[key] = _fence(op.equation, self.state, before.get(key))
            self.state = _NOTHING

    def _is_release(self, op: Op) -> bool:
        """Whether others continue with what the warpgroup has accessed before."""
        if op.kind is Kind.WARPS:
            return _orders(op.regions[0])
        if op.kind is Kind.SCOPE:
            # The warpgroups of a block meet where they enter a scope together.
            return bool(op.params["collective_axes"]) and self._warpgroups > 1
        return _releases(op)

    def leave(self, op: Op) -> None:
        if op.primitive in _FENCES:
            self.state = _NOTHING
            return
        if op.kind is Kind.SCOPE:
            self._leave_scope(op)
        matter = self._kernel.overwritten | self._kernel.reused
        remote = bool(op.params.get("cta_axes"))
        self.state |= {
            (array, remote)
            for access, array in self.accessed(op)
            if "generic" in access.operation.proxies and array in matter
        }

    def _leave_scope(self, op: Op) -> None:
        """Inserts a fence at the end of a scope, if its memory is used again."""
        own = set(resources.scope_refs(op.equation))
        if any(x in own and x in self._kernel.reused for x, _ in self.state):
            at_end, body = self._fences.at_end, op.params["jaxpr"]
            at_end[body] = _fence(op.equation, self.state, at_end.get(body))
            self.state = _NOTHING
        self.state = frozenset(
            pending for pending in self.state if pending[0] not in own
        )


def _orders(region: Region) -> bool:
    """Whether a region contains a release or a fence."""
    return any(
        op.primitive in _FENCES or _releases(op) or any(map(_orders, op.regions))
        for op in region.ops
    )


def _releases(op: Op) -> bool:
    """Whether an operation signals that its issuer is done with its accesses."""
    operation = registry.operation(op.primitive)
    if operation is None or not operation.releases:
        return False
    return op.params.get("sem") not in ("relaxed", "acquire")
