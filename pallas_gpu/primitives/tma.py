# SPDX-License-Identifier: Apache-2.0
"""TMA: asynchronous copies between GMEM and SMEM, their groups and fences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry

copy_gmem_to_smem_p = registry.define(
    "copy_gmem_to_smem",
    "tma",
    scopes=registry.SCOPES,
    reads=("src",),
    writes=("dst", "barrier"),
    asynchronous=True,
    feature=arch.Feature.TMA,
)
copy_smem_to_gmem_p = registry.define(
    "copy_smem_to_gmem",
    "tma",
    scopes=registry.SCOPES,
    reads=("src",),
    writes=("dst",),
    asynchronous=True,
    feature=arch.Feature.TMA,
)
wait_smem_to_gmem_p = registry.define(
    "wait_smem_to_gmem", "tma", scopes=registry.SCOPES
)
commit_group_p = registry.define(
    "commit_smem_to_gmem_group", "tma", scopes=registry.SCOPES
)
commit_smem_p = registry.define("commit_smem", "tma", scopes=registry.SCOPES)


def copy_gmem_to_smem(
    src: Any,
    dst: Any,
    barrier: Any = None,
    *,
    collective_axes: str | Sequence[str] | None = None,
    leader_tracked: Any = None,
    oob_mode: types.OOBFillMode | None = None,
    predicate: Any = None,
) -> None:
    """Starts an asynchronous copy from GMEM to SMEM.

    PTX: cp.async.bulk.tensor.shared::cluster.global.mbarrier. Since: sm_90.

    Issued by a warpgroup, or inside of `warp_map` by a warp; one elected lane starts
    the copy. It arrives on the barrier once and adds the copy's bytes to the current
    phase; `barrier_wait` on that barrier makes the data visible. What lies outside of
    the array reads as zero.

    Args:
      src: GMEM reference or a part of one.
      dst: SMEM reference of the same shape and dtype.
      barrier: one barrier.
      collective_axes: cluster axes of a multicast: all CTAs along them call this with
        the same source; each loads a part and sends it to all of them, at the same
        place in their SMEM, and every CTA's barrier counts all the bytes.
      leader_tracked: not supported yet.
      oob_mode: ZEROS (default) allows parts outside of the array; PROMISE_IN_BOUNDS
        makes them an error in the emulator.
      predicate: scalar bool, uniform in the warpgroup; False skips the copy, its
        arrival and its bytes.

    Raises:
      MemorySpaceError: an operand lies elsewhere, or no barrier is given.
      ShapeError, DTypeError: source and destination differ.
      UnsupportedError: leader_tracked.

    Example:
      >>> plgpu.copy_gmem_to_smem(x_gmem.at[plgpu.ds(i * 64, 64)], x_smem, barrier)
      >>> plgpu.barrier_wait(barrier)
    """
    who = "copy_gmem_to_smem"
    ops.require_space(src, types.GMEM, who, "the source")
    ops.require_space(dst, types.SMEM, who, "the destination")
    ops.require_same(src, dst, who)
    if barrier is None:
        raise errors.MemorySpaceError(
            f"{who}: there is no barrier",
            expected="a barrier that the copy completes on",
            got="barrier=None",
            hint="declare plgpu.Barrier() in scratch_types and pass it",
            where=_jax.where_now(),
        )
    ops.require_one_barrier(barrier, who)
    if leader_tracked is not None:
        raise errors.UnsupportedError(
            f"{who}: leader_tracked is not supported yet",
            expected="leader_tracked=None",
            got=repr(leader_tracked),
            hint="leave it out",
            where=_jax.where_now(),
        )
    axes = (collective_axes,) if isinstance(collective_axes, str) else collective_axes
    if predicate is not None:
        predicate = ops.require_scalar_bool(predicate, who)
    ops.bind(
        copy_gmem_to_smem_p,
        {
            "src": ops.operand(src),
            "dst": ops.operand(dst),
            "barrier": ops.operand(barrier),
            "predicate": predicate,
        },
        oob_mode=oob_mode or types.OOBFillMode.ZEROS,
        collective_axes=tuple(axes or ()),
    )


def copy_smem_to_gmem(
    src: Any,
    dst: Any,
    predicate: Any = None,
    *,
    commit_group: bool = True,
    reduction_op: str | None = None,
) -> None:
    """Starts an asynchronous copy from SMEM to GMEM.

    PTX: cp.async.bulk.tensor.global.shared::cta.bulk_group. Since: sm_90.

    Issued by a warpgroup, or inside of `warp_map` by a warp; one elected lane starts
    the copy. Values written to `src` by threads need a `commit_smem()` before it.
    `wait_smem_to_gmem` waits for it. What lies outside of the array is not written.

    Args:
      src: SMEM reference or a part of one.
      dst: GMEM reference of the same shape and dtype.
      predicate: scalar bool, uniform in the warpgroup; False skips the copy.
      commit_group: close the current group of copies after this one.
      reduction_op: not supported yet.

    Raises:
      MemorySpaceError: an operand lies elsewhere.
      ShapeError, DTypeError: source and destination differ.
      UnsupportedError: a reduction.
    """
    who = "copy_smem_to_gmem"
    ops.require_space(src, types.SMEM, who, "the source")
    ops.require_space(dst, types.GMEM, who, "the destination")
    ops.require_same(src, dst, who)
    if reduction_op is not None:
        raise errors.UnsupportedError(
            f"{who}: reduction_op is not supported yet",
            expected="reduction_op=None",
            got=repr(reduction_op),
            hint="load, combine and store instead",
            where=_jax.where_now(),
        )
    if predicate is not None:
        predicate = ops.require_scalar_bool(predicate, who)
    ops.bind(
        copy_smem_to_gmem_p,
        {"src": ops.operand(src), "dst": ops.operand(dst), "predicate": predicate},
        commit_group=bool(commit_group),
    )


def wait_smem_to_gmem(n: int, wait_read_only: bool = False) -> None:
    """Waits until at most `n` groups of copies to GMEM are under way.

    PTX: cp.async.bulk.wait_group[.read]. Since: sm_90.

    Issued by the warpgroup, or warp, that started the copies; afterwards all its
    threads may overwrite the copies' SMEM sources. Inside of `warp_map` each warp has
    groups of its own; a warpgroup waits for those of its warps too.

    Args:
      n: groups that may still be under way.
      wait_read_only: wait only until the sources have been read, not until the
        destinations are written.

    Raises:
      ArgumentError: `n` is no non-negative integer.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise errors.ArgumentError(
            "wait_smem_to_gmem: n is no number of groups",
            expected="a Python integer, 0 or more",
            got=repr(n),
            hint="wait_smem_to_gmem(0) waits for all of them",
            where=_jax.where_now(),
        )
    ops.bind(wait_smem_to_gmem_p, {}, n=n, wait_read_only=bool(wait_read_only))


def commit_smem_to_gmem_group() -> None:
    """Closes the current group of copies to GMEM.

    PTX: cp.async.bulk.commit_group. Since: sm_90.

    Issued by a warpgroup, or inside of `warp_map` by a warp, after copies started with
    `commit_group=False`.

    Raises:
      KernelError: called outside of a kernel.
    """
    ops.bind(commit_group_p, {})


def commit_smem() -> None:
    """Makes the threads' writes to SMEM visible to TMA and the tensor cores.

    PTX: fence.proxy.async.shared::cta and a barrier of who issues it. Since: sm_90.

    Issued by a warpgroup, or inside of `warp_map` by a warp for what it has written
    itself: call it after storing to SMEM and before a copy or an MMA
    reads what was stored.

    Raises:
      KernelError: called outside of a kernel.
    """
    ops.bind(commit_smem_p, {})
