# SPDX-License-Identifier: Apache-2.0
"""Inline code, and the arrays that it is given, of the tests of both files."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu

SHAPE = (64, 128)
F32, I32 = jnp.float32, jnp.int32
STRIDED = plgpu.Layout.WG_STRIDED(SHAPE, vec_size=2)
WGMMA, SPLAT = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT
TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
X = (np.arange(64 * 128) % 251 - 125).astype(np.float32).reshape(SHAPE)
OUT = jax.ShapeDtypeStruct(SHAPE, F32)
AUTHORED = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def array(layout=STRIDED, shape=SHAPE, dtype=F32):
    """The declaration of a result."""
    return plgpu.ShapeDtypeStruct(shape, dtype, layout)


@plgpu.inline_mgpu(arg_types=(STRIDED,), return_type=array())
def double(ctx, x):
    """Adds an array to itself."""
    return x + x


@plgpu.inline_mgpu(arg_types=(STRIDED,), return_type=array(), emulate=lambda x: x + x)
def emulated_double(ctx, x):
    """As `double`, with a NumPy function."""
    return x + x


def loaded(ref, layout=STRIDED):
    """An array in registers."""
    return plgpu.load(ref, layout=layout, optimized=False)
