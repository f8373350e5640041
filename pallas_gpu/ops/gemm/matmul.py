# SPDX-License-Identifier: Apache-2.0
"""The matrix product: its arguments, their checks and their normal form."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.gemm import choice
from pallas_gpu.ops.gemm.blackwell import BlackwellMatmulConfig
from pallas_gpu.ops.gemm.config import MatmulConfig
from pallas_gpu.ops.gemm.epilogue import Activation, Epilogue, check_activation
from pallas_gpu.ops.gemm.few_config import SplitMatmulConfig
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.gemm.product import Call, product
from pallas_gpu.ops.rules import (
    Array,
    Interpret,
    as_dtype,
    no_product,
    result_type,
    vary_alike,
)

type Config = MatmulConfig | SplitMatmulConfig | BlackwellMatmulConfig

_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.int8)


@expect.arguments()
def matmul(
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: Activation | None = None,
    gate: Array | None = None,
    scale: float | None = None,
    config: Config | None = None,
    out_dtype: Any = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Computes `activation(scale * a @ b + bias) + residual` in one kernel.

    Since: sm_90a. Issued by: the host; composes with `jax.jit`, `jax.vmap` and
    `jax.grad`.

    Sizes are any from 1. Types of 16 bits are read transposed where they are; float32
    and int8, which the tensor core reads along K alone, are copied first if K is not
    the last dimension, but for one float32 operand of many rows, which is transposed on
    its way to the tensor core. So are arrays whose rows are not multiples of 16 bytes.
    On Blackwell all these are copies, and XLA applies the epilogue.

    float32 is multiplied as tf32 (10 bits of mantissa), as by `jnp.matmul` on a GPU by
    default; use that with `precision="highest"` for more. An operand that is copied or
    transposed is rounded to them, another one truncated by the tensor core.

    The derivative consists of products by the same kernels: of the operands' type, to
    which the derivative of the result is rounded. With an activation or a gate, the
    product is stored for it, rounded to the operands' type.

    Args:
      a: (..., M, K), or (..., K, M) if `transpose_a`; float16, bfloat16, float32 or
        int8.
      b: (..., K, N), or (..., N, K) if `transpose_b`, of the same type. Leading
        dimensions are equal to those of `a`; an operand without them is shared.
      transpose_a, transpose_b: whether the last two dimensions are exchanged.
      bias: (N,), of a floating-point type: a value for each column.
      residual: (..., M, N), of a floating-point type: it is added last.
      activation: "relu", "gelu" (by tanh), "gelu_exact", "silu", or an elementwise
        function of a float32 array, which has to be the same object in each call: a
        new one is compiled anew. With `gate` the default is "silu".
      gate: a second array like `b`: the result is
        `activation(scale * a @ gate) * (scale * a @ b) + residual`, SwiGLU by default.
      scale: factor of the product; default: 1.
      config: tile sizes and schedule; default: chosen for the problem and the target in
        `compiler_params`, or else of the attached GPU.
      out_dtype: type of the result, floating-point, or int32 for int8; default: that of
        the operands, int32 for int8.
      compiler_params, interpret: see `kernel`.

    Returns:
      (..., M, N), accumulated in float32 (int8: in int32) and rounded once.

    Raises:
      ShapeError, DTypeError: operands that do not match each other.
      ArgumentError: an unknown activation; a bias beside a gate; the configuration is
        for another target.
      ArgumentTypeError: an activation that is not an elementwise function.
      OutOfResources: a configuration that needs more SMEM than there is.

    Example:
      >>> hidden = ops.matmul(x, w, bias=bias, activation="gelu")
    """
    check_activation(activation, "matmul")
    if gate is not None and activation is None:
        activation = "silu"
    epilogue = Epilogue(
        activation=activation,
        scale=1.0 if scale is None else float(scale),
        bias=bias is not None,
        residual=residual is not None,
        gated=gate is not None,
    )
    _check_dtypes(a, b, gate, bias, residual)
    batch = _check_shapes(a, b, gate, bias, residual, transpose_a, transpose_b)
    if config is not None:
        choice.check_target(config, compiler_params)
    if a.ndim > 2 and b.ndim == 2 and not transpose_a:
        # The rows of all products are those of one.
        a, folded = a.reshape(1, -1, a.shape[-1]), 1
    else:
        folded = math.prod(batch)
    problem = Problem(
        m=a.shape[-1 if transpose_a else -2],
        n=b.shape[-2 if transpose_b else -1],
        k=a.shape[-2 if transpose_a else -1],
        dtype=jnp.dtype(a.dtype),
        out_dtype=_out_dtype(out_dtype, a.dtype, epilogue),
        batch=folded,
        shared_a=a.ndim == 2,
        shared_b=b.ndim == 2,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        epilogue=epilogue,
        residual_dtype=None if residual is None else jnp.dtype(residual.dtype),
    )
    call = Call(problem, config, compiler_params, interpret)
    a, b, gate = (
        x if x is None else jnp.reshape(x, (-1, *x.shape[-2:])) for x in (a, b, gate)
    )
    if residual is not None:
        residual = jnp.reshape(residual, problem.out_shape)
    out = product(call, *vary_alike((a, b, gate, bias, residual)))
    return out.reshape(*batch, -1, problem.n)


def _out_dtype(dtype: Any, operands: Any, epilogue: Epilogue) -> jnp.dtype:
    is_integer = operands == jnp.int8
    if dtype is None:
        is_sum = is_integer and epilogue.is_identity
        dtype = jnp.int32 if is_sum else jnp.float32 if is_integer else operands
    found = as_dtype(dtype)
    is_float = found is not None and jnp.issubdtype(found, jnp.floating)
    is_sum = is_integer and epilogue.is_identity
    return result_type(
        "matmul",
        dtype,
        [found] * is_float + [jnp.dtype(jnp.int32)] * is_sum,  # type: ignore[arg-type]
        "omit out_dtype, and convert the result",
        expected="a floating-point type, or int32 for int8 without an epilogue",
    )


def _check_dtypes(a: Any, b: Any, gate: Any, bias: Any, residual: Any) -> None:
    factors = [x for x in (a, b, gate) if x is not None]
    if len({x.dtype for x in factors}) > 1 or a.dtype not in _DTYPES:
        raise errors.DTypeError(
            "matmul: these element types are not supported",
            expected="float16, bfloat16, float32 or int8 for both operands",
            got=" and ".join(str(x.dtype) for x in factors),
            hint="convert the operands with astype",
        )
    for name, x in (("bias", bias), ("residual", residual)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise errors.DTypeError(
                f"matmul: the {name} cannot have this type",
                expected="a floating-point type",
                got=x.dtype,
                hint="convert it with astype",
            )


def _check_shapes(
    a: Any,
    b: Any,
    gate: Any,
    bias: Any,
    residual: Any,
    transpose_a: bool,
    transpose_b: bool,
) -> tuple[int, ...]:
    """Returns the leading dimensions of the result."""
    shapes = tuple(a.shape), tuple(b.shape)
    if min(map(len, shapes)) < 2 or min(map(min, shapes)) < 1:
        raise _no_product(a, b, transpose_a, transpose_b)
    (*batch_a, m, k), (*batch_b, depth, n) = shapes
    if transpose_a:
        m, k = k, m
    if transpose_b:
        depth, n = n, depth
    if k != depth or (batch_a and batch_b and batch_a != batch_b):
        raise _no_product(a, b, transpose_a, transpose_b)
    batch = tuple(batch_a or batch_b)
    wanted = {
        "gate": (gate, shapes[1]),
        "bias": (bias, (n,)),
        "residual": (residual, (*batch, m, n)),
    }
    for name, (x, shape) in wanted.items():
        if x is not None and tuple(x.shape) != shape:
            raise errors.ShapeError(
                f"matmul: the shape of {name} does not match the product",
                expected=shape,
                got=tuple(x.shape),
                hint="a gate is like b, a bias has a value for each column, and a "
                "residual is like the result",
            )
    if gate is not None and bias is not None:
        raise errors.ArgumentError(
            "matmul: a bias beside a gate",
            expected="one of them",
            got="both",
            hint="append a column of ones to a, and rows of biases to the others",
        )
    return batch


def _no_product(a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> Exception:
    rows = "(..., K, M)" if transpose_a else "(..., M, K)"
    columns = "(..., N, K)" if transpose_b else "(..., K, N)"
    return no_product(
        "matmul",
        f"{rows} and {columns} without empty dimensions, leading ones equal or of one "
        "operand alone",
        a,
        b,
        "see transpose_a and transpose_b; use jax.vmap for other batches",
    )
