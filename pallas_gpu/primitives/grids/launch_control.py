# SPDX-License-Identifier: Apache-2.0
"""Cluster launch control: a cluster takes over the work of one that has not started.

The answer to a request is 16 opaque bytes in SMEM, which arrive on a barrier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, arch, errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry

__all__ = ["try_cluster_cancel", "query_cluster_cancel", "TryClusterCancelResult"]

ANSWER_BYTES = 16


def _decoded(*_: Any, grid_names: Sequence[str], **__: Any) -> list[Any]:
    index = _jax.ShapedArray((), jnp.dtype(jnp.int32))
    return [_jax.ShapedArray((), jnp.dtype(jnp.bool_)), *[index] * len(grid_names)]


try_cluster_cancel_p = registry.define(
    "try_cluster_cancel",
    "launch_control",
    writes=("result", "barrier"),
    asynchronous=True,
    releases=True,
    feature=arch.Feature.CLUSTER_LAUNCH_CONTROL,
    by_warp=False,
)
query_cluster_cancel_p = registry.define(
    "query_cluster_cancel",
    "launch_control",
    results=_decoded,
    reads=("result",),
    feature=arch.Feature.CLUSTER_LAUNCH_CONTROL,
    by_warp=False,
)


@expect.arguments(num_buffers=expect.optional(expect.integer(minimum=1)))
def TryClusterCancelResult(  # noqa: N802 - upstream's name
    num_buffers: int | None = None,
) -> types.ScratchType:
    """Declares SMEM for answers of `try_cluster_cancel`.

    PTX: the 128 bits of clusterlaunchcontrol.try_cancel. Since: sm_100a.

    Issued by: the host.

    Args:
      num_buffers: number of answers; None for one without an index.

    Returns:
      A declaration for `scratch_types`: int8, of shape (16,) or (num_buffers, 16).

    Raises:
      ArgumentError: `num_buffers` is not positive.
    """
    shape = (ANSWER_BYTES,) if num_buffers is None else (num_buffers, ANSWER_BYTES)
    return types.SMEM(shape, jnp.int8)


@expect.arguments()
def try_cluster_cancel(
    result_ref: types.Ref,
    barrier: types.Ref,
    *,
    collective_axes: str | Sequence[str] = (),
) -> None:
    """Requests the work of a cluster of the grid that has not started.

    PTX: clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes, with
    .multicast::cluster::all in a cluster. Since: sm_100a.

    Issued by a warpgroup, whose elected thread makes the request. Each call arrives on
    the barrier once, and adds the 16 bytes of the answer, which is written
    asynchronously to the SMEM of every CTA of the cluster; `barrier_wait` on the
    barrier makes it visible to `query_cluster_cancel`. A cluster whose work is taken
    over is not started. Under `vmap` of the kernel no cluster takes over any work.

    Args:
      result_ref: 16 bytes of SMEM without transforms, `TryClusterCancelResult()`, that
        no thread of the cluster reads any more.
      barrier: one barrier; it needs an arrival for each warpgroup of the CTA that calls
        this.
      collective_axes: the thread axis if several warpgroups call this, and all axes of
        the cluster: only position 0 along them makes the request.

    Raises:
      MemorySpaceError: an operand is in another space.
      ShapeError: the answer does not have 16 bytes.
      AxisNameError, ArgumentError: other axes.
      UnsupportedError: the target has no cluster launch control.

    Example:
      >>> plgpu.try_cluster_cancel(answer_smem, barrier)
      >>> plgpu.barrier_wait(barrier)
      >>> (i, j), ok = plgpu.query_cluster_cancel(answer_smem, ("i", "j"))
    """
    request(result_ref, barrier, tuple(collective_axes), until_refused=False)


def request(
    result_ref: types.Ref,
    barrier: types.Ref,
    collective_axes: tuple[str, ...],
    *,
    until_refused: bool,
) -> None:
    """As `try_cluster_cancel`.

    Args:
      until_refused: whether it is repeated until there is no work: after it nobody may
        make another request.
    """
    who = "try_cluster_cancel"
    operands = {
        "result": _answer(result_ref, who),
        "barrier": ops.one_barrier(barrier, who),
    }
    ops.bind(
        try_cluster_cancel_p,
        operands,
        collective_axes=collective_axes,
        until_refused=until_refused,
    )


@expect.arguments()
def query_cluster_cancel(
    result_ref: types.Ref, grid_names: str | Sequence[str]
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Decodes the answer to `try_cluster_cancel`.

    PTX: ld.shared.b128, clusterlaunchcontrol.query_cancel.is_canceled and
    .get_first_ctaid. Since: sm_100a.

    Issued by a warpgroup, after the wait for the request's barrier. It has been read
    when the warpgroup next arrives on a barrier: then it may be requested into again.

    Args:
      result_ref: that of the request.
      grid_names: names of grid axes.

    Returns:
      The positions on these axes, int32 scalars, of the work that the cluster has taken
      over; and whether it has any. If not, the positions are undefined, and the cluster
      must not make another request.

    Raises:
      MemorySpaceError, ShapeError: not an answer.
      AxisNameError: the grid has no such axis.
      UnsupportedError: the target has no cluster launch control.
    """
    operands = {"result": _answer(result_ref, "query_cluster_cancel")}
    granted, *positions = ops.bind(
        query_cluster_cancel_p, operands, grid_names=tuple(grid_names)
    )
    return tuple(positions), granted


def _answer(ref: types.Ref, who: str) -> ops.RefOperand:
    ops.require_space(ref, types.SMEM, who, "the answer")
    operand = ops.operand(ref)
    aval = types.base_aval(operand.ref)
    size = math.prod(ref.shape) * types.itemsize_bits(ref.dtype) // 8
    # Whole rows of 16 bytes are aligned to 16 bytes, as the instructions require.
    rows = types.resolve(aval.shape, operand.transforms).sizes[-1] == aval.shape[-1]
    if size != ANSWER_BYTES or aval.transforms or not rows:
        raise errors.ShapeError(
            f"{who}: the answer does not have {ANSWER_BYTES} bytes in one piece",
            expected="int8[16] in SMEM without transforms",
            got=types.describe(ref),
            hint="declare it with plgpu.TryClusterCancelResult(); of several take one "
            "with answer_smem.at[i]",
        )
    return operand
