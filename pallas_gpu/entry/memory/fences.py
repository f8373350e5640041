# SPDX-License-Identifier: Apache-2.0
"""Fences between what threads do in SMEM and the copies that overwrite it.

Threads access SMEM through the generic proxy, copies through the async proxy: a copy
comes after an access of threads only across a proxy fence, also after a load (PTX ISA,
"Proxies", "Causality order"). So threads that may have accessed what a copy overwrites
fence before they signal that they are done: before an arrival, a copy that they issue
themselves, and where warps or warpgroups meet. What wgmma and tcgen05 read needs none.

`with_fences` inserts these fences as equations. They are what the compiler emits, and
what the emulator takes into account.

For each equation and each warpgroup the analysis determines which arrays the warpgroup
may have accessed since its last fence. Branches that depend on the index of the
warpgroup alone are known; of others, all may be taken.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

from pallas_gpu import _jax, resources, types, walk
from pallas_gpu.entry.call import CallParams
from pallas_gpu.entry.memory import sharing
from pallas_gpu.entry.memory.uniform import Context, Values
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives._accesses import Access, accesses
from pallas_gpu.primitives.grids.launch_control import query_cluster_cancel_p
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.primitives.tma import commit_smem_p, fence_smem_p
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.program import rewrite

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
    kernel = _Kernel.of(jaxpr, mesh.warpgroups)
    if not kernel.overwritten and not kernel.reused:
        return jaxpr
    fences = _Fences({}, {})
    for warpgroup in range(mesh.warpgroups):
        values = Values(kernel.tree, mesh.thread_name, warpgroup)
        _Flow(kernel, values, fences, automatic).run((None, jaxpr), _NOTHING)
    return rewrite.with_equations(jaxpr, {}, fences.before, fences.at_end)


@dataclasses.dataclass(frozen=True)
class _Fences:
    """The fences to insert; see `rewrite.with_equations`."""

    before: dict[int, _jax.JaxprEqn]
    at_end: dict[_jax.Jaxpr, _jax.JaxprEqn]


def _fence(at: _jax.JaxprEqn, pending: _Pending) -> _jax.JaxprEqn:
    """Returns a fence with the line of an equation."""
    remote = any(elsewhere for _, elsewhere in pending)
    return at.replace(
        primitive=fence_smem_p,
        invars=[],
        outvars=[],
        params={"remote": remote},
        effects=frozenset({registry.KERNEL_EFFECT}),
    )


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What the analysis of each warpgroup has in common.

    Attributes:
      warpgroups: of a block.
      tree: the sites of each body, in order.
      overwritten: arrays whose bytes the async proxy writes in their scope.
      reused: arrays whose bytes it writes in another scope, or another visit.
      relevant: sites at which something is accessed or fenced, or that run such ones.
      ordering: sites that release, fence or start a copy, or that run such ones.
    """

    warpgroups: int
    tree: dict[Context, list[walk.Site]]
    overwritten: frozenset[Any]
    reused: frozenset[Any]
    relevant: frozenset[walk.Site]
    ordering: frozenset[walk.Site]

    @classmethod
    def of(cls, jaxpr: _jax.Jaxpr, warpgroups: int) -> _Kernel:
        sites = walk.walk(jaxpr)
        tree: dict[Context, list[walk.Site]] = {}
        relevant, ordering = set(), set()
        written = set(_written(sites))
        overwritten, reused = _bytes_of(written, resources.scopes(jaxpr))
        for site in sites:
            parent = site.enclosing[-1] if site.enclosing else None
            body = site.within[-1] if site.within else jaxpr
            tree.setdefault((parent, body), []).append(site)
            orders = _releases(site.eqn) or site.eqn.primitive in _FENCES
            scope = site.eqn.primitive is run_scoped_p
            if orders:
                ordering |= {site, *site.enclosing}
            if (
                orders
                or scope
                or any(a.space is types.SMEM for a in accesses(site.eqn))
            ):
                relevant |= {site, *site.enclosing}
        return cls(
            warpgroups,
            tree,
            frozenset(overwritten),
            frozenset(reused),
            frozenset(relevant),
            frozenset(ordering),
        )

    def accessed(self, site: walk.Site) -> Iterator[tuple[Any, bool]]:
        """Yields the arrays that threads access at a site, of those that matter."""
        remote = bool(site.eqn.params.get("cta_axes"))
        for access in accesses(site.eqn):
            if access.space is types.SMEM and "generic" in access.operation.proxies:
                array = site.origin(access.ref)
                if array in self.overwritten or array in self.reused:
                    yield array, remote


def _written(sites: tuple[walk.Site, ...]) -> Iterator[Any]:
    """Yields the arrays in SMEM that the async proxy writes."""
    for site in sites:
        for access in accesses(site.eqn):
            if _is_overwriting(access):
                yield site.origin(access.ref)


def _is_overwriting(access: Access) -> bool:
    by_copy = "async" in access.operation.proxies
    return by_copy and access.writes and access.space is types.SMEM


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


def _releases(eqn: _jax.JaxprEqn) -> bool:
    """Whether an equation signals that its issuer is done with what it has accessed."""
    operation = registry.operation(eqn.primitive)
    if operation is None or not operation.releases:
        return False
    return eqn.params.get("sem") not in ("relaxed", "acquire")


class _Flow:
    """One warpgroup's way through a kernel."""

    def __init__(
        self, kernel: _Kernel, values: Values, fences: _Fences, automatic: bool
    ):
        self._kernel = kernel
        self._values = values
        self._fences = fences
        self._automatic = automatic
        # What is pending after a site, by what is before.
        self._known: dict[tuple[walk.Site, _Pending], _Pending] = {}

    def run(self, context: Context, pending: _Pending) -> _Pending:
        """Returns what is pending after a body."""
        for site in self._kernel.tree.get(context, ()):
            if site in self._kernel.relevant:
                pending = self._after(site, pending)
        return pending

    def _after(self, site: walk.Site, pending: _Pending) -> _Pending:
        if (site, pending) not in self._known:
            self._known[site, pending] = self._site(site, pending)
        return self._known[site, pending]

    def _site(self, site: walk.Site, pending: _Pending) -> _Pending:
        if self._is_release(site):
            pending = self._fenced(site.eqn, pending)
        pending = self._bodies(site, pending)
        if site.eqn.primitive is run_scoped_p:
            pending = self._left(site, pending)
        pending |= frozenset(self._kernel.accessed(site))
        return _NOTHING if site.eqn.primitive in _FENCES else pending

    def _is_release(self, site: walk.Site) -> bool:
        """Whether others continue with what the warpgroup has accessed before."""
        if site.eqn.primitive is warp_map_p:
            return site in self._kernel.ordering
        if site.eqn.primitive is run_scoped_p:
            # The warpgroups of a block meet where they enter a scope together.
            together = bool(site.eqn.params["collective_axes"])
            return together and self._kernel.warpgroups > 1
        return _releases(site.eqn)

    def _fenced(self, eqn: _jax.JaxprEqn, pending: _Pending) -> _Pending:
        """Inserts a fence before an equation, if something is pending."""
        needed = any(array in self._kernel.overwritten for array, _ in pending)
        if not needed or not self._automatic:
            return pending
        self._fences.before[id(eqn)] = _fence(eqn, pending)
        return _NOTHING

    def _left(self, site: walk.Site, pending: _Pending) -> _Pending:
        """Inserts a fence at the end of a scope, if its memory is used again."""
        own = set(sharing.arrays(site))
        if any(x in own and x in self._kernel.reused for x, _ in pending):
            body = site.eqn.params["jaxpr"]
            self._fences.at_end[body] = _fence(site.eqn, pending)
            return _NOTHING
        return frozenset((x, elsewhere) for x, elsewhere in pending if x not in own)

    def _bodies(self, site: walk.Site, pending: _Pending) -> _Pending:
        inner: list[Context] = [(site, body.jaxpr) for body in site.bodies]
        match site.eqn.primitive.name:
            case "cond":
                taken = self._values.of_operand(site, site.eqn.invars[0])
                if taken is not None:
                    inner = [inner[min(max(int(taken), 0), len(inner) - 1)]]
                return _NOTHING.union(*(self.run(body, pending) for body in inner))
            case "scan" if site.eqn.params["length"] > 1:
                return self._loop(inner, pending)
            case "while":
                return self._loop(inner, pending)
        for body in inner:
            pending = self.run(body, pending)
        return pending

    def _loop(self, inner: list[Context], pending: _Pending) -> _Pending:
        while True:
            after = pending
            for body in inner:
                after = self.run(body, after)
            if after <= pending:
                return pending
            pending |= after
