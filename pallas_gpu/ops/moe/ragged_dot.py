# SPDX-License-Identifier: Apache-2.0
"""Ragged products with JAX's signatures: checks, padding, and their derivatives."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.gemm.config import BLOCK, RaggedDotConfig
from pallas_gpu.ops.gemm.epilogue import (
    PLAIN,
    Activation,
    Epilogue,
    check_activation,
)
from pallas_gpu.ops.moe import checks, contracted, hopper
from pallas_gpu.ops.moe.groups import GroupedProblem
from pallas_gpu.ops.rules import (
    Array,
    Interpret,
    aligned,
    check_operands,
    vary_alike,
    without_derivative,
)


@expect.arguments()
def ragged_dot(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Array | None = None,
    *,
    rows: Array | None = None,
    activation: Activation | None = None,
    gate: Array | None = None,
    config: RaggedDotConfig | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Multiplies the rows of each group by the group's matrix.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad`. The meaning is that of `jax.lax.ragged_dot`; one kernel does all of it.

    Groups lie one after the other from row 0 on. Rows behind the last group are zero in
    the result, and do not contribute to derivatives; rows that `group_sizes` counts
    beyond M do not exist. The sizes stay on the device.

    Rows of the operands that are not a multiple of 16 bytes are padded, which copies
    the operand.

    Args:
      lhs: (M, K), float16 or bfloat16.
      rhs: (groups, K, N), of the same type.
      group_sizes: (groups,), integers: rows of each group, 0 or more.
      precision: as of `jax.lax.dot`. A hint without effect: products of 16-bit types
        are exact in float32.
      preferred_element_type: type of the result; default: that of the operands.
      group_offset: (1,), an integer: the group to which `rhs[0]` belongs. `group_sizes`
        then may have more groups than `rhs`; rows of groups without a matrix are zero.
      rows: (M,), integers: the row of `lhs` that each row of the product takes, so that
        `lhs` may have any number of rows. Threads gather them while they load; the
        result is that of `lhs[rows]`. They are in bounds; one row may occur repeatedly.
      activation: of the product, in float32: "relu", "gelu" (by tanh), "gelu_exact",
        "silu", or an elementwise function of a float32 array. Rows of no group remain
        zero. With `gate` the default is "silu".
      gate: (groups, K, N), a second matrix for each group. The result is the activation
        of the product with it, times that with `rhs`: SwiGLU by default. The derivative
        computes both products again.
      config: tile sizes and schedule, also of the derivatives.
      compiler_params, interpret: see `kernel`.

    Returns:
      (M, N), accumulated in float32. Derivatives have the types of the operands; the
      cotangent is rounded to the type of the operands first.

    Raises:
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: a precision or an activation that does not exist.
      ArgumentTypeError: an activation that is not an elementwise function.
      OutOfResources: a config that needs more SMEM than there is.

    Example:
      >>> y = ops.ragged_dot(x, w, jnp.array([100, 0, 28]))
    """
    name = "ragged_dot"
    _check_product(name, lhs, rhs)
    rows = checks.rows(name, rows)
    out_dtype = checks.types(name, lhs, rhs, precision, preferred_element_type)
    sizes = checks.sizes(name, group_sizes, rhs.shape[0], group_offset)
    check_activation(activation, name)
    if gate is not None:
        checks.require_gate(name, rhs, gate)
        activation = "silu" if activation is None else activation
    epilogue = Epilogue(activation=activation, gated=gate is not None)
    # The sizes are those of the operands of each product.
    problem = GroupedProblem(
        *(0, 0, 0, lhs.dtype, out_dtype),
        epilogue=epilogue,
        config=config,
        compiler_params=compiler_params,
        interpret=interpret,
    )
    matrices = [rhs] if gate is None else [rhs, gate]
    return _product(problem, *vary_alike((lhs, matrices, *sizes, rows)))


@expect.arguments(
    ragged_dot_dimension_numbers=expect.instance(
        jax.lax.RaggedDotDimensionNumbers,
        written="jax.lax.RaggedDotDimensionNumbers(...)",
    ),
)
def ragged_dot_general(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    ragged_dot_dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Array | None = None,
    *,
    rows: Array | None = None,
    lhs_scale: Array | None = None,
    rhs_scale: Array | None = None,
    config: RaggedDotConfig | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Multiplies groups of rows: each by a matrix, or two arrays over their rows.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad`. The meaning is that of `jax.lax.ragged_dot_general`, for these dimension
    numbers, none of which needs a copy of an operand:

    - lhs (M, K), ragged in dimension 0, contracted in 1; rhs (groups, K, N), contracted
      in dimension 1, or (groups, N, K), contracted in 2: (M, N), as `ragged_dot`.
    - lhs (M, K) and rhs (M, N), ragged and contracted in dimension 0: (groups, K, N),
      `lhs[rows].T @ rhs[rows]` of each group. An empty group's matrix is zero.

    Args:
      lhs, rhs: float16 or bfloat16, both of one type; with rhs (groups, N, K) also
        float8_e4m3fn or float8_e5m2, whose products have no derivatives.
      group_sizes: (groups,), integers: rows of each group, 0 or more.
      ragged_dot_dimension_numbers: one of those above.
      precision: as of `jax.lax.dot`; a hint without effect, see `ragged_dot`.
      preferred_element_type: type of the result; default: that of the operands, and
        bfloat16 for 8-bit floats.
      group_offset: see `ragged_dot`; the second form has none.
      rows: (M,), integers: `lhs[rows]` is meant; see `ragged_dot`.
      lhs_scale: of 8-bit floats: a factor, or (rows of lhs,) factors, float32; or one
        per block of 1x128, (rows of lhs, K / 128), rounded up.
      rhs_scale: of 8-bit floats: a factor, (groups,) or (groups, N) factors, float32;
        or one per block of 128x128, (groups, N / 128, K / 128), rounded up. Scales of
        blocks of one operand go with any scales of the other but (groups, N); sums are
        promoted then, as by `scaled_matmul`.
      config: tile sizes and schedule, also of the derivatives.
      compiler_params, interpret: see `kernel`.

    Returns:
      The products, accumulated in float32, those of 8-bit floats with the precision of
      the tensor core; with scales of blocks that of 128 elements of K.

    Raises:
      UnsupportedError: other dimension numbers.
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: a precision that does not exist.

    Example:
      >>> rows = ((0,), (0,)), ((), ())
      >>> numbers = jax.lax.RaggedDotDimensionNumbers(rows, (0,), ())
      >>> d_w = ops.ragged_dot_general(x, d_y, sizes, numbers)
    """
    name = "ragged_dot_general"
    rows = checks.rows(name, rows)
    is_contracted, is_transposed = checks.form(
        name, ragged_dot_dimension_numbers, group_offset
    )
    if is_contracted:
        checks.require_rows(name, lhs, rhs, rows)
        matrices = group_sizes.shape[0] if len(group_sizes.shape) == 1 else 0
    else:
        _check_product(name, lhs, rhs, is_transposed)
        matrices = rhs.shape[0]
    out_dtype = checks.types(
        name, lhs, rhs, precision, preferred_element_type, narrow=is_transposed
    )
    sizes = checks.sizes(name, group_sizes, matrices, group_offset)
    p = GroupedProblem(
        *(0, 0, 0, lhs.dtype, out_dtype),
        transpose_b=is_transposed,
        config=config,
        compiler_params=compiler_params,
        interpret=interpret,
    )
    if is_contracted:
        checks.require_no_scales(name, lhs, lhs_scale, rhs_scale)
        operands = vary_alike((lhs, rhs, *sizes, rows))
        return _contract(p, matrices, *operands)
    if jnp.dtype(lhs.dtype).itemsize == 1:
        scales = checks.scales(name, lhs, rhs, rows, lhs_scale, rhs_scale)
        group = BLOCK if "a_blocks" in scales else None
        p = p.but(scales=tuple(scales), group=group, promoted=group is not None)
        refusal = errors.DifferentiationError(
            f"{name}: products of 8-bit floats have no derivatives",
            expected="float16 or bfloat16",
            got=str(lhs.dtype),
            hint="define one with jax.custom_vjp: of products of other operands",
        )
        call = without_derivative(functools.partial(_launch, p), refusal)
        return call(lhs, [rhs], *sizes, rows, list(scales.values()))
    checks.require_no_scales(name, lhs, lhs_scale, rhs_scale)
    return _product(p, *vary_alike((lhs, [rhs], *sizes, rows)))


def _check_product(name: str, lhs: Any, rhs: Any, transposed: bool = False) -> None:
    hint = "use jax.vmap for a batch"
    check_operands(name, lhs, rhs, transposed, hint, groups="groups, ")


# --- the two products, each a derivative of the other ---------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(p: GroupedProblem, lhs, matrices, sizes, offset, rows) -> jax.Array:
    """Returns the rows of lhs, or those of the indices, times their group's matrix.

    That is, the epilogue of the products with one or two lists of matrices.
    """
    return _launch(p, lhs, matrices, sizes, offset, rows)


def _launch(
    p: GroupedProblem, lhs, matrices, sizes, offset, rows, scales=()
) -> jax.Array:
    number, *sides = matrices[0].shape
    n = sides[0 if p.transpose_b else 1]
    m = (lhs if rows is None else rows).shape[0]
    if 0 in (m, n, lhs.shape[1], number):
        return jnp.zeros((m, n), p.out_dtype)
    kind = {"gated": len(matrices) > 1, "narrow": bool(scales), "blocked": p.promoted}
    config = _config(p, sizes, **kind)
    if p.promoted:
        checks.require_blocks(config)
    lhs = aligned(lhs, 1 if rows is None else config.tile_k)
    matrices = [aligned(x) for x in matrices]
    p = p.but(
        m=m,
        n=matrices[0].shape[1 if p.transpose_b else 2],
        k=lhs.shape[1],
        groups=sizes.shape[0],
        matrices=number,
        gathered=rows is not None,
        config=config,
    )
    f = hopper.make_kernel(p)
    rhs, *gate = matrices
    return f(sizes, offset, *_present(rows), lhs, rhs, *scales, *gate)[:, :n]


def _config(p: GroupedProblem, sizes: Any, **kind: bool) -> RaggedDotConfig:
    """Returns the configuration; by default one whose epilogue fits in SMEM."""
    if p.config is not None:
        return p.config
    config = RaggedDotConfig.default(sizes.shape[0], **kind)
    if p.out_dtype.itemsize > 2:
        # Parts of as many bytes as those of 16-bit types.
        return dataclasses.replace(config, epilogue_n=max(16, config.epilogue_n // 2))
    return config


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _contract(p: GroupedProblem, matrices: int, x, y, sizes, offset, rows) -> jax.Array:
    """Returns `x.T @ y` over the rows of each group that has a matrix."""
    m, (height, n) = x.shape[1], y.shape
    if 0 in (height, m, n, matrices):
        return jnp.zeros((matrices, m, n), p.out_dtype)
    config = _config(p, sizes, contracted=True).alone
    x, y = aligned(x, 1 if rows is None else config.block_m), aligned(y)
    p = p.but(
        config=config,
        m=x.shape[1],
        n=y.shape[1],
        k=height,
        transpose_a=True,
        transpose_b=False,
        groups=sizes.shape[0],
        matrices=matrices,
        gathered=rows is not None,
    )
    f = contracted.make_kernel(p)
    return f(sizes, offset, *_present(rows), x, y)[:, :m, :n]


def _present(rows: Any) -> list[Any]:
    return [] if rows is None else [rows]


def _product_backward(p: GroupedProblem, saved, d_out):
    lhs, matrices, *groups, rows = saved
    if not p.epilogue.is_identity:
        return _fused_backward(p, saved, d_out)
    d_out, (rhs,) = d_out.astype(lhs.dtype), matrices
    p = p.but(out_dtype=lhs.dtype)
    other = p.but(transpose_b=not p.transpose_b)
    d_lhs = _scattered(_product(other, d_out, [rhs], *groups, None), rows, lhs)
    if p.transpose_b and rows is not None:
        # The kernel gathers the rows of its left operand alone.
        lhs, rows = lhs[rows], None
    pair = (d_out, lhs) if p.transpose_b else (lhs, d_out)
    d_rhs = _contract(p, rhs.shape[0], *pair, *groups, rows)
    return d_lhs, [d_rhs], None, None, None


def _fused_backward(p: GroupedProblem, saved, d_out):
    """Computes the products again, and differentiates the epilogue by JAX."""
    lhs, matrices, *more = saved
    plain = p.but(epilogue=PLAIN, out_dtype=jnp.dtype(jnp.float32))

    def products(lhs, matrices):
        return [_product(plain, lhs, [matrix], *more) for matrix in matrices]

    def epilogue(product, gate=None):
        # Rows of no group are zero, whatever the activation of zero is.
        return p.epilogue.apply(product, gate=gate)

    found, backward = jax.vjp(products, lhs, matrices)
    _, activation = jax.vjp(epilogue, *found)
    d_products = activation(d_out.astype(jnp.float32))
    return *backward(list(d_products)), None, None, None


def _contract_backward(p: GroupedProblem, matrices: int, saved, d_out):
    x, y, *groups, rows = saved
    d_out = d_out.astype(x.dtype)
    p = p.but(out_dtype=x.dtype, transpose_b=False)
    d_y = _product(p, x, [d_out], *groups, rows)
    d_x = _product(p.but(transpose_b=True), y, [d_out], *groups, None)
    return _scattered(d_x, rows, x), d_y, None, None, None


def _scattered(d_rows: jax.Array, rows: Any, array: jax.Array) -> jax.Array:
    """Adds the derivatives of gathered rows to those of the array, in float32."""
    if rows is None:
        return d_rows
    zeros = jnp.zeros(array.shape, jnp.float32)
    return zeros.at[rows].add(d_rows.astype(jnp.float32)).astype(array.dtype)


_product.defvjp(lambda o, *saved: (_product(o, *saved), saved), _product_backward)
_contract.defvjp(
    lambda o, n, *saved: (_contract(o, n, *saved), saved), _contract_backward
)
