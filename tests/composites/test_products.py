# SPDX-License-Identifier: Apache-2.0
"""Matrix products of values: `@`, `jnp.dot` and `dot_general` in our own kernels."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused_by
from tests.support.semantics import under
from tests.support.value_products import (
    TOLERANCE,
    check_product,
    float64,
    kernel,
    numbers,
    sum_type,
)

F32 = jnp.float32


def check_value(function, a, b, expression="mk,kn->mn", *args, **options):
    """As `check_product`, of a function of the values."""

    def body(a_ref, b_ref, o_ref):
        o_ref[...] = function(a_ref[...], b_ref[...])

    check_product(body, a, b, expression, *args, **options)


def dot(out=F32):
    return functools.partial(jnp.dot, preferred_element_type=out)


def einsum(expression, out=F32):
    return functools.partial(jnp.einsum, expression, preferred_element_type=out)


# By wgmma; too small for it, each warp multiplies a part.
@pytest.mark.smoke
@pytest.mark.parametrize("sizes", [(64, 64, 128), (32, 32, 32)], ids=["64", "32"])
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_types_of_the_tensor_core(rng, dtype, sizes):
    m, k, n = sizes
    a, b = numbers(rng, dtype, m, k), numbers(rng, dtype, k, n)
    check_value(dot(sum_type(dtype)), a, b, out=sum_type(dtype))


@pytest.mark.parametrize("expression", ["km,kn->mn", "mk,nk->mn", "km,nk->mn"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_einsum_of_either_order(rng, dtype, expression):
    sizes = {"m": 64, "n": 128, "k": 64}
    left, right = expression.split("->")[0].split(",")
    a = numbers(rng, dtype, *(sizes[d] for d in left))
    b = numbers(rng, dtype, *(sizes[d] for d in right))
    out = sum_type(dtype)
    check_value(einsum(expression, out), a, b, expression, out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_operator_has_the_operands_type(rng, dtype):
    a, b = numbers(rng, dtype, 64, 64), numbers(rng, dtype, 64, 64)
    check_value(operator.matmul, a, b, out=jnp.dtype(dtype), tolerance=5e-3)


@pytest.mark.parametrize("precision", ["highest", "BF16_BF16_F32_X3"])
def test_float32_with_a_precision_is_split_into_parts(rng, precision):
    a, b = numbers(rng, "float32", 64, 64), numbers(rng, "float32", 64, 64)
    tolerance = 2e-7 if precision == "highest" else 1e-5
    product = functools.partial(jnp.dot, precision=precision)
    check_value(product, a, b, tolerance=tolerance)


def test_infinities_of_a_product_with_precision_highest(rng):
    """The products of small parts, which are NaN there, do not replace them."""
    a, b = numbers(rng, "float32", 64, 64), jnp.full((64, 64), 2.0)
    a = a.at[3, 5].set(jnp.inf).at[7, 9].set(-jnp.inf)

    def body(a_ref, b_ref, o_ref):
        o_ref[...] = jnp.dot(a_ref[...], b_ref[...], precision="highest")

    expected = float64(a) @ float64(b)
    everywhere.check(kernel(body, (64, 64)), [a, b], expected, atol=1e-3)


@pytest.mark.parametrize(
    ("pair", "out"),
    [
        (("int8", "uint8"), jnp.int32),
        (("float8_e4m3fn", "float8_e5m2"), F32),
        (("bfloat16", "float16"), F32),
        (("int8", "bfloat16"), F32),
    ],
)
@pytest.mark.parametrize("rows", [32, 64])
def test_operands_of_two_types(rng, pair, out, rows):
    a, b = numbers(rng, pair[0], rows, 64), numbers(rng, pair[1], 64, 64)
    dims = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    product = functools.partial(jax.lax.dot_general, preferred_element_type=out, **dims)
    tolerance = 0 if out == jnp.int32 else 2e-3
    check_value(product, a, b, out=out, tolerance=tolerance)


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint32", "int64", "float64"])
def test_types_that_the_tensor_core_does_not_have(rng, dtype):
    """They are added term by term."""
    with jax.enable_x64(True):
        a, b = numbers(rng, dtype, 32, 16), numbers(rng, dtype, 16, 32)
        how = {"out": a.dtype, "tolerance": 1e-15 if dtype == "float64" else 0.0}
        check_value(operator.matmul, a, b, **how)


@pytest.mark.parametrize("rows", [32, 64])
def test_a_product_in_one_of_several_warpgroups(rng, rows):
    """32 rows stay in registers, for mma.sync; wgmma multiplies 64."""
    a, b = numbers(rng, "bfloat16", 2, rows, 32), numbers(rng, "bfloat16", 32, 32)

    def body(a_ref, b_ref, o_ref):
        wg = jax.lax.axis_index("wg")
        o_ref[wg] = jnp.dot(a_ref[wg], b_ref[...], preferred_element_type=F32)

    make = kernel(body, (2, rows, 32), num_threads=2, thread_name="wg")
    everywhere.check(make, [a, b], float64(a) @ float64(b), atol=1e-4)


@pytest.mark.parametrize("shape", [(32, 16, 32), (10, 9, 8), (64, 24, 48)])
def test_a_sum_term_by_term_in_one_of_several_warpgroups(rng, shape):
    m, k, n = shape
    a, b = numbers(rng, "int32", m, k), numbers(rng, "int32", k, n)

    def body(a_ref, b_ref, o_ref):
        wg = jax.lax.axis_index("wg")
        o_ref[wg] = (a_ref[...] + wg) @ b_ref[...]

    make = kernel(body, (2, m, n), jnp.int32, num_threads=2, thread_name="wg")
    expected = np.stack([(np.asarray(a) + wg) @ np.asarray(b) for wg in range(2)])
    everywhere.check(make, [a, b], expected)


def test_the_emulator_reads_float32_as_tf32():
    x = np.full((64, 64), 1 + 2.0**-12, np.float32)

    def body(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...])

    everywhere.check(kernel(body, (64, 64)), [x], np.full((64, 64), 64.0))


# --- operands in SMEM, and accumulators -----------------------------------------------

M, N, K, STEPS = 64, 128, 64, 3
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def loop(multiply, start, finish):
    """Returns a kernel that adds up products of tiles that TMA copies."""

    def body(a_gmem, b_gmem, o_ref, a_smem, b_smem, barrier):
        def step(i, carry):
            part = plgpu.ds(i * K, K)
            plgpu.copy_gmem_to_smem(a_gmem.at[:, part], a_smem, barrier)
            plgpu.copy_gmem_to_smem(b_gmem.at[part], b_smem, barrier)
            plgpu.barrier_wait(barrier)
            return multiply(carry, a_smem, b_smem)

        def run(*acc):
            carry = jax.lax.fori_loop(
                0, STEPS, lambda i, c: step(i, (*acc, c)), start()
            )
            return finish(*acc, carry)

        if finish is carried:
            o_ref[...] = run()
        else:
            o_ref[...] = plgpu.run_scoped(run, plgpu.ACC((M, N)))

    tiles = [(M, K), (K, N)]
    scratch = [plgpu.SMEM(t, jnp.bfloat16, transforms=TILED) for t in tiles]
    barrier = plgpu.Barrier(num_arrivals=2)
    return kernel(body, (M, N), scratch_types=[*scratch, barrier])


def carried(value):
    return value


def of_accumulator(acc, _):
    return acc[...]


def by_hand(carry, a, b):
    plgpu.wgmma(carry[0], a, b)
    plgpu.wgmma_wait(0)


def in_reference(carry, a, b):
    carry[0][...] += jnp.dot(a[...], b[...], preferred_element_type=F32)


def in_carry(carry, a, b):
    return carry[0] + jnp.dot(a[...], b[...], preferred_element_type=F32)


def zeros():
    return jnp.zeros((M, N), F32)


@pytest.mark.parametrize("m", [16, 64])
def test_products_of_int32_in_smem(rng, m):
    x = numbers(rng, "int32", m, 64)

    def body(x_ref, o_ref, smem):
        smem[...] = x_ref[...]
        o_ref[...] = jnp.dot(smem[...], smem[...].T)

    everywhere.run(body, [x], x @ x.T, plgpu.SMEM((m, 64), jnp.int32))


LOOPS = {
    "by hand": loop(by_hand, lambda: None, of_accumulator),
    "reference": loop(in_reference, lambda: None, of_accumulator),
    "carry": loop(in_carry, zeros, carried),
}


@pytest.mark.parametrize("variant", ["reference", "carry"])
def test_products_that_add_up_in_a_loop(rng, variant):
    a = numbers(rng, "bfloat16", M, STEPS * K)
    b = numbers(rng, "bfloat16", STEPS * K, N)
    expected = float64(a) @ float64(b)
    everywhere.check(LOOPS[variant], [a, b], expected, atol=1e-3)


@pytest.mark.offline
@pytest.mark.parametrize("variant", ["reference", "carry"])
@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
def test_a_sum_of_products_is_the_code_of_a_hand_written_kernel(variant, semantics):
    """The accumulator stays in registers, the operands in SMEM: no sum, no zeros."""
    a = jax.ShapeDtypeStruct((M, STEPS * K), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((STEPS * K, N), jnp.bfloat16)
    ours, by_hand = (
        plgpu.offline.compile(under(semantics, LOOPS[name](None)), a, b)[0]
        for name in (variant, "by hand")
    )
    # A kernel by hand waits once more before it reads the accumulator.
    waits = {"wgmma": int(variant == "carry")}
    assert ours.instruction_counts == {
        name: count - waits.get(name, 0)
        for name, count in by_hand.instruction_counts.items()
    }
    assert ours.resources.spill_load_bytes == 0


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_sum_in_smem_along_a_sequential_axis(rng, target):
    """`acc_ref[...] += jnp.dot(a_ref[...], b_ref[...])`, as on other hardware."""
    a, b = numbers(rng, "bfloat16", 128, 128), numbers(rng, "bfloat16", 128, 64)
    expected = float64(a) @ float64(b)
    make, on_gpu = functools.partial(matmul, target), target == "sm_90a"
    everywhere.check(make, [a, b], expected, atol=1e-4, on_gpu=on_gpu)


def matmul(target, interpret, tile=64):
    """Returns a product in tiles whose last grid axis adds up."""

    def body(a_ref, b_ref, o_ref, acc_ref):
        @plgpu.when(plgpu.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(a_ref[...], b_ref[...], preferred_element_type=F32)

        @plgpu.when(plgpu.program_id(2) == plgpu.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...]

    def product(a, b):
        (m, k), n = a.shape, b.shape[1]
        return plgpu.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((m, n), F32),
            grid=(m // tile, n // tile, k // tile),
            in_specs=[
                plgpu.BlockSpec((tile, tile), lambda i, j, k: (i, k)),
                plgpu.BlockSpec((tile, tile), lambda i, j, k: (k, j)),
            ],
            out_specs=plgpu.BlockSpec((tile, tile), lambda i, j, k: (i, j)),
            scratch_shapes=[plgpu.SMEM((tile, tile), F32)],
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                target=target,
            ),
        )(a, b)

    return product


@pytest.mark.offline
@pytest.mark.parametrize(
    ("target", "tile"), [("sm_90a", 64), ("sm_90a", 128), ("sm_100a", 64)]
)
def test_typical_products_do_not_spill(target, tile):
    a = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    (report,) = plgpu.offline.compile(matmul(target, None, tile), a, a, target=target)
    assert report.resources.spill_load_bytes == 0
    assert ("wgmma" in report.instruction_counts) == (target == "sm_90a")


SQUARE = np.ones((64, 64), np.float32)


@refused_by(everywhere.emulate, [SQUARE], SQUARE)
def test_an_unknown_precision_is_refused(a, o):
    o[...] = jnp.dot(a[...], a[...], precision="F64_F64_F64")  # HERE


# --- shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "shapes"),
    [
        ("bmk,bkn->bmn", ((2, 64, 32), (2, 32, 64))),
        ("bmk,bnk->bmn", ((2, 32, 32), (2, 32, 32))),
        ("mbk,bkn->bmn", ((32, 2, 32), (2, 32, 32))),
        ("mkl,kln->mn", ((32, 2, 16), (2, 16, 32))),
        ("hmk,kn->hmn", ((2, 32, 32), (32, 32))),
    ],
)
def test_batches_and_sums_over_several_dimensions(rng, expression, shapes):
    a, b = (numbers(rng, "bfloat16", *shape) for shape in shapes)
    check_value(einsum(expression), a, b, expression)


@pytest.mark.parametrize(
    ("expression", "shapes"),
    [
        ("k,kn->n", ((64,), (64, 128))),
        ("mk,k->m", ((128, 64), (64,))),
        ("bk,bk->b", ((128, 32), (128, 32))),
        ("bmk,bk->bm", ((2, 64, 32), (2, 32))),
        ("m,n->mn", ((64,), (128,))),
    ],
)
def test_products_with_vectors_are_in_float32(rng, expression, shapes):
    a, b = (numbers(rng, "float32", *shape) for shape in shapes)
    check_value(einsum(expression, None), a, b, expression, tolerance=1e-6)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("bfloat16", (1, 64, 64)),
        ("bfloat16", (100, 77, 50)),
        ("float32", (24, 40, 20)),
        ("int8", (7, 5, 3)),
        ("int32", (10, 9, 8)),
    ],
)
def test_sizes_that_are_not_multiples_of_an_instructions(rng, dtype, shape):
    """They are padded with zeros."""
    m, n, k = shape
    a, b = numbers(rng, dtype, m, k), numbers(rng, dtype, k, n)
    how = {"out": sum_type(dtype), "tolerance": TOLERANCE.get(dtype, 0.0)}
    check_value(dot(sum_type(dtype)), a, b, **how)


def test_a_sum_with_a_padded_product(rng):
    a, c = numbers(rng, "bfloat16", 24, 24), numbers(rng, "float32", 24, 24)

    def body(a_ref, c_ref, o_ref):
        o_ref[...] = c_ref[...] + dot()(a_ref[...], a_ref[...])

    expected = float64(c) + float64(a) @ float64(a)
    everywhere.check(kernel(body, (24, 24)), [a, c], expected, atol=1e-4)
