# SPDX-License-Identifier: Apache-2.0
"""Barriers: waited for either by warps or by whole warpgroups."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives.mbarrier import barrier_wait_p
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.walk import walk


def check_waits(jaxpr: _jax.Jaxpr) -> None:
    """Raises BarrierError for a barrier that warps and whole warpgroups wait for.

    A wait flips the parity in the registers of the waiting threads. After a wait of
    single warps, the warps of a warpgroup would wait for different phases: some would
    continue before the data has arrived, or deadlock.
    """
    # The sites of waits for each declaration, by the variable of its scope.
    seen: dict[tuple[Any, bool], str | None] = {}
    for site in walk(jaxpr):
        if site.eqn.primitive is not barrier_wait_p:
            continue
        operands = ops.unflatten(site.eqn.params["tree"], list(site.eqn.invars))
        declaration = site.origin(operands["barrier"].ref)
        in_warp = site.is_inside(warp_map_p)
        seen.setdefault((declaration, in_warp), site.where)
        if (declaration, not in_warp) in seen:
            inside, outside = (seen[declaration, flag] for flag in (True, False))
            raise _both(inside, outside).with_location(site.where)


def _both(inside: str | None, outside: str | None) -> errors.BarrierError:
    return errors.BarrierError(
        "a barrier is waited for both inside and outside warp_map",
        expected="one barrier for the waits of warps, another for those of the "
        "warpgroup: each warp keeps the parity of its own waits",
        got=f"waits inside at {inside} and outside at {outside}",
        hint="declare two barriers, or move the wait out of the warp_map or into it",
    )
