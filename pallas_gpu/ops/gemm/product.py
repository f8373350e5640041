# SPDX-License-Identifier: Apache-2.0
"""Products of arrays with three dimensions: their operands, their derivatives."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.gemm import choice
from pallas_gpu.ops.gemm.epilogue import PLAIN
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import aligned, padded

_TMA_BYTES = 16
# No tile of a cluster has more columns.
_COLUMNS = 512


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static of a product.

    Attributes:
      problem: the product as the caller states it.
      config: a configuration, or None.
      compiler_params, interpret: see `kernel`.
    """

    problem: Problem
    config: Any = None
    compiler_params: plgpu.CompilerParams | None = None
    interpret: Any = None

    def run(self, a: jax.Array, b: jax.Array, **others: jax.Array | None) -> jax.Array:
        """Prepares the operands and runs the kernel."""
        p = self.problem
        given, params = self.config, self.compiler_params
        turned = choice.turned(p, given, params)
        if "a" in turned:
            a, p = _turned(a), dataclasses.replace(p, transpose_a=False)
        if "b" in turned:
            b, p = _turned(b), dataclasses.replace(p, transpose_b=True)
            if (gate := others.get("gate")) is not None:
                others["gate"] = _turned(gate)
        # Threads would store such rows element by element; a copy is faster.
        n, dtypes = p.n, (p.dtype, p.out_dtype, p.residual_dtype or p.dtype)
        multiple = _TMA_BYTES // min(x.itemsize for x in dtypes)
        p = dataclasses.replace(p, n=plgpu.align_to(n, multiple))
        if (residual := others.get("residual")) is not None:
            others["residual"] = padded(residual, p.n)
        if (gate := others.get("gate")) is not None:
            others["gate"] = aligned(gate)
        config = given or choice.choose(p, params)
        if (bias := others.get("bias")) is not None and n % choice.columns(config):
            others["bias"] = jnp.pad(bias, (0, _COLUMNS))
        f = choice.make_kernel(p, config, params, self.interpret)
        extra = [others[name] for name in p.epilogue.operands]
        out = f(aligned(a), aligned(b), *extra)
        return out if p.n == n else out[:, :, :n]

    def other(self, a: jax.Array, b: jax.Array, **changes: Any) -> jax.Array:
        """Returns a product of the derivative, for which the configuration is not."""
        problem = dataclasses.replace(self.problem, **changes)
        call = dataclasses.replace(self, problem=problem, config=None)
        return product(call, a, b, None, None, None)


def _turned(x: jax.Array) -> jax.Array:
    """Returns a transposed copy; of float32 rounded to tf32, which is no extra pass."""
    if x.dtype == jnp.float32:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
    return x.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    call: Call,
    a: jax.Array,
    b: jax.Array,
    gate: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array:
    """Returns the product of a call; the operands are described in `Problem`."""
    return call.run(a, b, gate=gate, bias=bias, residual=residual)


def _forward(call: Call, a, b, gate, bias, residual):
    e = call.problem.epilogue
    saved = (a, b, gate, bias, residual)
    if e.activation is None and not e.gated:
        return product(call, *saved), (saved, None)
    # The derivative of the activation is a function of the product, which is stored.
    stored = jnp.dtype(jnp.int32) if a.dtype == jnp.int8 else a.dtype
    plain = {"epilogue": PLAIN, "out_dtype": stored, "residual_dtype": None}
    products = (
        call.other(a, b, **plain),
        None if gate is None else call.other(a, gate, **plain),
    )
    return _apply(call, *products, bias, residual), (saved, products)


def _apply(call: Call, raw: Any, *others: Any) -> Any:
    given = (x for x in others if x is not None)
    return call.problem.epilogue.of_arrays(raw, call.problem.out_dtype, *given)


def _backward(call: Call, kept, d_out):
    p = call.problem
    (a, b, gate, bias, residual), products = kept
    if products is None:
        # The epilogue is linear: its derivative does not depend on the product.
        products = (jnp.zeros_like(d_out, a.dtype), None)
    _, pull = jax.vjp(functools.partial(_apply, call), *products, bias, residual)
    d_product, d_gated, d_bias, d_residual = pull(d_out)
    if p.dtype == jnp.int8:
        none = [
            None if x is None else np.zeros(x.shape, jax.dtypes.float0)
            for x in (a, b, gate)
        ]
        return *none, d_bias, d_residual
    # B and the gate are A of the transposed product.
    turned = p.transposed
    d_b, d_gate = (
        None if d is None else _derivative(call, turned, a, d).astype(b.dtype)
        for d in (d_product, d_gated)
    )
    d_a = _derivative(call, p, b, d_product)
    if gate is not None:
        d_a = d_a + _derivative(call, p, gate, d_gated)
    return d_a.astype(a.dtype), d_b, d_gate, d_bias, d_residual


product.defvjp(_forward, _backward)


def _derivative(call: Call, p: Problem, b: jax.Array, d_out: jax.Array) -> jax.Array:
    """Returns that with respect to A, dC B^T, or its transpose, B dC^T.

    Args:
      p: the problem of the call or the transposed one, whose B is the call's A, and
        whose dC is stored transposed.
      b: that of the problem.
    """
    turned = p is not call.problem
    is_sum = p.shared_a and p.batch > 1
    wide = is_sum or (p.epilogue.gated and not turned)
    factors, sizes, shared = (d_out, b), (p.m, p.k), (False, p.shared_b)
    transposed = turned, not p.transpose_b
    if p.transpose_a:
        factors, sizes, shared = factors[::-1], sizes[::-1], shared[::-1]
        transposed = p.transpose_b, not turned
    d_a = call.other(
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
