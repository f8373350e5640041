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
from pallas_gpu.ops.gemm.config import RaggedDotConfig
from pallas_gpu.ops.gemm.epilogue import (
    PLAIN,
    Activation,
    Epilogue,
    check_activation,
)
from pallas_gpu.ops.moe import checks, contracted, hopper
from pallas_gpu.ops.rules import Array, Interpret, aligned, check_operands, vary_alike


@dataclasses.dataclass(frozen=True)
class _Options:
    """What does not depend on the operands.

    Attributes:
      transposed: whether the matrices are (groups, n, k).
      epilogue: of a tile of the product with matrices.
    """

    config: RaggedDotConfig | None
    compiler_params: Any
    interpret: Any
    out_dtype: Any
    transposed: bool = False
    epilogue: Epilogue = PLAIN

    def but(self, **changes: Any) -> _Options:
        return dataclasses.replace(self, **changes)


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
    options = _Options(config, compiler_params, interpret, out_dtype)
    check_activation(activation, name)
    if gate is not None:
        checks.require_gate(name, rhs, gate)
        activation = "silu" if activation is None else activation
    elif activation is None:
        return _product(options, *vary_alike((lhs, rhs, *sizes, rows)))
    epilogue = Epilogue(activation=activation, gated=gate is not None)
    matrices = [rhs] if gate is None else [rhs, gate]
    operands = vary_alike((lhs, matrices, *sizes, rows))
    return _fused(options.but(epilogue=epilogue), *operands)


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
      lhs_scale: of 8-bit floats: a factor, or (rows of lhs,) factors, float32.
      rhs_scale: of 8-bit floats: a factor, (groups,) or (groups, N) factors, float32.
      config: tile sizes and schedule, also of the derivatives.
      compiler_params, interpret: see `kernel`.

    Returns:
      The products, accumulated in float32, those of 8-bit floats with the precision of
      the tensor core.

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
    form = checks.form(name, lhs, rhs, ragged_dot_dimension_numbers, group_offset)
    if form.contracted:
        checks.require_rows(name, lhs, rhs, rows)
        matrices = group_sizes.shape[0] if len(group_sizes.shape) == 1 else 0
    else:
        _check_product(name, lhs, rhs, form.transposed)
        matrices = rhs.shape[0]
    out_dtype = checks.types(
        name, lhs, rhs, precision, preferred_element_type, narrow=form.transposed
    )
    sizes = checks.sizes(name, group_sizes, matrices, group_offset)
    options = _Options(config, compiler_params, interpret, out_dtype, form.transposed)
    if form.contracted:
        checks.require_no_scales(name, lhs, lhs_scale, rhs_scale)
        operands = vary_alike((lhs, rhs, *sizes, rows))
        return _contract(options, matrices, *operands)
    if jnp.dtype(lhs.dtype).itemsize == 1:
        scales = checks.scales(name, lhs, rhs, rows, lhs_scale, rhs_scale)
        return _narrow(options, lhs, rhs, *sizes, rows, scales)
    checks.require_no_scales(name, lhs, lhs_scale, rhs_scale)
    return _product(options, *vary_alike((lhs, rhs, *sizes, rows)))


def _check_product(name: str, lhs: Any, rhs: Any, transposed: bool = False) -> None:
    hint = "use jax.vmap for a batch"
    check_operands(name, lhs, rhs, transposed, hint, groups="groups, ")


# --- the two products, each a derivative of the other ---------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(options: _Options, lhs, rhs, sizes, offset, rows) -> jax.Array:
    """Returns the rows of lhs, or those of the indices, times their group's matrix."""
    return _launch(options, lhs, [rhs], sizes, offset, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options: _Options, lhs, matrices, sizes, offset, rows) -> jax.Array:
    """Returns the epilogue of the products with one or two lists of matrices."""
    return _launch(options, lhs, matrices, sizes, offset, rows)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _narrow(options: _Options, lhs, rhs, sizes, offset, rows, scales) -> jax.Array:
    """Returns scaled products of 8-bit floats."""
    return _launch(options, lhs, [rhs], sizes, offset, rows, scales)


@_narrow.defjvp
def _narrow_jvp(options, primals, tangents):
    raise errors.DifferentiationError(
        "ragged_dot_general: products of 8-bit floats have no derivatives",
        expected="float16 or bfloat16",
        got=str(primals[0].dtype),
        hint="define one with jax.custom_vjp: of products of other operands",
    )


def _launch(
    options: _Options, lhs, matrices, sizes, offset, rows, scales=()
) -> jax.Array:
    (m, k), number = lhs.shape, matrices[0].shape[0]
    m = m if rows is None else rows.shape[0]
    width = 1 if options.transposed else 2
    n = matrices[0].shape[width]
    if 0 in (m, n, k, number):
        return jnp.zeros((m, n), options.out_dtype)
    config = _config(options, sizes, gated=len(matrices) > 1, narrow=bool(scales))
    lhs = aligned(lhs, 1 if rows is None else config.tile_k)
    matrices = [aligned(x) for x in matrices]
    problem = hopper.Problem(
        m,
        n=matrices[0].shape[width],
        k=lhs.shape[1],
        groups=sizes.shape[0],
        matrices=number,
        dtype=jnp.dtype(lhs.dtype),
        out_dtype=options.out_dtype,
        transpose_b=options.transposed,
        gathered=rows is not None,
        scales=("rows", "columns") if scales else (),
        epilogue=options.epilogue,
        config=config,
    )
    f = hopper.make_kernel(problem, options.compiler_params, options.interpret)
    return f(sizes, offset, *_present(rows), lhs, *matrices, *scales)[:, :n]


def _config(options: _Options, sizes: Any, **kind: bool) -> RaggedDotConfig:
    """Returns the configuration; by default one whose epilogue fits in SMEM."""
    if options.config is not None:
        return options.config
    config = RaggedDotConfig.default(sizes.shape[0], **kind)
    if jnp.dtype(options.out_dtype).itemsize > 2:
        # Parts of as many bytes as those of 16-bit types.
        return dataclasses.replace(config, epilogue_n=max(16, config.epilogue_n // 2))
    return config


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _contract(options: _Options, matrices: int, x, y, sizes, offset, rows) -> jax.Array:
    """Returns `x.T @ y` over the rows of each group that has a matrix."""
    m, (height, n) = x.shape[1], y.shape
    if 0 in (height, m, n, matrices):
        return jnp.zeros((matrices, m, n), options.out_dtype)
    config = _config(options, sizes, contracted=True)
    x, y = aligned(x, 1 if rows is None else config.block_m), aligned(y)
    problem = contracted.Problem(
        m=x.shape[1],
        n=y.shape[1],
        k=height,
        transpose_a=True,
        groups=sizes.shape[0],
        matrices=matrices,
        dtype=jnp.dtype(x.dtype),
        out_dtype=options.out_dtype,
        gathered=rows is not None,
        config=config,
    )
    f = contracted.make_kernel(problem, options.compiler_params, options.interpret)
    return f(sizes, offset, *_present(rows), x, y)[:, :m, :n]


def _present(rows: Any) -> list[Any]:
    return [] if rows is None else [rows]


def _product_backward(options: _Options, saved, d_out):
    lhs, rhs, *groups, rows = saved
    d_out = d_out.astype(lhs.dtype)
    options = options.but(out_dtype=jnp.dtype(lhs.dtype))
    other = options.but(transposed=not options.transposed)
    d_lhs = _scattered(_product(other, d_out, rhs, *groups, None), rows, lhs)
    if options.transposed and rows is not None:
        # The kernel gathers the rows of its left operand alone.
        lhs, rows = lhs[rows], None
    pair = (d_out, lhs) if options.transposed else (lhs, d_out)
    d_rhs = _contract(options, rhs.shape[0], *pair, *groups, rows)
    return d_lhs, d_rhs, None, None, None


def _fused_backward(options: _Options, saved, d_out):
    """Computes the products again, and differentiates the epilogue by JAX."""
    lhs, matrices, *more = saved
    plain = options.but(epilogue=PLAIN, out_dtype=jnp.dtype(jnp.float32))

    def products(lhs, matrices):
        return [_product(plain, lhs, matrix, *more) for matrix in matrices]

    def epilogue(product, gate=None):
        # Rows of no group are zero, whatever the activation of zero is.
        return options.epilogue.activate(product, gate=gate)

    found, backward = jax.vjp(products, lhs, matrices)
    _, activation = jax.vjp(epilogue, *found)
    d_products = activation(d_out.astype(jnp.float32))
    return *backward(list(d_products)), None, None, None


def _contract_backward(options: _Options, matrices: int, saved, d_out):
    x, y, *groups, rows = saved
    d_out = d_out.astype(x.dtype)
    options = options.but(out_dtype=jnp.dtype(x.dtype), transposed=False)
    d_y = _product(options, x, d_out, *groups, rows)
    d_x = _product(options.but(transposed=True), y, d_out, *groups, None)
    return _scattered(d_x, rows, x), d_y, None, None, None


def _scattered(d_rows: jax.Array, rows: Any, array: jax.Array) -> jax.Array:
    """Adds the derivatives of gathered rows to those of the array, in float32."""
    if rows is None:
        return d_rows
    zeros = jnp.zeros(array.shape, jnp.float32)
    return zeros.at[rows].add(d_rows.astype(jnp.float32)).astype(array.dtype)


_product.defvjp(lambda o, *saved: (_product(o, *saved), saved), _product_backward)
_fused.defvjp(lambda o, *saved: (_fused(o, *saved), saved), _fused_backward)
_contract.defvjp(
    lambda o, n, *saved: (_contract(o, n, *saved), saved), _contract_backward
)
