# SPDX-License-Identifier: Apache-2.0
"""Barriers: counts of arrivals; waits by warps and by whole warpgroups."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry.check.cluster import check_positions
from pallas_gpu.entry.check.references import check_operands
from pallas_gpu.entry.check.warp_paths import executed_unevenly
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.mbarrier import (
    barrier_arrive_p,
    barrier_test_p,
    barrier_wait_p,
)
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.program.nodes import Op
from pallas_gpu.program.walk import Site, walk


@registry.checks(barrier_arrive_p)
def _check_arrival(op: Op, mesh: types.Mesh) -> None:
    check_operands(op, mesh)
    if op.operands["cta"] is not None:
        check_positions("cluster_ref", op.params["cta_axes"], op.operands["cta"], mesh)
    arrivals = op.operands["barrier"].buffer.aval.barrier.phase_arrivals(mesh)
    if op.params["num_arrivals"] > arrivals:
        raise errors.BarrierError(
            "barrier_arrive: a phase of the barrier has fewer arrivals",
            expected=f"num_arrivals of 1 to {arrivals}",
            got=f"num_arrivals={op.params['num_arrivals']}",
            hint="declare the barrier with more arrivals: "
            "plgpu.Barrier(num_arrivals=...)",
        )


def check_waits(jaxpr: _jax.Jaxpr) -> None:
    """Raises BarrierError for a barrier whose waits warps and warpgroups cannot share.

    A wait flips the parity in the registers of the waiting threads. After a wait of
    some warps, or a test, which may succeed in some only, the warps of a warpgroup
    would wait for different phases: some would continue before the data has arrived, or
    deadlock. What all four warps wait for alike is like a wait of the warpgroup.
    """
    # The lines of waits for each declaration, by the value of its scope.
    seen: dict[tuple[Any, bool], str | None] = {}
    uneven: dict[int, set[int]] = {}
    for site in walk(jaxpr):
        if site.op.primitive not in (barrier_wait_p, barrier_test_p):
            continue
        declaration = site.origin(site.op.operands["barrier"].buffer)
        in_warp = site.is_inside(warp_map_p)
        if in_warp and not _is_uneven(site, uneven):
            continue
        seen.setdefault((declaration, in_warp), site.where)
        if (declaration, not in_warp) in seen:
            inside, outside = (seen[declaration, flag] for flag in (True, False))
            raise _both(inside, outside).with_location(site.where)


def _is_uneven(site: Site, known: dict[int, set[int]]) -> bool:
    """True unless the four warps of a `warp_map` execute a wait alike."""
    if site.op.primitive is barrier_test_p:
        return True
    (outer,) = (s.eqn for s in site.enclosing if s.op.primitive is warp_map_p)
    if id(outer) not in known:
        known[id(outer)] = executed_unevenly(outer)
    return id(site.eqn) in known[id(outer)]


def _both(inside: str | None, outside: str | None) -> errors.BarrierError:
    return errors.BarrierError(
        "a barrier is waited for both by some warps and by the warpgroup",
        expected="one barrier for the waits of warps, another for those of the "
        "warpgroup: each warp keeps the parity of its own waits",
        got=f"waits inside warp_map at {inside} and outside at {outside}",
        hint="declare two barriers, move the wait out of the warp_map or into it, or "
        "let all four warps wait, in no branch that depends on the warp or on memory",
    )
