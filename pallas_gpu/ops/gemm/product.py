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
from pallas_gpu.ops.gemm.epilogue import PLAIN, padded_columns
from pallas_gpu.ops.gemm.problem import Problem

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
            others["residual"] = _padded(residual, multiple)
        if (gate := others.get("gate")) is not None:
            others["gate"] = _addressable(gate)
        config = given or choice.choose(p, params)
        if (bias := others.get("bias")) is not None and n % choice.columns(config):
            others["bias"] = padded_columns(bias, _COLUMNS)
        f = choice.make_kernel(p, config, params, self.interpret)
        extra = [others[name] for name in p.epilogue.operands]
        out = f(_addressable(a), _addressable(b), *extra)
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


def _addressable(x: jax.Array) -> jax.Array:
    """Appends zeros to rows that TMA cannot address."""
    return _padded(x, _TMA_BYTES // x.dtype.itemsize)


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    missing = -x.shape[-1] % multiple
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing))) if missing else x


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


def _apply(call: Call, raw: Any, gate: Any, bias: Any, residual: Any) -> Any:
    raw, gate, bias = (
        None if x is None else x.astype(jnp.float32) for x in (raw, gate, bias)
    )
    tile = call.problem.epilogue.apply(raw, gate=gate, bias=bias, residual=residual)
    return tile.astype(call.problem.out_dtype)


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
    d_b = _for_b(call, a, b, d_product)
    d_gate = None if gate is None else _for_b(call, a, gate, d_gated)
    d_a = _for_a(call, a, b, d_product)
    if gate is not None:
        d_a = (d_a + _for_a(call, a, gate, d_gated)).astype(a.dtype)
    return d_a.astype(a.dtype), d_b, d_gate, d_bias, d_residual


product.defvjp(_forward, _backward)


def _for_a(call: Call, a, b, d_out):
    """Returns dC B^T, or its transpose: B dC^T."""
    p = call.problem
    is_sum = p.shared_a and p.batch > 1
    wide = is_sum or p.epilogue.gated
    options = _plain(jnp.dtype(jnp.float32) if wide else a.dtype)
    if p.transpose_a:
        options |= {"m": p.k, "n": p.m, "k": p.n, "shared_a": p.shared_b}
        options |= {"transpose_a": p.transpose_b, "transpose_b": True}
        d_a = call.other(b, d_out, **options)
    else:
        options |= {"m": p.m, "n": p.k, "k": p.n, "shared_b": p.shared_b}
        options |= {"transpose_b": not p.transpose_b}
        d_a = call.other(d_out, b, **options)
    return d_a.sum(axis=0, keepdims=True) if is_sum else d_a


def _for_b(call: Call, a, b, d_out):
    """Returns A^T dC, or its transpose: dC^T A."""
    p = call.problem
    is_sum = p.shared_b and p.batch > 1
    options = _plain(jnp.dtype(jnp.float32) if is_sum else b.dtype)
    if p.transpose_b:
        options |= {"m": p.n, "n": p.k, "k": p.m, "shared_b": p.shared_a}
        options |= {"transpose_a": True, "transpose_b": p.transpose_a}
        d_b = call.other(d_out, a, **options)
    else:
        options |= {"m": p.k, "n": p.n, "k": p.m, "shared_a": p.shared_a}
        options |= {"transpose_a": not p.transpose_a}
        d_b = call.other(a, d_out, **options)
    return d_b.sum(axis=0, keepdims=True).astype(b.dtype) if is_sum else d_b


def _plain(out_dtype: jnp.dtype) -> dict[str, Any]:
    """Returns the fields of a product without an epilogue, nothing transposed."""
    return {
        "epilogue": PLAIN,
        "residual_dtype": None,
        "out_dtype": out_dtype,
        "shared_a": False,
        "shared_b": False,
        "transpose_a": False,
        "transpose_b": False,
    }
