# SPDX-License-Identifier: Apache-2.0
"""Operations of JAX: names of positions, collectives, carries, scatters."""

from __future__ import annotations

import math
from typing import Any

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import Op
from pallas_gpu.types.mesh import NUMBERED_AXIS

# JAX's collectives over a mesh axis: they trace inside a kernel but have no meaning.
COLLECTIVES = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather",
    "all_to_all", "reduce_scatter", "pbroadcast", "pvary", "all_gather_invariant",
}  # fmt: skip


@registry.checks(_jax.primitive_by_name("axis_index"))
def _check_axis_index(op: Op, mesh: types.Mesh) -> None:
    require_axis_name(op.params["axis_name"], mesh)


def _hint(name: Any, names: list[Any]) -> str:
    """Returns how a kernel with these axes asks for its position."""
    if any(isinstance(axis, tuple) and name in axis for axis in names):
        return (
            "lax.axis_index takes a tuple as several axes: name that axis by a string"
        )
    if any(str(name).startswith(NUMBERED_AXIS) for name in names):
        return "plgpu.program_id(0) is the position on the first axis of the grid"
    return "name it in grid_names, cluster_names or thread_name"


def require_axis_name(name: Any, mesh: types.Mesh, where: str | None = None) -> None:
    """Raises AxisNameError unless the kernel, or what encloses it, has the axis."""
    names = [axis for axis, _ in mesh.axes]
    if name in names or name in _jax.enclosing_axes():
        return
    raise errors.AxisNameError(
        f"the kernel has no axis named {name!r}",
        expected=f"one of {names}" if names else "a kernel with grid_names",
        got=repr(name),
        hint=_hint(name, names),
        where=where,
    )


def refuse_collective(op: Op, mesh: types.Mesh) -> None:
    """Raises for an operation that combines values along an axis."""
    if op.name not in COLLECTIVES:
        return
    axes = op.params.get("axes", op.params.get("axis_name"))
    raise errors.UnsupportedError(
        f"lax.{op.name} over {axes} inside a kernel",
        expected="operations within a thread; the kernel's axes "
        f"{[name for name, _ in mesh.axes]} only name positions",
        got=f"a collective over {axes}",
        hint="store what each block has to rows of its own and reduce them after the "
        "call; within a block, store to SMEM and wait for a `plgpu.Barrier`",
    )


@registry.checks(*map(_jax.primitive_by_name, ("scan", "while")))
def _check_carried_refs(op: Op, mesh: types.Mesh) -> None:
    body = op.regions[-1]
    for i, j in op.carries:
        old = body.inputs[i]
        if isinstance(old.aval, _jax.AbstractRef) and body.results[j] is not old:
            raise errors.UnsupportedError(
                "a loop changes which reference it carries",
                expected="the same reference in each iteration",
                got=f"a reference other than the initial {types.describe(old.aval)}",
                hint="index one reference with the loop's counter",
            )


@registry.checks(_jax.primitive_by_name("scatter"))
def _check_function(op: Op, mesh: types.Mesh) -> None:
    """Refuses a function of elements that may be the same: it is applied to each."""
    params, indices = op.params, op.inputs[1]
    one = math.prod(indices.shape[:-1]) == 1
    if params["update_jaxpr"] is None or params["unique_indices"] or one:
        return
    raise errors.UnsupportedError(
        "x.at[i].apply(f) with indices that may be equal is not supported in a kernel",
        expected="an index, a slice, or unique indices",
        got=f"indices of shape {tuple(indices.shape[:-1])}",
        hint="pass unique_indices=True if they are, or set f of the elements, "
        "which applies f once",
    )
