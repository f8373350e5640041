# SPDX-License-Identifier: Apache-2.0
"""The matrix product: its arguments, their checks, its operands, its derivatives."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops import rules, targets
from pallas_gpu.ops.gemm import choice
from pallas_gpu.ops.gemm.config import (
    BlackwellMatmulConfig,
    MatmulConfig,
    SplitMatmulConfig,
)
from pallas_gpu.ops.gemm.epilogue import PLAIN, Activation, Epilogue, check_activation
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import Array, Interpret

type Config = MatmulConfig | SplitMatmulConfig | BlackwellMatmulConfig

_TMA_BYTES = 16
# No tile of a cluster has more columns.
_COLUMNS = 512
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
        targets.require("matmul", config, compiler_params, choice.KERNELS)
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
        config=config,
        compiler_params=compiler_params,
        interpret=interpret,
    )
    a, b, gate = (
        x if x is None else jnp.reshape(x, (-1, *x.shape[-2:])) for x in (a, b, gate)
    )
    if residual is not None:
        residual = jnp.reshape(residual, problem.out_shape)
    out = product(problem, *rules.vary_alike((a, b, gate, bias, residual)))
    return out.reshape(*batch, -1, problem.n)


def _out_dtype(dtype: Any, operands: Any, epilogue: Epilogue) -> jnp.dtype:
    is_integer = operands == jnp.int8
    if dtype is None:
        is_sum = is_integer and epilogue.is_identity
        dtype = jnp.int32 if is_sum else jnp.float32 if is_integer else operands
    found = rules.as_dtype(dtype)
    is_float = found is not None and jnp.issubdtype(found, jnp.floating)
    is_sum = is_integer and epilogue.is_identity
    return rules.result_type(
        "matmul",
        dtype,
        [found] * is_float + [jnp.dtype(jnp.int32)] * is_sum,  # type: ignore[arg-type]
        "omit out_dtype, and convert the result",
        expected="a floating-point type, or int32 for int8 without an epilogue",
    )


def _check_dtypes(a: Any, b: Any, gate: Any, bias: Any, residual: Any) -> None:
    factors = [x for x in (a, b, gate) if x is not None]
    if len({x.dtype for x in factors}) > 1 or a.dtype not in _DTYPES:
        wanted = "float16, bfloat16, float32 or int8 for both operands"
        raise rules.no_types("matmul", wanted, *factors)
    for name, x in (("bias", bias), ("residual", residual)):
        if x is not None:
            fits = jnp.issubdtype(x.dtype, jnp.floating)
            wanted = "a floating-point type"
            rules.require_type("matmul", f"the {name}", x, fits, wanted, got=x.dtype)


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
    steps = (-1 if transpose_a else 1), (-1 if transpose_b else 1)
    ends = [x[-2:][::step] for x, step in zip(shapes, steps, strict=True)]
    batches = [x[:-2] for x in shapes if len(x) > 2]
    fits = min(map(len, shapes)) >= 2 and min(map(min, shapes)) >= 1
    if not fits or ends[0][1] != ends[1][0] or len(set(batches)) > 1:
        rows = "(..., K, M)" if transpose_a else "(..., M, K)"
        columns = "(..., N, K)" if transpose_b else "(..., K, N)"
        raise rules.no_product(
            "matmul",
            f"{rows} and {columns} without empty dimensions, leading ones equal or of "
            "one operand alone",
            a,
            b,
            "see transpose_a and transpose_b; use jax.vmap for other batches",
        )
    (m, _), (_, n), batch = *ends, batches[0] if batches else ()
    wanted = {
        "gate": (gate, shapes[1]),
        "bias": (bias, (n,)),
        "residual": (residual, (*batch, m, n)),
    }
    for name, (x, shape) in wanted.items():
        if x is not None:
            each = "a gate is like b, a bias has a value for each column, and a "
            each += "residual is like the result"
            rules.check_array("matmul", name, x, [shape], each)
    if gate is not None and bias is not None:
        raise errors.ArgumentError(
            "matmul: a bias beside a gate",
            expected="one of them",
            got="both",
            hint="append a column of ones to a, and rows of biases to the others",
        )
    return batch


# --- the product, and its derivatives -------------------------------------------------


def _run(p: Problem, a: jax.Array, b: jax.Array, **others: jax.Array | None) -> Any:
    """Prepares the operands and runs the kernel."""
    turned = choice.turned(p)
    if "a" in turned:
        a, p = _turned(a), p.but(transpose_a=False)
    if "b" in turned:
        b, p = _turned(b), p.but(transpose_b=True)
        if (gate := others.get("gate")) is not None:
            others["gate"] = _turned(gate)
    # Threads would store such rows element by element; a copy is faster.
    n, dtypes = p.n, (p.dtype, p.out_dtype, p.residual_dtype or p.dtype)
    multiple = _TMA_BYTES // min(x.itemsize for x in dtypes)
    p = p.but(n=plgpu.align_to(n, multiple))
    if (residual := others.get("residual")) is not None:
        others["residual"] = rules.padded(residual, p.n)
    if (gate := others.get("gate")) is not None:
        others["gate"] = rules.aligned(gate)
    config = p.config or choice.choose(p)
    if (bias := others.get("bias")) is not None and n % config.columns:
        others["bias"] = jnp.pad(bias, (0, _COLUMNS))
    f = choice.KERNELS[type(config)](p.but(config=config))
    extra = [others[name] for name in p.epilogue.operands]
    out = f(rules.aligned(a), rules.aligned(b), *extra)
    return out if p.n == n else out[:, :, :n]


def _other(p: Problem, a: jax.Array, b: jax.Array, **changes: Any) -> jax.Array:
    """Returns a product of the derivative, for which the configuration is not."""
    return product(p.but(config=None, **changes), a, b, None, None, None)


def _turned(x: jax.Array) -> jax.Array:
    """Returns a transposed copy; of float32 rounded to tf32, which is no extra pass."""
    if x.dtype == jnp.float32:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
    return x.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    p: Problem,
    a: jax.Array,
    b: jax.Array,
    gate: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array:
    """Returns a product; the operands are described in `Problem`."""
    return _run(p, a, b, gate=gate, bias=bias, residual=residual)


def _forward(p: Problem, a, b, gate, bias, residual):
    e = p.epilogue
    saved = (a, b, gate, bias, residual)
    if e.activation is None and not e.gated:
        return product(p, *saved), (saved, None)
    # The derivative of the activation is a function of the product, which is stored.
    stored = jnp.dtype(jnp.int32) if a.dtype == jnp.int8 else a.dtype
    plain = {"epilogue": PLAIN, "out_dtype": stored, "residual_dtype": None}
    products = (
        _other(p, a, b, **plain),
        None if gate is None else _other(p, a, gate, **plain),
    )
    return _apply(p, *products, bias, residual), (saved, products)


def _apply(p: Problem, raw: Any, *others: Any) -> Any:
    given = (x for x in others if x is not None)
    return p.epilogue.of_arrays(raw, p.out_dtype, *given)


def _backward(p: Problem, kept, d_out):
    (a, b, gate, bias, residual), products = kept
    if products is None:
        # The epilogue is linear: its derivative does not depend on the product.
        products = (jnp.zeros_like(d_out, a.dtype), None)
    _, pull = jax.vjp(functools.partial(_apply, p), *products, bias, residual)
    d_product, d_gated, d_bias, d_residual = pull(d_out)
    if p.dtype == jnp.int8:
        none = [
            None if x is None else np.zeros(x.shape, jax.dtypes.float0)
            for x in (a, b, gate)
        ]
        return *none, d_bias, d_residual
    # B and the gate are A of the transposed product.
    d_b, d_gate = (
        None if d is None else _derivative(p, p.transposed, a, d).astype(b.dtype)
        for d in (d_product, d_gated)
    )
    d_a = _derivative(p, p, b, d_product)
    if gate is not None:
        d_a = d_a + _derivative(p, p, gate, d_gated)
    return d_a.astype(a.dtype), d_b, d_gate, d_bias, d_residual


product.defvjp(_forward, _backward)


def _derivative(
    of_call: Problem, p: Problem, b: jax.Array, d_out: jax.Array
) -> jax.Array:
    """Returns that with respect to A, dC B^T, or its transpose, B dC^T.

    Args:
      p: the problem of the call or the transposed one, whose B is the call's A, and
        whose dC is stored transposed.
      b: that of the problem.
    """
    turned = p is not of_call
    is_sum = p.shared_a and p.batch > 1
    wide = is_sum or (p.epilogue.gated and not turned)
    factors, sizes, shared = (d_out, b), (p.m, p.k), (False, p.shared_b)
    transposed = turned, not p.transpose_b
    if p.transpose_a:
        factors, sizes, shared = factors[::-1], sizes[::-1], shared[::-1]
        transposed = p.transpose_b, not turned
    d_a = _other(
        of_call,
        *factors,
        m=sizes[0],
        n=sizes[1],
        k=p.n,
        shared_a=shared[0],
        shared_b=shared[1],
        transpose_a=transposed[0],
        transpose_b=transposed[1],
        out_dtype=jnp.dtype(jnp.float32 if wide else b.dtype),
        epilogue=PLAIN,
        residual_dtype=None,
    )
    return d_a.sum(axis=0, keepdims=True) if is_sum else d_a
