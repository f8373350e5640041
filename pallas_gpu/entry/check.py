# SPDX-License-Identifier: Apache-2.0
"""The one pass over a finished jaxpr: what tracing could not see.

JAX checks neither bounds of references nor whether an operation exists on a GPU, and
abstract evaluation is memoised, so it is no place for checks. The pass runs once for a
traced body, before emulation and lowering alike: what passes the emulator also lowers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

import pallas_gpu.layouts as layouts
from pallas_gpu import _jax, errors, types
from pallas_gpu.entry import check_warp, check_wgmma
from pallas_gpu.layouts.smem.window import contiguous_layout
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import tma
from pallas_gpu.primitives.registers import load_p
from pallas_gpu.primitives.warp import warp_map_p

_REF_ACCESSES = ("get", "swap", "addupdate")

# JAX's collectives over a mesh axis: they trace inside a kernel and mean nothing there.
_COLLECTIVES = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather",
    "all_to_all", "reduce_scatter", "pbroadcast", "pvary", "all_gather_invariant",
}  # fmt: skip


def check_jaxpr(jaxpr: _jax.Jaxpr, mesh: types.Mesh, *, in_warp: bool = False) -> None:
    """Checks every equation, those of nested jaxprs included.

    Args:
      jaxpr: a body, or a part of one.
      mesh: shape of the launch.
      in_warp: a single warp runs it, inside of a warp_map.

    Raises:
      OutOfBoundsError: a static index outside of its reference.
      MemorySpaceError: a barrier is read or written as an array.
      UnsupportedError: an operation that has no form in a kernel.
      LayoutError: a copy that TMA cannot carry, or a part of an accumulator that has
        no registers of its own.
    """
    for eqn in jaxpr.eqns:
        try:
            if in_warp:
                check_warp.check_equation(eqn)
            _check_equation(eqn, mesh)
            inside = in_warp or eqn.primitive is warp_map_p
            # Functions of jax.numpy are jitted: their equations have no line of the
            # kernel's, so the call's line has to do.
            for inner in _jax.jaxprs_in_params(eqn.params):
                check_jaxpr(inner, mesh, in_warp=inside)
        except errors.PallasGpuError as error:
            raise error.with_location(_jax.where(eqn)) from None


def _check_equation(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    name = eqn.primitive.name
    if name in _COLLECTIVES:
        _refuse_collective(eqn, mesh)
    if name == "axis_index":
        require_axis_name(eqn.params["axis_name"], mesh)
    elif name == "scan":
        _check_scan(eqn)
    elif name == "slice" and any(s != 1 for s in eqn.params["strides"] or ()):
        raise errors.UnsupportedError(
            "a slice of an array in registers has a stride",
            expected="stride 1",
            got=f"strides {eqn.params['strides']}",
            hint="slice the reference in a loop, or mask with jnp.where",
        )
    elif eqn.params.get("accuracy") is not None:
        raise errors.UnsupportedError(
            f"{name}: accuracy is not supported in a kernel",
            expected="accuracy=None",
            got=str(eqn.params["accuracy"]),
            hint="leave it out; CompilerParams(approx_math=True) asks for fast forms",
        )
    elif name == "while":
        body, consts = eqn.params["body_jaxpr"].jaxpr, eqn.params["body_nconsts"]
        _check_carried_refs(body.invars[consts:], body.outvars)
    elif name in _REF_ACCESSES:
        _check_access(eqn)
    elif eqn.primitive in (tma.copy_gmem_to_smem_p, tma.copy_smem_to_gmem_p):
        _check_copy(eqn, mesh)
    elif name in registry.PRIMITIVES:
        for operand in _ref_operands(eqn):
            window = _window_in_bounds(operand.ref, operand.transforms, name)
            if isinstance(operand.ref.aval, types.AccumulatorRef):
                check_wgmma.check_part(window, stored=False)
            if eqn.primitive is load_p:
                _check_load(operand.ref.aval, window, eqn.params["layout"])
    elif not _known(eqn.primitive):
        raise errors.UnsupportedError(
            f"the operation {name} is not supported in a kernel",
            expected="an operation of the coverage table (docs/coverage.md)",
            got=f"{name} on {', '.join(str(v.aval) for v in eqn.invars)}",
            hint="compute it outside of the kernel, or from supported operations",
        )


def _refuse_collective(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    raise errors.UnsupportedError(
        f"lax.{eqn.primitive.name} over {axes} inside a kernel",
        expected="operations of one thread; the kernel's axes "
        f"{[name for name, _ in mesh.axes]} only name positions",
        got=f"a collective over {axes}",
        hint="combine values through GMEM or SMEM, or reduce outside of the kernel",
    )


def require_axis_name(name: Any, mesh: types.Mesh, where: str | None = None) -> None:
    """Raises AxisNameError unless the kernel has an axis of that name."""
    names = [axis for axis, _ in mesh.axes]
    if name in names:
        return
    raise errors.AxisNameError(
        f"the kernel has no axis that is called {name!r}",
        expected=f"one of {names}" if names else "a kernel with grid_names",
        got=repr(name),
        hint="name it in grid_names, cluster_names or thread_name",
        where=where,
    )


def _check_scan(eqn: _jax.JaxprEqn) -> None:
    """Loops carry values; arrays that a scan would slice or stack have no registers."""
    consts, carries = _jax.scan_arity(eqn.params)
    sliced, stacked = len(eqn.invars) - consts - carries, len(eqn.outvars) - carries
    if sliced or stacked:
        raise errors.UnsupportedError(
            "lax.scan over arrays is not supported in a kernel",
            expected="a loop that carries values: lax.fori_loop, plgpu.loop",
            got=f"a scan with {sliced} arrays to slice and {stacked} to stack",
            hint="index a reference with the loop's counter",
        )
    body = eqn.params["jaxpr"].jaxpr
    _check_carried_refs(body.invars[consts:], body.outvars)
    length, unroll = eqn.params["length"], int(eqn.params["unroll"])
    if length % max(unroll, 1):
        raise errors.UnsupportedError(
            "a loop's unroll does not divide its length",
            expected=f"a divisor of {length}",
            got=unroll,
            hint="choose another unroll",
        )


def _check_carried_refs(before: Sequence[Any], after: Sequence[Any]) -> None:
    for old, new in zip(before, after, strict=True):
        if isinstance(old.aval, _jax.AbstractRef) and new is not old:
            raise errors.UnsupportedError(
                "a loop changes which reference it carries",
                expected="references that stay the same from step to step",
                got=f"another reference than the {types.describe(old.aval)} before",
                hint="index one reference with the loop's counter",
            )


def _known(primitive: Any) -> bool:
    lane = registry.rules(registry.RuleKind.LANE)
    # While the lowering has not registered itself there is nothing to compare with.
    return not lane or primitive in lane


def _check_access(eqn: _jax.JaxprEqn) -> None:
    aval = eqn.invars[0].aval
    name = eqn.primitive.name
    if isinstance(aval, types.BarrierRef):
        raise errors.MemorySpaceError(
            "a barrier is read or written like an array",
            expected="barrier_wait, barrier_arrive or a copy on the barrier",
            got="an index expression on a barrier",
            hint="choose a barrier of an array with barrier.at[i]",
        )
    leaves = eqn.invars[1:] if name == "get" else eqn.invars[2:]
    transforms = jax.tree.unflatten(
        eqn.params["tree"], [_static_value(v) for v in leaves]
    )
    window = _window_in_bounds(eqn.invars[0], transforms, name)
    if isinstance(aval, types.AccumulatorRef):
        check_wgmma.check_part(window, stored=name != "get")
    _check_element(aval, window)
    if name == "get":
        _check_load(aval, window, None)


def _check_element(aval: Any, window: Window) -> None:
    """Refuses single elements of tiled SMEM, whose addresses no emitter computes."""
    tiled = isinstance(aval, types.KernelRef) and bool(aval.transforms)
    if window.shape == () and tiled:
        raise errors.UnsupportedError(
            "a single element of a tiled or swizzled SMEM array is accessed",
            expected="whole tiles, or an array declared without transforms",
            got=f"one element of an array of shape {tuple(aval.shape)}",
            hint="load the array and use it in registers, or read from GMEM",
        )


def _check_load(aval: Any, window: Window, layout: Any) -> None:
    """Raises LayoutError unless the loaded array has a register layout."""
    if window.shape == () or isinstance(aval, types.AccumulatorRef):
        return
    if layout is not None:
        description = layouts.to_layout(layout)
        # A strided layout that is not linear in coordinates still has a place for each.
        if not isinstance(description, layouts.WGStridedLayout):
            description.linear(window.shape)
        return
    tiled = any(isinstance(t, types.TilingTransform) for t in aval.transforms)
    if tiled and len(window.shape) == 2 and window.shape[0] % types.WGMMA_ROWS == 0:
        return
    layouts.default_layout(window.shape, types.itemsize_bits(aval.dtype))


def _ref_operands(eqn: _jax.JaxprEqn) -> list[ops.RefOperand]:
    if "tree" not in eqn.params:
        return []
    operands = ops.unflatten(eqn.params["tree"], list(map(_static_value, eqn.invars)))
    if not isinstance(operands, dict):
        return []
    return [x for x in operands.values() if isinstance(x, ops.RefOperand)]


def _static_value(var: Any) -> Any:
    """A literal index becomes its number; everything else stays a variable."""
    if isinstance(var, _jax.Literal) and getattr(var.aval, "shape", None) == ():
        return int(var.val)
    return var


def _window_in_bounds(ref: Any, transforms: Any, name: str) -> Window:
    """Resolves the steps one by one; each has to stay inside what it is applied to."""
    shape = tuple(ref.aval.shape)
    inner = shape
    for step in transforms:
        window = types.resolve(inner, (step,))
        bad = window.over_the_edge()
        if bad:
            raise _out_of_bounds(window, bad[0], name)
        inner = window.shape
    return types.resolve(shape, transforms)


def _out_of_bounds(window: Window, axis: int, name: str) -> errors.OutOfBoundsError:
    start, size, shape = window.starts[axis], window.sizes[axis], window.array_shape
    n = shape[axis]
    if axis not in window.axes:
        expected = f"0 to {n - 1} in dimension {axis} of {shape}"
        got = f"index {start}"
    else:
        expected = f"a range inside of 0 to {n} in dimension {axis} of shape {shape}"
        known = isinstance(start, int)
        got = f"{start} to {start + size}" if known else f"a range of {size}"
    return errors.OutOfBoundsError(
        f"{_words(name)} outside of the reference",
        expected=expected,
        got=got,
        hint="check the index, or the shape the reference was declared with",
    )


def _words(name: str) -> str:
    return {"get": "a read", "swap": "a write", "addupdate": "an update"}.get(
        name, name
    )


def _check_copy(eqn: _jax.JaxprEqn, mesh: types.Mesh) -> None:
    operands = ops.unflatten(eqn.params["tree"], list(map(_static_value, eqn.invars)))
    src, dst = operands["src"], operands["dst"]
    load = eqn.primitive is tma.copy_gmem_to_smem_p
    gmem, smem = (src, dst) if load else (dst, src)
    name = eqn.primitive.name
    smem_window = _window_in_bounds(smem.ref, smem.transforms, name)
    # A range over the edge of the array is legal: TMA fills with zeros and clips.
    gmem_window = gmem.window(gmem.ref.aval.shape)
    pieces = 1
    if load:
        axes = eqn.params["collective_axes"]
        _require_cluster_axes(axes, mesh, name)
        sizes = dict(mesh.axes)
        pieces = math.prod(sizes[a] for a in axes)
    check_tma(gmem.ref.aval, gmem_window, smem.ref.aval, smem_window, pieces)


def _require_cluster_axes(axes: Sequence[str], mesh: types.Mesh, who: str) -> None:
    unknown = [a for a in axes if a not in mesh.cluster_names]
    if unknown:
        raise errors.AxisNameError(
            f"{who}: no cluster axis is named {unknown[0]!r}",
            expected=f"one of {tuple(mesh.cluster_names)}"
            if mesh.cluster_names
            else "a kernel with cluster=(...) and cluster_names=(...)",
            got=tuple(axes),
            hint="collective_axes names axes of the kernel's cluster",
        )
    if len(set(axes)) != len(axes):
        raise errors.ArgumentError(
            f"{who}: collective_axes names an axis twice",
            expected="different cluster axes",
            got=tuple(axes),
            hint="name each axis once",
        )


def check_tma(
    gmem_aval: Any,
    gmem_window: Window,
    smem_aval: Any,
    smem_window: Window,
    pieces: int = 1,
) -> None:
    """Raises LayoutError unless TMA can carry the copy, in as many equal pieces."""
    for what, window in (("GMEM", gmem_window), ("SMEM", smem_window)):
        if window.is_transposed:
            raise errors.UnsupportedError(
                f"a copy of a transposed {what} reference is not supported",
                expected="operands with their dimensions in order",
                got=f"dimensions in the order {window.order}",
                hint="copy it as it is, and transpose when loading from SMEM",
            )
    if math.prod(gmem_window.shape) == 0:
        raise errors.ShapeError(
            "a copy of nothing",
            expected="at least one element",
            got=f"shape {gmem_window.shape}",
            hint="leave the copy out",
        )
    layout = types.smem_layout(smem_aval.shape, smem_aval.dtype, smem_aval.transforms)
    layouts.plan_copy(
        tuple(gmem_aval.shape),
        types.itemsize_bits(gmem_aval.dtype),
        gmem_window.sizes,
        gmem_window.squeezed,
        contiguous_layout(layout, smem_window),
        pieces=pieces,
    )
