# SPDX-License-Identifier: Apache-2.0
"""The axes of requests for the work of other clusters."""

from __future__ import annotations

from pallas_gpu import errors, types
from pallas_gpu.entry.check import references
from pallas_gpu.entry.check.positions import require_axis_name
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.grids import launch_control
from pallas_gpu.program.nodes import Op


@registry.checks(launch_control.try_cluster_cancel_p)
def _check_request(op: Op, mesh: types.Mesh) -> None:
    references.window_in_bounds(op.operands["result"], op.name)
    axes = op.params["collective_axes"]
    allowed = {*mesh.cluster_names, mesh.thread_name} - {None}
    if not set(axes) <= allowed or len(set(axes)) < len(axes):
        raise errors.AxisNameError(
            "try_cluster_cancel: collective_axes names other axes than those of the "
            "cluster and the threads",
            expected=f"some of {sorted(map(str, allowed))}, each once",
            got=tuple(axes),
            hint="name all axes of the cluster, and the thread axis if several "
            "warpgroups call it",
        )
    clusters = zip(mesh.cluster_names, mesh.cluster, strict=True)
    if any(size > 1 and name not in axes for name, size in clusters):
        raise errors.ArgumentError(
            "try_cluster_cancel: every CTA of the cluster would make a request",
            expected=f"collective_axes with {list(mesh.cluster_names)}",
            got=tuple(axes),
            hint="work is taken over by the cluster as a whole: name all of its axes",
        )


@registry.checks(launch_control.query_cluster_cancel_p)
def _check_query(op: Op, mesh: types.Mesh) -> None:
    references.window_in_bounds(op.operands["result"], op.name)
    for name in op.params["grid_names"]:
        require_axis_name(name, mesh, None)
        if name not in mesh.grid_names:
            raise errors.AxisNameError(
                f"query_cluster_cancel: {name!r} is not an axis of the grid",
                expected=f"some of {list(mesh.grid_names)}",
                got=repr(name),
                hint="positions in the cluster and of threads stay what they are",
            )
