# SPDX-License-Identifier: Apache-2.0
"""What to do instead of an operation of JAX that kernels do not support.

Code in backquotes is executed by the tests, word for word.
"""

from __future__ import annotations

from pallas_gpu import errors, types
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import Op

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
