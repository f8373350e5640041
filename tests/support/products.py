# SPDX-License-Identifier: Apache-2.0
"""Kernels that try one product, for tests of what wgmma refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from tests.support.entry_kernels import make, numbers

F16, F32 = jnp.float16, jnp.float32


def tiles(shape=(64, 64), dtype=F16, swizzle=128, columns=None):
    """SMEM stored as the tensor core reads it; `columns` spoils the tiling."""
    elements = columns or swizzle // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def attempt(multiply, a=None, b=None, acc=None, **options):
    """Traces `multiply(acc, sa, sb, x)`; the message has to come while tracing."""

    def body(x, o, sa, sb):
        plgpu.run_scoped(
            lambda ref: multiply(ref, sa, sb, x), acc or plgpu.ACC((64, 64))
        )

    scratch = [a or tiles(), b or tiles()]
    jax.make_jaxpr(make(body, scratch_types=scratch, **options))(numbers())
