# SPDX-License-Identifier: Apache-2.0
"""TMA: asynchronous copies between GMEM and SMEM, their groups and fences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import jax.numpy as jnp

from pallas_gpu import arch, errors, expect, types
from pallas_gpu.layouts.gmem.line import require_line
from pallas_gpu.layouts.gmem.tma_start import require_start
from pallas_gpu.primitives import _engines, cluster, cp_async, rows
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.copies import im2col, pairs, views
from pallas_gpu.types.copies.reductions import lacks_tensor_map

__all__ = [
    "copy_gmem_to_smem",
    "copy_smem_to_gmem",
    "commit_gmem",
    "commit_smem",
    "commit_smem_to_gmem_group",
    "wait_smem_to_gmem",
]


def _needs_of_pairs(op: Any) -> Iterator[tuple[arch.Feature, str]]:
    if op.params["leader_tracked"] is not None:
        yield arch.Feature.TCGEN05, "a copy with leader_tracked"


copy_gmem_to_smem_p = registry.define(
    "copy_gmem_to_smem",
    "tma",
    reads=("src",),
    writes=("dst", "barrier"),
    clipped=("src",),
    remote=("src",),
    asynchronous=True,
    releases=True,
    feature=arch.Feature.TMA,
    needs=_needs_of_pairs,
)
copy_smem_to_gmem_p = registry.define(
    "copy_smem_to_gmem",
    "tma",
    reads=("src",),
    writes=("dst",),
    clipped=("dst",),
    remote=("dst",),
    multicast=("dst",),
    asynchronous=True,
    feature=arch.Feature.TMA,
)
wait_smem_to_gmem_p = registry.define("wait_smem_to_gmem", "tma", waits=True)
commit_group_p = registry.define("commit_smem_to_gmem_group", "tma")
commit_smem_p = registry.define("commit_smem", "tma")
# Not public: `memory.fences` inserts it.
fence_smem_p = registry.define("fence_smem", "tma")
commit_gmem_p = registry.define("commit_gmem", "tma")

# PTX ISA, createpolicy: primary priorities.
CacheHint = Annotated[
    str | None, expect.choice(None, "evict_first", "evict_normal", "evict_last")
]


@expect.arguments(
    leader_tracked=expect.optional(
        expect.instance(
            types.CopyPartition, written="plgpu.CopyPartition.PARTITIONED(axis)"
        )
    ),
    partitioned_axis=expect.optional(expect.integer(0)),
)
def copy_gmem_to_smem(
    src: types.Ref,
    dst: types.Ref,
    barrier: types.Ref | None = None,
    *,
    collective_axes: str | Sequence[str] | None = None,
    leader_tracked: types.CopyPartition | None = None,
    partitioned_axis: int | None = None,
    oob_mode: types.OOBFillMode | None = None,
    predicate: ops.Predicate = None,
    cache_hint: CacheHint = None,
    implementation: types.AsyncCopyImplementation | None = None,
) -> None:
    """Starts an asynchronous copy from GMEM to SMEM.

    PTX: cp.async.bulk.tensor.shared::cluster.global.mbarrier; without .tensor for bytes
    that are adjacent in both memories and in bounds; cp.async.shared.global for what
    TMA cannot address; .tile::gather4 for rows that indices name; .im2col for windows.
    Since: sm_90, and sm_100a for .tile::gather4.

    Issued by a warpgroup, or inside `warp_map` by a warp; one elected lane starts a
    copy by TMA, all lanes one by cp.async. It arrives on the barrier once and, by TMA,
    adds the copy's bytes to the current phase; `barrier_wait` on that barrier makes the
    data visible. Elements outside the array are read as zero; an integer index must be
    in bounds.

    Args:
      src: GMEM reference or a part of one. TMA carries what is known to start at a
        multiple of 16 bytes: write a dynamic start as a product, or promise it with
        `multiple_of`. `x.at[rows]`, with an array of indices, is the rows in that
        order: each is a copy of its own, or, on sm_100a, four are one, if their number
        is a multiple of 4 and four rows, or those of a tile, are adjacent in SMEM and
        multiples of 128 bytes, of at most 2048 bytes a row. A part of `im2col_ref` is
        a pixel of each of some windows. `x.reshape(...)` and
        `x.bitcast(dtype)`, with indices before and after, are parts of the same array
        in another shape or type: of the dimensions that are merged or split all but
        the first are whole, unless `dst` can be reshaped instead.
      dst: SMEM reference of the same shape and dtype, reshaped in the same way: a tiled
        one before its tiles, or at multiples of them.
      barrier: one barrier. None: cp.async carries the copy, and `wait_gmem_to_smem`
        waits for it.
      collective_axes: cluster axes of a multicast: all CTAs along them call this with
        the same source; each loads a part and multicasts it to all of them, at the same
        offset in their SMEM, and every CTA's barrier counts all the bytes.
      leader_tracked: `CopyPartition.PARTITIONED(axis)` or `.REPLICATED`: the two CTAs
        along `collective_axes`, the last cluster axis that is not of size 1, call this
        with the same source. The leader's barrier, that of index 0, gets one arrival
        and counts the bytes of both CTAs; the other CTA's barrier gets none.
        PARTITIONED: each loads half of the source, divided along one of its dimensions,
        those indexed by integers not counted. REPLICATED: each copies half of it to
        both. PTX: .cta_group::2. Since: sm_100a.
      partitioned_axis: older spelling of `leader_tracked=PARTITIONED(axis)`.
      oob_mode: what the elements outside the array are. None (default) and ZEROS: zero;
        NAN: NaN, in a float type of 16 bits or more, by TMA alone; UNDEFINED:
        undefined. PROMISE_IN_BOUNDS: there are none. The emulator reports a broken
        promise, a use of undefined elements and, for None, a copy that lies entirely
        outside.
      predicate: scalar bool, uniform in the warpgroup; False skips the copy and its
        bytes: the arrival on the barrier remains.
      cache_hint: how the L2 cache treats the source: "evict_first" for what is read
        once, "evict_last" for what others read again, "evict_normal". A hint for copies
        by TMA. PTX: .L2::cache_hint. Since: sm_90.
      implementation: what carries the copy. None (default): TMA if it can address both
        sides, and cp.async if not, or without a barrier. With TMA, and in a multicast,
        a dynamic start is the author's promise, which the emulator checks.

    Raises:
      MemorySpaceError: an operand is in another space, or TMA has no barrier.
      ShapeError, DTypeError: source and destination differ.
      UnsupportedError: neither side has the shape of the other in its array.
      ArgumentError, UnsupportedError: the CTAs of leader_tracked are not such a pair.
      DTypeError, UnsupportedError: elements without NaN, or a copy by threads, with
        `OOBFillMode.NAN`.
      TargetError: leader_tracked on a target without tcgen05.

    Example:
      >>> plgpu.copy_gmem_to_smem(x_gmem.at[plgpu.ds(i * 64, 64)], x_smem, barrier)
      >>> plgpu.barrier_wait(barrier)
    """
    who = "copy_gmem_to_smem"
    ops.require_space(src, types.GMEM, who, "the source")
    ops.require_space(dst, types.SMEM, who, "the destination")
    axes = tuple(collective_axes or ())
    partition = pairs.partition_of(leader_tracked, partitioned_axis, axes, who)
    src = pairs.own_part(src, partition, axes, who)
    ops.require_same(src, dst, who)
    one_barrier = None if barrier is None else ops.one_barrier(barrier, who)
    pixels = im2col.split(src)
    if pixels is not None:
        im2col.require_alone(
            barrier is None
            or any((axes, partition, oob_mode, cache_hint, implementation))
        )
        im2col.load(*pixels, dst, one_barrier, predicate)
        return
    found = rows.split(src, who)
    if found is not None:
        others = collective_axes, oob_mode, implementation
        rows.require_alone(any(x is not None for x in others), who)
        rows.gather(*found, dst, one_barrier, predicate)
        return
    src, dst = views.pair(src, dst, who, as_declared=bool(axes))
    by_threads = _engines.threads_load(
        src,
        dst,
        barrier,
        collective_axes,
        implementation,
        who,
        in_bounds=oob_mode is types.OOBFillMode.PROMISE_IN_BOUNDS,
    )
    if oob_mode is types.OOBFillMode.NAN:
        _engines.require_nan_fill(src, by_threads, who)
    if by_threads:
        cp_async.load(src, dst, one_barrier, predicate, oob_mode)
        return
    ops.bind(
        copy_gmem_to_smem_p,
        {"src": src, "dst": dst, "barrier": one_barrier, "predicate": predicate},
        oob_mode=oob_mode,
        collective_axes=axes,
        leader_tracked=partition,
        cache_hint=cache_hint,
    )


@expect.arguments(reduction_op=expect.choice(None, *types.REDUCTIONS))
def copy_smem_to_gmem(
    src: types.Ref,
    dst: types.Ref,
    predicate: ops.Predicate = None,
    *,
    commit_group: bool = True,
    reduction_op: str | None = None,
    cache_hint: CacheHint = None,
) -> None:
    """Starts an asynchronous copy from SMEM to GMEM.

    PTX: cp.async.bulk.tensor.global.shared::cta.bulk_group, or
    cp.reduce.async.bulk.tensor, without .tensor for bytes that are adjacent in both
    memories and in bounds; ld.shared and st.global for what TMA cannot address;
    .tile::scatter4 for rows that indices name. Since: sm_90, and sm_100a for
    .tile::scatter4.

    Issued by a warpgroup, or inside `warp_map` by a warp; one elected lane starts a
    copy by TMA. What TMA cannot address all lanes copy, before they continue. Values
    written to `src` by threads need a `commit_smem()` before it. `wait_smem_to_gmem`
    waits for it. Elements outside the array are not written.

    With `reduction_op` it combines each element with the one in GMEM, atomically:
    copies of several CTAs may do so at once, in any order. The kernel orders them with
    all other accesses, `atomic_add` included: threads and copies access memory through
    different proxies.

    Args:
      src: SMEM reference or a part of one.
      dst: GMEM reference of the same shape and dtype, or a part of one that starts in
        the array. TMA carries what is known to start at a multiple of 16 bytes, as for
        `copy_gmem_to_smem`; with a reduction that is the author's promise.
        `out.at[rows]`, with an array of different indices, is these rows; on sm_100a
        four are one copy, as of `copy_gmem_to_smem`. Both sides may be reshaped and
        bitcast, as there.
      predicate: scalar bool, uniform in the warpgroup; False skips the copy.
      commit_group: whether to close the current group of copies after this one.
      reduction_op: None (default): GMEM is overwritten. "add": int32, uint32, int64,
        uint64, float32 (subnormals may count as 0), float16, bfloat16, and float64,
        of adjacent elements, in bounds at a dynamic start, too. "min", "max":
        integers of 32 and 64 bits, float16, bfloat16 (of a number and a NaN the
        number). "umin", "umax", "smin", "smax": these integers, compared as unsigned or
        signed ones. "and", "or", "xor": these integers. "inc", "dec": int32 and uint32,
        as unsigned numbers; "inc" makes of `old` 0 if `old >= new`, else `old + 1`;
        "dec" makes `new` of it if `old == 0` or `old > new`, else `old - 1`.
      cache_hint: as of `copy_gmem_to_smem`, for the destination.

    Raises:
      MemorySpaceError: an operand is in another space.
      ShapeError, DTypeError: source and destination differ.
      UnsupportedError: neither side has the shape of the other in its array.
      DTypeError: the reduction does not exist for the elements.

    Example:
      >>> plgpu.copy_smem_to_gmem(partial_smem, total_gmem, reduction_op="add")
      >>> plgpu.wait_smem_to_gmem(0)
    """
    who = "copy_smem_to_gmem"
    ops.require_space(src, types.SMEM, who, "the source")
    ops.require_space(dst, types.GMEM, who, "the destination")
    ops.require_same(src, dst, who)
    if reduction_op is not None:
        _require_reduction(reduction_op, dst, who)
        reduction_op = types.signed_reduction(reduction_op, dst.dtype)
    found = rows.split(dst, who)
    if found is not None:
        rows.require_alone(reduction_op is not None, who)
        rows.scatter(src, *found, predicate, commit_group)
        return
    dst, src = views.pair(dst, src, who)
    if reduction_op is None and _engines.threads_store(src, dst, who):
        cp_async.store(src, dst, predicate, commit_group)
        return
    ops.bind(
        copy_smem_to_gmem_p,
        {"src": src, "dst": dst, "predicate": predicate},
        commit_group=commit_group,
        reduction_op=reduction_op,
        cache_hint=cache_hint,
    )


def _require_reduction(reduction: str, dst: Any, who: str) -> None:
    """Raises DTypeError unless a copy can combine these elements."""
    name = jnp.dtype(dst.dtype).name
    if name in types.REDUCTIONS[reduction].elements:
        return
    others = [op for op, row in types.REDUCTIONS.items() if name in row.elements]
    raise errors.DTypeError(
        f"{who}: no copy combines these elements by {reduction!r}",
        expected=", ".join(types.REDUCTIONS[reduction].elements),
        got=types.describe(dst),
        hint=f"for {name} there are {', '.join(others)}"
        if others
        else "combine values in registers with plgpu.atomic_add and its relatives",
    )


@expect.arguments(
    n=expect.integer(0, hint="wait_smem_to_gmem(0) waits for all of them")
)
def wait_smem_to_gmem(n: int, wait_read_only: bool = False) -> None:
    """Waits until at most `n` groups of copies to GMEM are pending.

    PTX: cp.async.bulk.wait_group[.read]. Since: sm_90.

    Issued by the warpgroup, or warp, that started the copies; afterwards all its
    threads may overwrite the copies' SMEM sources. Inside `warp_map` each warp has its
    own groups; a warpgroup also waits for those of its warps.

    Args:
      n: maximum number of pending groups.
      wait_read_only: whether to wait only until the sources have been read, not until
        the destinations have been written.

    Raises:
      ArgumentError: `n` is negative.
    """
    ops.bind(wait_smem_to_gmem_p, {}, n=n, wait_read_only=wait_read_only)


def commit_smem_to_gmem_group() -> None:
    """Closes the current group of copies to GMEM.

    PTX: cp.async.bulk.commit_group. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp, after copies started with
    `commit_group=False`.

    Raises:
      KernelError: called outside a kernel.
    """
    ops.bind(commit_group_p, {})


def commit_smem() -> None:
    """Makes the threads' writes to SMEM visible to TMA and the tensor cores.

    PTX: fence.proxy.async.shared::cta and a barrier of the issuer. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp: call it after storing to SMEM
    and before a copy or an MMA reads the stored values. It covers the issuer's writes,
    and those that it has waited for at a barrier. Before a copy overwrites what threads
    have loaded or stored, a fence is automatic; with `unsafe_no_auto_barriers`, call
    this then, too.

    Raises:
      KernelError: called outside a kernel.
    """
    ops.bind(commit_smem_p, {})


def commit_gmem() -> None:
    """Makes the threads' writes to GMEM visible to TMA.

    PTX: fence.proxy.async.global and a barrier of the issuer. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp: call it after storing to a
    result and before a copy reads the stored values, or overwrites them. It covers the
    issuer's writes, and those that it has waited for at a barrier. Values that a copy
    has written need none.

    Raises:
      KernelError: called outside a kernel.
    """
    ops.bind(commit_gmem_p, {})


# --- the complete kernel --------------------------------------------------------------


@registry.checks(copy_gmem_to_smem_p, copy_smem_to_gmem_p)
def _check_copy(op: Any, mesh: types.Mesh) -> None:
    gmem, smem = op.access_to(types.GMEM), op.access_to(types.SMEM)
    load, name, near = smem.writes, op.name, _engines.Side.accessed(smem)
    pieces, axes, mode = 1, (), None
    if load:
        axes, mode = op.params["collective_axes"], op.params["oob_mode"]
        pieces = cluster.require_axes(axes, mesh, name)
        partition = op.params["leader_tracked"]
        if partition is not None:
            cluster.require_pair(axes, mesh, name, "leader_tracked")
        if isinstance(partition, types.CopyPartition.PARTITIONED):
            pieces = 1
    _engines.check_copy(
        _engines.Side.accessed(gmem),
        near,
        pieces,
        allow_line=not axes,
        in_bounds=mode is types.OOBFillMode.PROMISE_IN_BOUNDS,
    )
    # The default mode of a load refuses what can only give zeros.
    if mode is None:
        _engines.require_some_inside(gmem, name)
    if not load and op.params["reduction_op"] and lacks_tensor_map(gmem.dtype):
        what = f"{name}: a sum of float64"
        require_line(gmem.window, near.layout, near.window, what)
    bits = types.itemsize_bits(gmem.dtype)
    require_start(gmem.window, bits, name, store=not load)
