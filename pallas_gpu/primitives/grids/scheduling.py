# SPDX-License-Identifier: Apache-2.0
"""Dynamic scheduling: which position of the grid a cluster works on next.

A launch starts the first clusters of the grid, and each works on its own position
first. The positions behind them are counted by one counter in GMEM, which is zero when
the launch starts: a cluster claims the next one, and publishes it to its CTAs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_gpu import _jax, errors
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.grids.launch_control import try_cluster_cancel_p


def _position(*_: Any, **__: Any) -> list[Any]:
    return [_jax.ShapedArray((), jnp.dtype(jnp.int32))]


claim_p = registry.define(
    "claim_position", "scheduling", results=_position, by_warp=False
)
publish_p = registry.define(
    "publish_position",
    "scheduling",
    writes=("dst", "barrier"),
    atomic=True,
    releases=True,
    by_warp=False,
)


def claim(predicate: Any) -> Any:
    """Returns the next position that no cluster has claimed.

    PTX: atom.relaxed.gpu.global.add.u32. Since: sm_90.

    Issued by a warpgroup, whose elected thread claims. Only `publish` may use the
    result: the other threads do not know it. It is the size of the grid, or more, when
    all positions have been claimed.

    Args:
      predicate: scalar bool, uniform in the warpgroup; False claims nothing.
    """
    (position,) = ops.bind(claim_p, {"predicate": predicate})
    return position


def publish(position: Any, dst: Any, barrier: Any, predicate: Any) -> None:
    """Stores a claimed position in the SMEM of all CTAs of the cluster, and arrives.

    PTX: st.shared, mbarrier.arrive.release.cta; in a cluster st.shared::cluster and
    mbarrier.arrive.release.cluster for each CTA. Since: sm_90.

    Issued by the warpgroup that has claimed it. A wait for the barrier, at cluster
    scope in a cluster, makes the position visible.

    Args:
      position: the result of `claim`.
      dst: one i32 in SMEM without transforms, that no CTA reads.
      barrier: a barrier of one arrival.
      predicate: that of `claim`.
    """
    operands = {
        "position": position,
        "dst": dst,
        "barrier": barrier,
        "predicate": predicate,
    }
    ops.bind(publish_p, operands)


@registry.checks_program
def _check_claims(sites: Any) -> None:
    """Raises UnsupportedError unless the positions of the grid are claimed once.

    A launch has one counter: the first loop takes all positions, and a later one would
    only see each cluster's own. Neither may work be requested that there is none of.
    """
    claims = [site for site in sites if _takes_all(site.op)]
    for i, site in enumerate(claims):
        loops = [s for s in site.enclosing if s.op.name in ("scan", "while")]
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


def _takes_all(op: Any) -> bool:
    if op.primitive is try_cluster_cancel_p:
        return op.params["until_refused"]
    return op.primitive is claim_p
