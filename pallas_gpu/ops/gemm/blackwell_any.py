# SPDX-License-Identifier: Apache-2.0
"""Any product by Blackwell's kernel: XLA transposes, pads, and applies the epilogue."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.ops.gemm import blackwell
from pallas_gpu.ops.gemm.blackwell import BlackwellMatmulConfig
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import cached, padded


@cached
def make_kernel(
    p: Problem, config: BlackwellMatmulConfig, compiler_params, interpret
) -> Any:
    """Returns a function of A, B and the operands of the epilogue."""
    if p.dtype.itemsize != 2:
        raise errors.DTypeError(
            "matmul: this element type is not supported on Blackwell",
            expected="float16 or bfloat16",
            got=p.dtype,
            hint="convert the operands with astype",
        )
    step = blackwell.Schedule(p, config).step
    m, n, k = map(plgpu.align_to, (p.m, p.n, p.k), step)
    # An epilogue reads sums that are not rounded.
    rounded = p.out_dtype if p.epilogue.is_identity else jnp.dtype(jnp.float32)
    tiled = Problem(m, n, k, p.dtype, rounded)
    kernel = blackwell.make_kernel(tiled, config, compiler_params, interpret)

    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        a = _padded(a, p.transpose_a, (p.m, p.k), (m, k))
        b = _padded(b, p.transpose_b, (p.k, p.n), (k, n))
        if p.batch == 1:
            return kernel(a[0], b[0])[None, : p.m, : p.n]
        a, b = (x[0] if s else x for x, s in ((a, p.shared_a), (b, p.shared_b)))
        axes = (None if p.shared_a else 0, None if p.shared_b else 0)
        return jax.vmap(kernel, axes)(a, b)[:, : p.m, : p.n]

    def run(a: jax.Array, b: jax.Array, *others: jax.Array) -> jax.Array:
        if p.epilogue.gated:
            others = (products(a, others[0]), *others[1:])
        return p.epilogue.of_arrays(products(a, b), p.out_dtype, *others)

    return run


def _padded(
    x: jax.Array, transposed: bool, used: tuple[int, int], sizes: tuple[int, int]
) -> jax.Array:
    x = x.swapaxes(1, 2) if transposed else x
    x = x[:, : used[0], : used[1]]
    return padded(padded(x, sizes[0], 1), sizes[1])
