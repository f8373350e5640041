# SPDX-License-Identifier: Apache-2.0
"""What holds of a kernel as a whole, and decides how its operations are lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pallas_gpu import _jax, types
from pallas_gpu.emitters import cluster
from pallas_gpu.memory import sharing
from pallas_gpu.primitives.cluster import async_store_smem_p
from pallas_gpu.primitives.cp_async import cp_async_p
from pallas_gpu.primitives.grids.scheduling import publish_p
from pallas_gpu.primitives.mbarrier import (
    barrier_arrive_p,
    barrier_test_p,
    barrier_wait_p,
)
from pallas_gpu.primitives.rows import gather_rows_p
from pallas_gpu.program.nodes import Access, Op
from pallas_gpu.program.walk import Site, uses, walk


@dataclasses.dataclass(frozen=True)
class Traits:
    """What holds of a kernel as a whole.

    Attributes:
      arrival_scope: memory scope of arrivals between CTAs. Other CTAs can observe this
        CTA's writes to GMEM, and to SMEM if threads access that of other CTAs, and the
        copies to their SMEM that it has waited for; without such writes an arrival
        publishes nothing, and its fence would be expensive.
      awaits_other_ctas: whether each CTA waits for all that others send to it. So it is
        where only asynchronous stores reach other CTAs, which are complete when the
        barrier that counts them is; the last arrivals on a `ClusterBarrier`, and stores
        through `cluster_ref`, may be waited for by nobody.
      copies_by_threads: whether a barrier may track copies by cp.async.
      meets: the scopes that use bytes of SMEM which another one has used.
      waits_for_stores: the waits for barriers on which threads of other CTAs, or their
        asynchronous stores, arrive. Others acquire what their own CTA has written: in
        the scope of a cluster each of them would clear the L1.
    """

    arrival_scope: cluster.MemoryScope
    awaits_other_ctas: bool
    copies_by_threads: bool
    meets: frozenset[_jax.JaxprEqn]
    waits_for_stores: frozenset[_jax.JaxprEqn]

    @classmethod
    def of(cls, jaxpr: _jax.Jaxpr) -> Traits:
        """Returns the traits of a kernel's body."""
        sites = walk(jaxpr)
        ops = [site.op for site in sites]
        stores = [site for site in sites if site.op.primitive is async_store_smem_p]
        reaching = (site for site in sites if _reaches_other_ctas(site.op))
        reached = {barrier for site in reaching for barrier in _barriers(site)}
        waits = (
            site
            for site in (sites if reached else ())
            if site.op.primitive in (barrier_wait_p, barrier_test_p)
        )
        return cls(
            "cluster" if any(map(_publishes, ops)) else "cta",
            bool(stores) and not any(map(_sends, ops)),
            uses(jaxpr, cp_async_p, gather_rows_p),
            sharing.meets(jaxpr),
            frozenset(x.eqn for x in waits if reached.intersection(_barriers(x))),
        )


def multicasts(jaxpr: _jax.Jaxpr) -> Iterator[tuple[Site, Access]]:
    """Yields the accesses to the memory of all devices at once."""
    for site in walk(jaxpr):
        for access in site.op.accesses:
            if isinstance(access.owner, types.MulticastRef):
                yield site, access


def shares_smem(jaxpr: _jax.Jaxpr, ctas: int) -> bool:
    """True when threads access the SMEM of other CTAs of the cluster, or may do so."""
    ops = [site.op for site in walk(jaxpr)]
    opaque = any(op.operation is not None and op.operation.opaque for op in ops)
    return any(map(_reaches_other_ctas, ops)) or (opaque and ctas > 1)


def _reaches_other_ctas(op: Op) -> bool:
    return bool(op.params.get("cta_axes"))


def _publishes(op: Op) -> bool:
    """Whether threads write what other CTAs can observe after an arrival."""
    writes = _reaches_other_ctas(op) and op.primitive is not barrier_arrive_p
    if writes or op.params.get("leader_tracked") is not None:
        return True
    return any(
        x.writes and x.space is types.GMEM and not x.operation.asynchronous
        for x in op.accesses
    )


def _sends(op: Op) -> bool:
    """Whether it may send something to other CTAs that those do not wait for."""
    params, operation = op.params, op.operation
    # Of scopes, too, but those name axes of warpgroups.
    is_copied = operation is not None and operation.asynchronous
    if is_copied and params.get("collective_axes"):
        return True
    if params.get("leader_tracked") is not None or params.get("collective_axis"):
        return True
    if op.primitive is publish_p:
        return True
    if _reaches_other_ctas(op) and op.primitive is not async_store_smem_p:
        return True
    barriers = (getattr(x.buffer.aval, "barrier", None) for x in op.accesses)
    return any(isinstance(barrier, types.ClusterBarrier) for barrier in barriers)


def _barriers(site: Site) -> Iterator[Any]:
    """The barriers that an operation accesses, as declared."""
    for access in site.op.accesses:
        if access.space is types.BARRIERS:
            yield site.origin(access.buffer)
