# SPDX-License-Identifier: Apache-2.0
"""The names of JAX's Pallas for Triton, in kernels that change their imports alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

import pallas_gpu as plgpu
from pallas_gpu import errors, triton
from tests.support import everywhere
from tests.support.refusal import refused

RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal(s).astype(np.float32) for s in ((32, 16), (16, 64)))


def check(body, args, expected, **options):
    def make(interpret):
        return plgpu.pallas_call(
            body,
            jax.ShapeDtypeStruct(expected.shape, expected.dtype),
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
        )

    everywhere.check(make, args, expected, **options)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_dot_of_transposes(trans_a, trans_b):
    def body(a_ref, b_ref, o_ref):
        a, b = triton.load(a_ref), triton.load(b_ref, eviction_policy="evict_last")
        triton.store(o_ref, triton.dot(a, b, trans_a, trans_b))

    a, b = (np.asarray(x, jnp.bfloat16) for x in (A, B))
    expected = a.astype(np.float32) @ b.astype(np.float32)
    given = [
        np.ascontiguousarray(x) for x in (a.T if trans_a else a, b.T if trans_b else b)
    ]
    check(body, given, expected, atol=1e-4)


def test_inline_assembly_computes_elements():
    def body(x_ref, o_ref):
        x = x_ref[...]
        (o_ref[...],) = triton.elementwise_inline_asm(
            "mul.bf16x2 $0, $1, $1;",
            args=[x],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )

    x = np.asarray(A, jnp.bfloat16)
    check(body, [x], x * x)


@refused
def test_inline_assembly_keeps_the_shape():
    def body(x_ref, o_ref):
        out = jax.ShapeDtypeStruct((1,), jnp.float32)
        triton.elementwise_inline_asm(  # HERE
            "neg.f32 $0, $1;",
            args=[x_ref[...]],
            constraints="=f,f",
            pack=1,
            result_shape_dtypes=[out],
        )

    plgpu.pallas_call(body, jax.ShapeDtypeStruct(A.shape, A.dtype))(A)


def dot_in_the_emulator(**precision):
    def body(a_ref, b_ref, o_ref):
        o_ref[...] = triton.dot(a_ref[...], b_ref[...], **precision)

    out = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    return np.abs(plgpu.pallas_call(body, out)(A, B) - A @ B).max()


def test_the_precision_of_dot():
    assert dot_in_the_emulator(allow_tf32=False) < 1e-5
    assert dot_in_the_emulator(precision="highest") < 1e-5
    assert dot_in_the_emulator(allow_tf32=True) > 1e-4


def test_atomic_operations_and_hints():
    def body(x_ref, o_ref):
        columns = triton.max_contiguous(jnp.arange(64), 64)
        triton.store(o_ref, jnp.zeros(64, jnp.int32))
        triton.debug_barrier()
        triton.atomic_add(o_ref, columns // 2, x_ref[...], mask=columns < 32)
        triton.atomic_max(
            o_ref, None, triton.load(o_ref.at[0]) + jnp.zeros_like(columns)
        )

    x = np.arange(64, dtype=np.int32)
    sums = np.where(x < 16, 4 * x + 1, 0)
    check(body, [x], np.maximum(sums, 1).astype(np.int32))


def test_tanh():
    def body(x_ref, o_ref):
        o_ref[...] = triton.approx_tanh(x_ref[...])

    check(body, [A], np.tanh(A), atol=1e-6)


MISTAKES = {
    "a vector": lambda: triton.dot(A, A[0]),
    "two precisions": lambda: triton.dot(A, B, allow_tf32=True, precision="high"),
    "integers": lambda: triton.approx_tanh(np.zeros(1, int)),
    "a volatile load": lambda: triton.load(A, volatile=True),
    "no warps": lambda: triton.CompilerParams(num_warps=0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@refused
def test_mistakes(mistake):
    MISTAKES[mistake]()


def test_a_block_over_the_edge_is_masked_or_an_error():
    def body(x_ref, o_ref):
        triton.store(o_ref, triton.load(x_ref), mask=jnp.arange(24) < 16)

    spec = plgpu.BlockSpec((24,), lambda i: (i,))
    call = plgpu.pallas_call(
        body, np.zeros(16, np.float32), grid=1, in_specs=[spec], out_specs=spec,
        compiler_params=triton.CompilerParams(),
    )  # fmt: skip
    with pytest.raises(errors.OutOfBoundsError):
        call(np.zeros(16, np.float32))


@pytest.mark.parametrize(("pallas", "names"), [(plgpu, triton), (pl, pltriton)])
def test_a_block_may_exceed_smem(pallas, names):
    """With JAX's own `pallas_call` the parameters alone are ours."""

    def body(x_ref, o_ref):
        start = pallas.program_id(0) * 128
        x = names.load(x_ref.at[pallas.ds(start, 128)], mask=jnp.arange(128) < 100)
        names.store(o_ref, x)

    x = np.arange(2**17, dtype=np.float32)
    call = pallas.pallas_call(
        body, jax.ShapeDtypeStruct((256,), jnp.float32), grid=2,
        in_specs=[pallas.BlockSpec((2**17,), lambda i: (0,))],
        out_specs=pallas.BlockSpec((128,), lambda i: (i,)),
        compiler_params=triton.CompilerParams(num_warps=4),
    )  # fmt: skip
    np.testing.assert_array_equal(call(x), np.where(x % 128 < 100, x, 0)[:256])
