# SPDX-License-Identifier: Apache-2.0
"""Operations of JAX: names of positions, collectives, carries, sizes, scatters."""

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

# Common operations that are lowered: kernels of these can run in the emulator without
# the rules of the lowering, whose import takes longer than that of the emulator.
LOWERED = {
    "abs", "add", "add_any", "and", "axis_index", "bitcast_convert_type",
    "broadcast_in_dim", "ceil", "clamp", "concatenate", "cond", "convert_element_type",
    "copy", "cos", "cumsum", "custom_jvp_call", "custom_vjp_call", "div",
    "dynamic_slice", "eq", "erf", "exp", "exp2", "floor", "ge", "gt", "integer_pow",
    "iota", "jit", "le", "log", "log2", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "not", "or", "pow", "reduce_max", "reduce_min", "reduce_sum", "rem",
    "reshape", "round", "rsqrt", "scan", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "slice", "split",
    "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose", "while",
    "xor",
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


@registry.checks(_jax.primitive_by_name("reshape"))
def _check_size(op: Op, mesh: types.Mesh) -> None:
    """Refuses what `lax.reshape` traces, and XLA refuses."""
    old, new = op.inputs[0].shape, op.params["new_sizes"]
    if math.prod(old) != math.prod(new):
        raise errors.ShapeError(
            "an array is reshaped to another number of elements",
            expected="a shape of as many elements",
            got=f"{tuple(old)} to {tuple(new)}",
            hint="check the blocks: a reference has the shape of its block",
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


# --- what to do instead of an operation that kernels do not support -------------------
# Code in backquotes is executed by the tests, word for word.

_OUTSIDE = "compute it outside the kernel and pass the result as an argument"
_RANDOM = (
    "draw the numbers outside the kernel with jax.random and pass them as an argument"
)
_PRINT = (
    "print with `plgpu.debug_print`, or store the value to an additional output, "
    "`debug_ref[...] = x`, and look at that after the call"
)
_WINDOWS = (
    "combine shifted parts of the reference: `jnp.maximum(x_ref[0:32], x_ref[1:33])`"
)
_PARTS = "pass the real and the imaginary part as two arrays"
_REFERENCE = (
    "declare scratch with plgpu.run_scoped and plgpu.SMEM(shape, dtype), or carry the "
    "value through the loop"
)
_GROUPS = "multiply the tiles of each group with `plgpu.wgmma`, as for one product"

# By the name of the primitive.
HINTS: dict[str, str] = {
    # Products, reductions and windows
    **dict.fromkeys(("ragged_dot_general", "scaled_matmul", "scaled_dot"), _GROUPS),
    "conv_general_dilated": "add products with shifted parts of the reference: "
    "`y += w_ref[k] * x_ref[plgpu.ds(k, 32)]` in a loop over k",
    **dict.fromkeys(
        (
            "reduce_window", "reduce_window_max", "reduce_window_min",
            "reduce_window_sum", "select_and_gather_add", "select_and_scatter",
            "select_and_scatter_add",
        ),
        _WINDOWS,
    ),
    "approx_top_k": "take exact ones: `jax.lax.top_k(x, 4)`",
    # Elementwise
    **dict.fromkeys(("complex", "conj", "imag", "real"), _PARTS),
    # Random numbers
    **dict.fromkeys(("random_gamma", "rng_bit_generator", "rng_uniform"), _RANDOM),
    # The host
    "debug_callback": _PRINT,
    "check": "use `plgpu.debug_check`",
    **dict.fromkeys(
        ("pure_callback", "io_callback"),
        "call it outside the kernel, before it or on an additional output",
    ),
    "device_put": "omit it: the values of a kernel are in registers",
    "sharding_constraint": "constrain the arguments of the kernel, outside",
    **dict.fromkeys(("new_ref", "empty_ref"), _REFERENCE),
    "freeze": "read the reference: ref[...]",
    # Other transformations and kernels
    "pallas_call": "call it outside the kernel",
    "pallas_gpu_kernel": "call it outside the kernel, or call its body with references",
    # Linear algebra, transforms, and what else has no form in registers
    **dict.fromkeys(
        (
            "after_all", "create_token", "custom_lin", "eig", "eigh", "empty2",
            "eval_jaxpr", "fft", "hessenberg", "householder_product", "qr",
            "ragged_all_to_all", "schur", "svd", "tridiagonal", "tridiagonal_solve",
        ),
        _OUTSIDE,
    ),
}  # fmt: skip


# Primitives of JAX's Pallas whose functions have other names, ours among them.
_FOREIGN = {"masked_load": "load", "masked_swap": "store", "atomic_rmw": "atomic_add"}


def unsupported(op: Op) -> errors.PallasGpuError:
    """Returns the error for an operation that kernels do not have."""
    name, avals = op.name, [str(var.aval) for var in op.equation.invars]
    if name in _FOREIGN:
        return types.foreign_function(_FOREIGN[name])
    if name in registry.PRIMITIVES and name not in HINTS:
        # Ours would be registered: it is the function of JAX's Pallas.
        return types.foreign_function(name)
    return errors.UnsupportedError(
        f"the operation {name} is not supported in a kernel",
        expected="an operation of the coverage table (docs/coverage.md)",
        got=f"{name} on {', '.join(avals) or 'nothing'}",
        hint=HINTS.get(name, _OUTSIDE),
    )
