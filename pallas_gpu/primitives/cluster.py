# SPDX-License-Identifier: Apache-2.0
"""Clusters: their barrier, references to the SMEM of other CTAs, stores to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import indexed
from pallas_gpu.types import values

__all__ = ["async_store_smem", "cluster_ref", "cluster_sync"]

async_store_smem_p = registry.define(
    "async_store_smem",
    "cluster",
    writes=("ref", "barrier"),
    asynchronous=True,
    proxies=("generic",),
    releases=True,
    by_warp=False,
)

cluster_sync_p = registry.define(
    "cluster_sync", "cluster", releases=True, waits=True, by_warp=False
)

# The element types of each operation: PTX ISA, red.async. A sum of signed integers is
# that of unsigned ones.
ATOMICS: dict[str, tuple[str, ...]] = {
    "add": ("int32", "uint32", "int64", "uint64"),
    "max": ("int32", "uint32"),
    "min": ("int32", "uint32"),
    "and": ("int32", "uint32"),
    "or": ("int32", "uint32"),
    "xor": ("int32", "uint32"),
}
# CUDA programming guide, "Thread Block Clusters": the largest of all targets.
_MOST_BLOCKS = 16
# The narrowest store of st.async.
WORD_BYTES = 4


def _positions(value: Any, what: str) -> dict[str, Any]:
    """Accepts a position on each of some axes."""
    if not isinstance(value, Mapping) or not value:
        raise expect.wrong_type(
            what,
            "a position on cluster axes",
            "a dict from names of cluster axes to positions",
            value,
            'cluster_ref(ref, {"x": 1})',
        )
    names = expect.names(tuple(value), f"{what}: the axes")
    return dict(
        zip(names, (position_on_axis(x, what) for x in value.values()), strict=True)
    )


def position_on_axis(value: Any, what: str) -> Any:
    """Accepts a position on a cluster axis; returns a Python integer or an int32."""
    value = values.integer(value, what)
    if isinstance(value, int):
        if not 0 <= value < _MOST_BLOCKS:
            raise errors.OutOfBoundsError(
                f"{what}: no cluster has a CTA at this position",
                expected=f"0 to {_MOST_BLOCKS - 1}",
                got=value,
                hint="compute the position modulo the size of the axis",
            )
        return value
    if value.shape:
        raise expect.wrong_type(
            what, "a position", "an integer scalar", value, "lax.axis_index(name) ^ 1"
        )
    return jax.lax.convert_element_type(value, "int32")


@expect.arguments(block_id=_positions)
def cluster_ref(ref: types.Ref, block_id: Mapping[str, Any]) -> types.RefView:
    """Returns a reference to the same array in the SMEM of another CTA of the cluster.

    It can be read, written, indexed, and updated by atomic operations; each access is
    one by elements. Copies and matrix products take references to the CTA's own SMEM.
    Of a barrier, `barrier_arrive` arrives in that CTA alone.

    PTX: mapa, then ld.shared::cluster, st.shared::cluster, red.shared::cluster,
    atom.shared::cluster or mbarrier.arrive.shared::cluster. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` for single elements by a warp. A load is
    complete when it returns. Arrivals on a `ClusterBarrier` and waits for them, or
    `cluster_sync`, order the accesses of one CTA with those of another. What a kernel
    declares in `scratch_types` can be accessed until all CTAs of the cluster have
    ended: the compiled kernel waits for them. What `run_scoped` declares can be
    accessed until its CTA leaves the scope, which has to wait for the others.

    Args:
      ref: SMEM reference, a barrier, or a part of one.
      block_id: for each cluster axis a position: an integer or an integer scalar. On
        axes that it does not name, the CTA's own.

    Raises:
      MemorySpaceError: the reference is neither in SMEM nor a barrier.
      ArgumentTypeError: `block_id` does not map names to integers.
      AxisNameError: no cluster axis has that name.
      OutOfBoundsError: a position outside of the cluster.

    Example:
      >>> other = plgpu.cluster_ref(part_ref, {"x": 1 - lax.axis_index("x")})
      >>> total = part_ref[...] + other[...]
    """
    aval = ops.require_ref(ref, "cluster_ref", "the reference")
    if aval.memory_space is not types.BARRIERS:
        ops.require_space(ref, types.SMEM, "cluster_ref", "the reference")
    base = types.as_view(ref.at[()])
    return types.RefView(base.ref, (*base.transforms, types.ClusterStep.at(block_id)))


def cluster_sync() -> None:
    """Waits until all warpgroups of all CTAs of the cluster have called it.

    PTX: barrier.cluster.arrive, barrier.cluster.wait; barrier.sync 0 in a kernel
    without clusters, where the warpgroups of the CTA wait for each other. Since: sm_90.

    Issued by a warpgroup; each of them calls it equally often, also from branches and
    loops of its own. What they have read and written in SMEM and GMEM before comes
    before what any of them accesses after it. It does not wait for asynchronous
    copies: wait for them first. It needs no barrier in SMEM; with a `ClusterBarrier`
    some warpgroups wait for others.

    Raises:
      KernelError: called outside a kernel.
      UnsupportedError: called inside `warp_map`.

    Example:
      >>> part_ref[...] = x
      >>> plgpu.cluster_sync()
      >>> y = plgpu.cluster_ref(part_ref, {"x": 1 - lax.axis_index("x")})[...]
    """
    ops.bind(cluster_sync_p, {})


def _axes(value: Any, what: str) -> tuple[str, ...]:
    return expect.names(value, what)


@expect.arguments(
    cluster_dim=_axes,
    atomic=expect.choice(None, *ATOMICS),
    sem=expect.choice("release", "relaxed"),
)
def async_store_smem(
    src: values.Array,
    ref: types.Ref,
    barrier: types.Ref,
    *,
    cluster_idx: Any,
    cluster_dim: str | Sequence[str],
    optimized: bool | None = None,
    atomic: str | None = None,
    sem: str = "release",
) -> None:
    """Starts a store of an array to the SMEM of another CTA of the cluster.

    PTX: mbarrier.arrive.expect_tx.{release,relaxed}.cluster.shared::cluster and
    st.async.shared::cluster.mbarrier::complete_tx::bytes, or red.async. Since: sm_90.

    Issued by a warpgroup. It arrives once on the other CTA's barrier, after all earlier
    memory accesses of the warpgroup unless `sem` is "relaxed", and adds the array's
    bytes to the current phase; the other CTA's `barrier_wait` on the barrier makes the
    array visible to it. The memory must be free: let the other CTA arrive on a
    `ClusterBarrier` after its last access, and wait for it first.

    Args:
      src: array in registers.
      ref: SMEM reference of the same shape and dtype, or a part of one: that of this
        CTA, which names the same memory of the other one. Elements of 8 and 16 bits
        are stored in words of 32, so they have to be adjacent in the array's registers
        and in memory.
      barrier: one barrier of this CTA, which names that of the other one.
      cluster_idx: the other CTA's position on `cluster_dim`: an integer or an integer
        scalar, and one for each of several axes. It may be the own one.
      cluster_dim: one cluster axis or several.
      optimized: a hint about bank conflicts, which are never refused here.
      atomic: `"add"`, `"max"`, `"min"`, `"and"`, `"or"` or `"xor"` combines each
        element with the one in memory, at once; None stores it. Integers of 32 bits,
        and for sums of 64.
      sem: `"release"` (default), or `"relaxed"`: the other CTA's wait makes the array
        visible and nothing else that the issuer has written, which saves a fence that
        waits for all of its accesses to GMEM.

    Raises:
      MemorySpaceError: the reference is not in SMEM, or the barrier is not a barrier.
      ShapeError, DTypeError: the array does not fit the reference; `atomic` does not
        exist for its elements; or they do not fill words.
      AxisNameError: no cluster axis has that name.
      OutOfBoundsError: a position outside of the cluster.
      LayoutError: elements of 8 or 16 bits are not adjacent in registers, or start at
        an index that is not known to be a multiple of a word.

    Example:
      >>> plgpu.async_store_smem(
      ...     x, part_ref, full, cluster_idx=1 - lax.axis_index("x"), cluster_dim="x"
      ... )
    """
    who = "async_store_smem"
    ops.require_space(ref, types.SMEM, who, "the destination")
    one_barrier = ops.one_barrier(barrier, who)
    places = cluster_idx if expect.is_sequence(cluster_idx) else (cluster_idx,)
    if len(places) != len(cluster_dim):
        raise errors.ArgumentError(
            f"{who}: cluster_idx does not have a position for each axis",
            expected=f"{len(cluster_dim)} positions, on {tuple(cluster_dim)}",
            got=f"{len(places)}",
            hint="pass one position, or a tuple of them, in the order of cluster_dim",
        )
    found = [position_on_axis(x, f"{who}: cluster_idx") for x in places]
    view = cluster_ref(ref, dict(zip(cluster_dim, found, strict=True)))
    _check_elements(view, atomic, who)
    value = types.stored(src, view)
    operand, where, params = indexed.place(view, who, masked=False)
    window = operand.window(types.base_aval(operand.ref).shape)
    _check_words(view, window.starts[-1:], params, who)
    ops.bind(
        async_store_smem_p,
        {"ref": operand, **where, "mask": None, "value": value, "barrier": one_barrier},
        **params,
        atomic=atomic,
        sem=sem,
    )


def _check_elements(view: Any, atomic: str | None, who: str) -> None:
    dtype = jnp.dtype(view.dtype)
    if types.itemsize_bits(dtype) < 8 or dtype == jnp.bool_:
        expected = "elements of 8, 16, 32 or 64 bits"
    elif atomic is not None and dtype.name not in ATOMICS[atomic]:
        expected = ", ".join(ATOMICS[atomic])
    else:
        return
    raise errors.DTypeError(
        f"{who}: there is no such operation on these elements",
        expected=expected,
        got=types.describe(view),
        hint="convert the array, or use cluster_ref and atomic operations on it",
    )


def _check_words(view: Any, start: Any, params: Any, who: str) -> None:
    """Raises ShapeError unless narrow elements can be adjacent, word by word."""
    together = WORD_BYTES // jnp.dtype(view.dtype).itemsize
    if together <= 1:
        return
    adjacent = params["adjacent"]
    # The compiler refuses a start that is not known to be a multiple.
    if not any(isinstance(x, int) and x % together for x in start) and adjacent:
        axis, divisor = adjacent
        if params["shape"][axis] % together == 0 == divisor % together:
            return
    raise errors.ShapeError(
        f"{who}: the elements do not fill words of {8 * WORD_BYTES} bits",
        expected=f"{together} adjacent elements from a multiple of {together}, along "
        "the last dimension of the reference",
        got=types.describe(view),
        hint="store whole rows, or use cluster_ref(ref, ...)[...] = x",
    )


# --- the axes of a complete kernel ----------------------------------------------------


def require_axes(
    axes: Sequence[str], mesh: types.Mesh, who: str, hint: str = ""
) -> int:
    """Returns the number of CTAs along axes of the cluster."""
    sizes = dict(zip(mesh.cluster_names, mesh.cluster, strict=True))
    for axis in axes:
        if axis not in sizes:
            raise errors.AxisNameError(
                f"{who}: no cluster axis is named {axis!r}",
                expected=f"one of {tuple(sizes)}"
                if sizes
                else "a kernel with cluster=(...) and cluster_names=(...)",
                got=tuple(axes),
                hint=hint or "collective_axes must be axes of the kernel's cluster",
            )
    if len(set(axes)) != len(axes):
        raise errors.ArgumentError(
            f"{who}: collective_axes names an axis twice",
            expected="different cluster axes",
            got=tuple(axes),
            hint="name each axis once",
        )
    return math.prod(sizes[axis] for axis in axes)


def check_axes(op: Any, mesh: types.Mesh) -> None:
    """Checks the other CTA that an operation accesses, or with which it is a pair."""
    if op.params.get("cta_axes") and op.operands["cta"] is not None:
        who = op.name if op.primitive is async_store_smem_p else "cluster_ref"
        axes, hint = op.params["cta_axes"], "those along axes of the kernel's cluster"
        require_axes(axes, mesh, who, f"other CTAs are {hint}")
        sizes = dict(mesh.axes)
        for axis, position in zip(axes, op.operands["cta"], strict=True):
            known = getattr(position, "value", None)  # of a constant
            if known is not None and not 0 <= known < sizes[axis]:
                raise errors.OutOfBoundsError(
                    f"{who}: the cluster has no CTA at this position",
                    expected=f"0 to {sizes[axis] - 1} along {axis!r}",
                    got=int(known),
                    hint="compute the position modulo the size of the axis",
                )
    axis = op.params.get("collective_axis")
    if axis is not None:
        require_axes((axis,), mesh, op.name)
        require_pair((axis,), mesh, op.name, "collective_axis")


def require_pair(axes: Sequence[str], mesh: types.Mesh, who: str, of: str) -> None:
    """Raises UnsupportedError unless the CTAs along an axis are a pair of tcgen05."""
    # PTX ISA, cta_group::2: CTAs whose %cluster_ctarank differs in the last bit.
    names, sizes = list(mesh.cluster_names), list(mesh.cluster)
    inner = sizes[names.index(axes[0]) :]
    if inner[0] == 2 and math.prod(inner) == 2:
        return
    raise errors.UnsupportedError(
        f"{who}: the CTAs of {of} are not a pair",
        expected="a cluster axis of size 2, the last one of the cluster's axes whose "
        "size is not 1: two CTAs of adjacent ranks",
        got=f"axis {axes[0]!r} of a cluster {dict(zip(names, sizes, strict=True))}",
        hint="give that axis the last position in cluster=(...), with size 2",
    )
