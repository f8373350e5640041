# SPDX-License-Identifier: Apache-2.0
"""Copies that TMA supports."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pallas_gpu import errors, types
from pallas_gpu.entry.check import references
from pallas_gpu.layouts.gmem.line import require_line
from pallas_gpu.layouts.gmem.tma_start import require_start
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import tma
from pallas_gpu.primitives._engines import Side, check_copy
from pallas_gpu.program.nodes import Access, Op
from pallas_gpu.types.copies.reductions import lacks_tensor_map


@registry.checks(tma.copy_gmem_to_smem_p, tma.copy_smem_to_gmem_p)
def _check_copy(op: Op, mesh: types.Mesh) -> None:
    gmem, smem = op.access_to(types.GMEM), op.access_to(types.SMEM)
    load, name = smem.writes, op.name
    references.window_in_bounds(smem, name)
    # A range may exceed the array: TMA reads zeros and clips writes.
    near = side(smem)
    pieces, axes, mode = 1, (), None
    if load:
        axes, mode = op.params["collective_axes"], op.params["oob_mode"]
        require_cluster_axes(axes, mesh, name)
        sizes = dict(mesh.axes)
        pieces = math.prod(sizes[a] for a in axes)
        partition = op.params["leader_tracked"]
        if partition is not None:
            require_pair(axes, mesh, name, "leader_tracked")
        if isinstance(partition, types.CopyPartition.PARTITIONED):
            pieces = 1
    check_copy(
        side(gmem),
        near,
        pieces,
        allow_line=not axes,
        in_bounds=mode is types.OOBFillMode.PROMISE_IN_BOUNDS,
    )
    # The default mode of a load refuses what can only give zeros.
    if mode is None:
        require_some_inside(gmem.window, name, "source" if load else "destination")
    if not load and op.params["reduction_op"] and lacks_tensor_map(gmem.dtype):
        what = f"{name}: a sum of float64"
        require_line(gmem.window, near.layout, near.window, what)
    bits = types.itemsize_bits(gmem.dtype)
    require_start(gmem.window, bits, name, store=not load)


def side(access: Access) -> Side:
    """Returns an operand of a copy as one side of it."""
    return Side(access.buffer.aval, access.window, access.dtype)


def require_some_inside(window: Window, who: str, what: str) -> None:
    """Raises OutOfBoundsError for a part that is known to be wholly outside."""
    ranges = zip(window.starts, window.sizes, window.array_shape, strict=True)
    for axis, (start, size, n) in enumerate(ranges):
        if isinstance(start, int) and (start >= n or start + size <= 0):
            raise errors.OutOfBoundsError(
                f"{who}: the {what} is entirely out of bounds",
                expected=f"a range that overlaps 0 to {n} in dimension {axis} of shape "
                f"{window.array_shape}",
                got=f"{start} to {start + size}",
                hint="omit the copy, check the index, or, for a load, pass "
                "oob_mode=plgpu.OOBFillMode.ZEROS if zeros are meant",
            )


def require_cluster_axes(axes: Sequence[str], mesh: types.Mesh, who: str) -> None:
    """Raises AxisNameError or ArgumentError unless these are axes of the cluster."""
    unknown = [a for a in axes if a not in mesh.cluster_names]
    if unknown:
        raise errors.AxisNameError(
            f"{who}: no cluster axis is named {unknown[0]!r}",
            expected=f"one of {tuple(mesh.cluster_names)}"
            if mesh.cluster_names
            else "a kernel with cluster=(...) and cluster_names=(...)",
            got=tuple(axes),
            hint="collective_axes must be axes of the kernel's cluster",
        )
    if len(set(axes)) != len(axes):
        raise errors.ArgumentError(
            f"{who}: collective_axes names an axis twice",
            expected="different cluster axes",
            got=tuple(axes),
            hint="name each axis once",
        )


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
