# SPDX-License-Identifier: Apache-2.0
"""Ready kernels in `jax.shard_map`, where devices share some of the operands.

Types alone are looked at, which needs no devices: JAX's derivative of a conversion from
shared to per-device adds up, and `tests/support/composition/devices.py` runs one.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from pallas_gpu import ops

DEVICES = 2
X = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
W = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
MATRICES = jax.ShapeDtypeStruct((2, 64, 128), jnp.bfloat16)
COLUMNS = jax.ShapeDtypeStruct((128,), jnp.float32)
Q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


CONTRACTED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
CALLS = {
    "matmul": (ops.matmul, X, W),
    "matmul, bias": (lambda x, w, b: ops.matmul(x, w, bias=b), X, W, COLUMNS),
    "matmul, gate": (lambda x, w, g: ops.matmul(x, w, gate=g), X, W, W),
    "linear": (
        lambda x, w, s: ops.linear(x, w, w_scale=s),
        X, integers(64, 128, dtype=jnp.int8), COLUMNS,
    ),
    "rms_norm": (ops.rms_norm, floats(8, 128), COLUMNS),
    "layer_norm": (ops.layer_norm, floats(8, 128), COLUMNS, COLUMNS),
    "softmax": (ops.softmax, floats(8, 128)),
    "top_k": (lambda x: ops.top_k(x, 4)[0], floats(8, 128)),
    "rotary_embedding": (ops.rotary_embedding, floats(2, 16, 4, 64), integers(2, 16)),
    "linear_cross_entropy": (ops.linear_cross_entropy, X, W, integers(128)),
    "attention": (ops.attention, Q, KV, KV),
    "attention, bias": (
        lambda q, k, v, bias: ops.attention(q, k, v, bias=bias),
        Q, KV, KV, floats(2, 4, 128, 128),
    ),
    "attention, lengths": (
        lambda q, k, v, n: ops.dot_product_attention(q, k, v, key_value_seq_lengths=n),
        Q, KV, KV, integers(2),
    ),
    "ragged_dot": (ops.ragged_dot, X, MATRICES, integers(2)),
    "ragged_dot, gate": (
        lambda x, w, gate, n: ops.ragged_dot(x, w, n, gate=gate),
        X, MATRICES, MATRICES, integers(2),
    ),
    "ragged_dot_general": (
        lambda x, y, n: ops.ragged_dot_general(x, y, n, CONTRACTED),
        X, jax.ShapeDtypeStruct((128, 32), jnp.bfloat16), integers(2),
    ),
}  # fmt: skip


def choices(number: int):
    """Which operands are one for all devices: each alone, and all but each."""
    for which in range(number):
        for shared in (True, False):
            yield tuple((i == which) == shared for i in range(number))


@pytest.mark.parametrize("name", CALLS)
def test_operands_that_all_devices_share_have_derivatives(name):
    function, *local = CALLS[name]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((DEVICES,), ("d",), axis_types=auto)
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in local]
    differentiated = tuple(itertools.compress(range(len(local)), floating))
    for shared in {*choices(len(local)), (False,) * len(local)} - {
        (True,) * len(local)
    }:
        specs = tuple(jax.P() if s else jax.P("d") for s in shared)
        rows = [1 if s else DEVICES for s in shared]
        operands = [
            jax.ShapeDtypeStruct((x.shape[0] * n, *x.shape[1:]), x.dtype)
            for x, n in zip(local, rows, strict=True)
        ]
        f = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=jax.P("d"))

        def loss(*operands, f=f):
            return f(*operands).astype(jnp.float32).sum()

        found = jax.eval_shape(jax.grad(loss, differentiated), *operands)
        assert [x.shape for x in found] == [operands[i].shape for i in differentiated]
