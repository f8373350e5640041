# SPDX-License-Identifier: Apache-2.0
"""Dynamic scheduling: one loop in a kernel, which runs once."""

from __future__ import annotations

from pallas_gpu import _jax, errors
from pallas_gpu.primitives.grids.launch_control import try_cluster_cancel_p
from pallas_gpu.primitives.grids.scheduling import claim_p
from pallas_gpu.program.nodes import Kind, Op
from pallas_gpu.program.walk import walk


def check_claims(jaxpr: _jax.Jaxpr) -> None:
    """Raises UnsupportedError unless the positions of the grid are claimed once.

    A launch has one counter: the first loop takes all positions, and a later one would
    only see each cluster's own. Neither may work be requested that there is none of.
    """
    claims = [site for site in walk(jaxpr) if _takes_all(site.op)]
    for i, site in enumerate(claims):
        loops = [s for s in site.enclosing if s.op.kind in (Kind.FOR, Kind.WHILE)]
        if i == 0 and len(loops) == 1:
            continue
        raise errors.UnsupportedError(
            "dynamic_scheduling_loop: the positions of the grid are taken more than "
            "once",
            expected="one dynamic_scheduling_loop in a kernel, outside other loops",
            got="a second one" if i else "one within a loop",
            hint="do all work of a position in one loop, or use plgpu.nd_loop",
            where=site.where,
        )


def _takes_all(op: Op) -> bool:
    if op.primitive is try_cluster_cancel_p:
        return op.params["until_refused"]
    return op.primitive is claim_p
