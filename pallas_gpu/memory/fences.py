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
from collections.abc import Iterator, Sequence
from typing import Any

from pallas_gpu import _jax, resources, types
from pallas_gpu.memory import sharing
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.grids.launch_control import query_cluster_cancel_p
from pallas_gpu.primitives.indices.facts import Fact
from pallas_gpu.primitives.tma import commit_smem_p, fence_smem_p
from pallas_gpu.program import indices, rewrite
from pallas_gpu.program.bodies import kept
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts
from pallas_gpu.program.nodes import Kind, Op, Region, Value
from pallas_gpu.program.walk import walk

# Operations that contain a fence of what their issuer has accessed.
_FENCES = (commit_smem_p, fence_smem_p, query_cluster_cancel_p)

# Arrays that a warpgroup may have accessed since its last fence; with True, those of
# another CTA.
_Pending = frozenset[tuple[Any, bool]]
_NOTHING: _Pending = frozenset()


@kept
def with_fences(
    jaxpr: _jax.Jaxpr, mesh: types.Mesh, params: types.CompilerParams
) -> _jax.Jaxpr:
    """Returns a body whose threads fence what copies overwrite.

    `unsafe_no_auto_barriers` leaves all fences to the author but those at the ends of
    scopes, whose memory the author does not know.
    """
    scopes = resources.scopes(jaxpr)
    variables = resources.arrays_of(scopes)
    written = {
        variables[origin]
        for site in walk(jaxpr)
        for access in site.op.accesses
        if (origin := site.origin(access.buffer)) in variables
        if access.writes and access.space is types.SMEM
        if access.operation is not None and "async" in access.operation.proxies
    }
    if not written:
        return jaxpr
    bytes_ = _bytes_of(written, scopes)
    region = region_of(jaxpr)
    deciding = indices.deciding(region)
    automatic = not params.unsafe_no_auto_barriers
    kernel = _Kernel(mesh, automatic, variables, deciding, *bytes_)
    for warpgroup in range(mesh.warpgroups):
        path = _Path(kernel, warpgroup)
        path.run(region, path.inputs_of(region))
    return rewrite.with_equations(jaxpr, {}, kernel.before, kernel.at_end)


def _bytes_of(written: set[Any], scopes: list[Any]) -> tuple[set[Any], set[Any]]:
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


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What the paths of all warpgroups have in common.

    Attributes:
      mesh, automatic: see `with_fences`.
      variables: the variables of arrays, which scopes allocate.
      deciding: the values on which depends what branches do.
      overwritten: arrays whose bytes the async proxy writes in their scope.
      reused: arrays whose bytes it writes in another scope, or another visit.
      followed: the operations of each region that matter.
      before, at_end: the fences to insert; see `rewrite.with_equations`.
    """

    mesh: types.Mesh
    automatic: bool
    variables: dict[Any, Any]
    deciding: set[Value]
    overwritten: set[Any]
    reused: set[Any]
    followed: dict[Region, list[Op]] = dataclasses.field(default_factory=dict)
    before: dict[int, _jax.JaxprEqn] = dataclasses.field(default_factory=dict)
    at_end: dict[_jax.Jaxpr, _jax.JaxprEqn] = dataclasses.field(default_factory=dict)


class _Path(Facts):
    """One warpgroup's path through a kernel; the state is what is pending."""

    def __init__(self, kernel: _Kernel, warpgroup: int):
        super().__init__(positions={kernel.mesh.thread_name: warpgroup})
        self.state = _NOTHING
        self._kernel, self._followed = kernel, kernel.followed

    def merged(self, a: _Pending, b: _Pending) -> _Pending:
        return a | b

    def matters(self, op: Op) -> bool:
        """Whether it accesses memory, orders accesses, or decides on branches."""
        return (
            op.kind is Kind.SCOPE
            or op.primitive in _FENCES
            or _releases(op)
            or not self._kernel.deciding.isdisjoint(op.results)
            or any(access.space is types.SMEM for access in op.accesses)
            or any(map(self.followed, op.regions))
        )

    def results(self, op: Op, operands: Sequence[Fact]) -> Sequence[Fact]:
        if self._kernel.deciding.isdisjoint(op.results):
            return [Fact()] * len(op.results)
        return super().results(op, operands)

    def visit(self, op: Op, operands: Sequence[Fact]) -> None:
        """Inserts a fence before an operation that signals, if something is pending."""
        needed = any(array in self._kernel.overwritten for array, _ in self.state)
        if needed and self._kernel.automatic and self._is_release(op):
            self._fence(op.equation, self._kernel.before, id(op.equation))

    def _fence(self, at: _jax.JaxprEqn, where: dict[Any, Any], key: Any) -> None:
        """Inserts a fence with the line of an equation; on other paths it is, too."""
        remote = any(elsewhere for _, elsewhere in self.state)
        where[key] = at.replace(
            primitive=fence_smem_p,
            invars=[],
            outvars=[],
            params={"remote": remote or (key in where and where[key].params["remote"])},
            effects=frozenset({registry.KERNEL_EFFECT}),
        )
        self.state = _NOTHING

    def _is_release(self, op: Op) -> bool:
        """Whether others continue with what the warpgroup has accessed before."""
        if op.kind is Kind.WARPS:
            return _orders(op.regions[0])
        if op.kind is Kind.SCOPE:
            # The warpgroups of a block meet where they enter a scope together.
            return (
                bool(op.params["collective_axes"]) and self._kernel.mesh.warpgroups > 1
            )
        return _releases(op)

    def leave(self, op: Op) -> None:
        if op.primitive in _FENCES:
            self.state = _NOTHING
        elif op.kind is Kind.SCOPE:
            own = set(resources.scope_refs(op.equation))
            if any(x in own & self._kernel.reused for x, _ in self.state):
                self._fence(op.equation, self._kernel.at_end, op.params["jaxpr"])
            self.state = frozenset(x for x in self.state if x[0] not in own)
        else:
            self.state |= frozenset(self._accessed(op))

    def _accessed(self, op: Op) -> Iterator[tuple[Any, bool]]:
        """Yields the arrays that threads access, of those that matter."""
        if op.operation is None or "generic" not in op.operation.proxies:
            return
        for access in op.accesses:
            array = self._kernel.variables.get(self.origin(access.buffer))
            if array in self._kernel.overwritten or array in self._kernel.reused:
                yield array, bool(op.params.get("cta_axes"))


def _orders(region: Region) -> bool:
    """Whether a region contains a release or a fence."""
    return any(
        op.primitive in _FENCES or _releases(op) or any(map(_orders, op.regions))
        for op in region.ops
    )


def _releases(op: Op) -> bool:
    """Whether an operation signals that its issuer is done with its accesses."""
    if op.operation is None or not op.operation.releases:
        return False
    return op.params.get("sem") not in ("relaxed", "acquire")
