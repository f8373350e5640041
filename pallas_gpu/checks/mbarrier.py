# SPDX-License-Identifier: Apache-2.0
"""Waits for barriers by warps and by whole warpgroups.

A value may vary among the warps of a `warp_map` if it depends on the warp's index, on
memory, or on the time: whatever one reads, another may read differently. What is
captured from outside, and what is computed from that alone, does not vary. An operation
is executed alike if no branch and no number of iterations around it varies, and none of
its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.primitives.indices.facts import Fact
from pallas_gpu.primitives.mbarrier import barrier_test_p, barrier_wait_p
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.program.facts import WARP, Facts
from pallas_gpu.program.nodes import Op, Region
from pallas_gpu.program.walk import Site, walk


def check_waits(jaxpr: _jax.Jaxpr) -> None:
    """Raises BarrierError for a barrier whose waits warps and warpgroups cannot share.

    A wait flips the parity in the registers of the waiting threads. After a wait of
    some warps, or a test, which may succeed in some only, the warps of a warpgroup
    would wait for different phases: some would continue before the data has arrived, or
    deadlock. What all four warps wait for alike is like a wait of the warpgroup.
    """
    # The lines of waits for each declaration, by the value of its scope.
    seen: dict[tuple[Any, bool], str | None] = {}
    uneven: dict[Region, set[Op]] = {}
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


def _is_uneven(site: Site, known: dict[Region, set[Op]]) -> bool:
    """True unless the four warps of a `warp_map` execute a wait alike."""
    if site.op.primitive is barrier_test_p:
        return True
    (outer,) = (s.op for s in site.enclosing if s.op.primitive is warp_map_p)
    (region,) = outer.regions
    if region not in known:
        paths = _Paths()
        *captured, _ = paths.inputs_of(region)
        paths.run(region, [*captured, paths.warp(outer.params["axis_name"])])
        known[region] = paths.uneven
    return site.op in known[region]


def _both(inside: str | None, outside: str | None) -> errors.BarrierError:
    return errors.BarrierError(
        "a barrier is waited for both by some warps and by the warpgroup",
        expected="one barrier for the waits of warps, another for those of the "
        "warpgroup: each warp keeps the parity of its own waits",
        got=f"waits inside warp_map at {inside} and outside at {outside}",
        hint="declare two barriers, move the wait out of the warp_map or into it, or "
        "let all four warps wait, in no branch that depends on the warp or on memory",
    )


class _Paths(Facts):
    """Finds operations whose operands or conditions vary among the warps.

    Attributes:
      uneven: operations that the warps may not execute alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uneven: set[Op] = set()

    def visit(self, op: Op, operands: Sequence[Fact]) -> None:
        if any(fact.depends_on(WARP) for fact in (*operands, *self.conditions)):
            self.uneven.add(op)
