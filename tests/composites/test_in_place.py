# SPDX-License-Identifier: Apache-2.0
"""Products whose operands stay in SMEM: pipelines, stacks, branches, copied blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere, host
from tests.support.value_products import float64, kernel

F32, BF16 = jnp.float32, jnp.bfloat16
WARPGROUP = plgpu.LoweringSemantics.Warpgroup


def numbers(rng, *shape):
    return host.array(rng.standard_normal(shape), BF16)


def check(make, args, expected):
    """Layouts are inferred: blocks and scratch are declared without transforms."""
    everywhere.check(
        make, args, expected, atol=1e-3, semantics=[WARPGROUP], executed=[WARPGROUP]
    )


def loads(make, *args):
    """The number of instructions that load from SMEM."""
    (report,) = plgpu.offline.compile(make(None), *args)
    counts = report.instruction_counts
    assert "wgmma" in counts
    return counts.get("ld.shared", 0) + counts.get("ldmatrix", 0)


def batches(x_gmem, y_gmem, o_ref, x_smem, y_smem, barrier):
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
    plgpu.copy_gmem_to_smem(y_gmem, y_smem, barrier)
    plgpu.barrier_wait(barrier)
    o_ref[...] = jnp.einsum(
        "bmk,bnk->bmn", x_smem[...], y_smem[...], preferred_element_type=F32
    )


@pytest.mark.offline
def test_matrices_of_a_stack_are_read_where_they_are(rng):
    x, y = numbers(rng, 2, 64, 64), numbers(rng, 2, 64, 64)
    tiles = plgpu.SMEM((2, 64, 64), BF16)
    scratch = [tiles, tiles, plgpu.Barrier(num_arrivals=2)]
    make = kernel(batches, (2, 64, 64), scratch_types=scratch)
    check(make, [x, y], np.einsum("bmk,bnk->bmn", float64(x), float64(y)))
    assert loads(make, x, y) == 0


def over_slices(x_gmem, y_gmem, o_ref):
    def step(total, parts):
        return total + jnp.dot(*parts, preferred_element_type=F32), None

    start = jnp.zeros((64, 64), F32)
    o_ref[...], _ = jax.lax.scan(step, start, (x_gmem[...], y_gmem[...]))


def over_results(x_gmem, y_gmem, o_ref):
    def scaled(_, y):
        return None, 2 * y

    def step(total, y):
        return total + jnp.dot(x_gmem[1], y, preferred_element_type=F32), None

    _, results = jax.lax.scan(scaled, None, y_gmem[...])
    o_ref[...], _ = jax.lax.scan(step, jnp.zeros((64, 64), F32), results)


@pytest.mark.parametrize("body", [over_slices, over_results])
def test_what_a_scan_slices_is_fenced_before_a_product_reads_it(rng, body):
    x, y = numbers(rng, 2, 64, 64), numbers(rng, 2, 64, 64)
    wide = float64(x), float64(y)
    expected = wide[0] @ wide[1] if body is over_slices else 2 * wide[0][1] @ wide[1]
    check(kernel(body, (64, 64)), [x, y], expected.sum(0))


def pipelined(x_gmem, y_gmem, o_ref):
    def step(_, x_ref, y_ref, acc):
        return acc + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

    o_ref[...] = plgpu.emit_pipeline(
        step,
        grid=(4,),
        in_specs=[
            plgpu.BlockSpec((64, 64), lambda k: (0, k)),
            plgpu.BlockSpec((64, 64), lambda k: (k, 0)),
        ],
        init_carry=jnp.zeros((64, 64), F32),
    )(x_gmem, y_gmem)


@pytest.mark.offline
def test_blocks_of_a_pipeline_are_read_where_they_are(rng):
    x, y = numbers(rng, 64, 256), numbers(rng, 256, 64)
    make = kernel(pipelined, (64, 64))
    check(make, [x, y], float64(x) @ float64(y))
    assert loads(make, x, y) == 0


def test_an_array_that_is_also_read_by_rows(rng):
    x, y = numbers(rng, 64, 64), numbers(rng, 64, 64)

    def body(x_ref, y_ref, o_ref, tile):
        tile[...] = x_ref[...]
        row = tile[5].astype(F32)
        product = jnp.dot(tile[...], y_ref[...], preferred_element_type=F32)
        o_ref[...] = product + row[None, :]

    expected = float64(x) @ float64(y) + float64(x)[5]
    scratch = [plgpu.SMEM((64, 64), BF16)]
    check(kernel(body, (64, 64), scratch_types=scratch), [x, y], expected)


def test_a_product_in_a_branch_of_what_is_loaded_there(rng):
    x, y = numbers(rng, 64, 64), numbers(rng, 64, 64)

    def body(x_ref, y_ref, o_ref, left, right):
        left[...] = x_ref[...]
        right[...] = y_ref[...]
        o_ref[...] = jax.lax.cond(
            jnp.sum(left[...].astype(F32)) < 1e9,
            lambda: jnp.dot(left[...], right[...], preferred_element_type=F32),
            lambda: jnp.zeros((64, 64), F32),
        )

    scratch = [plgpu.SMEM((64, 64), BF16)] * 2
    make = kernel(body, (64, 64), scratch_types=scratch)
    check(make, [x, y], float64(x) @ float64(y))


def test_operands_that_threads_have_stored_are_made_visible_first(rng):
    """Lockstep reports a read by the tensor core that no proxy fence precedes."""
    x, y = numbers(rng, 64, 64), numbers(rng, 64, 64)

    def body(x_ref, y_ref, o_ref, left, right):
        left[...] = x_ref[...] * 2
        right[...] = y_ref[...]
        o_ref[...] = jnp.dot(left[...], right[...], preferred_element_type=F32)

    scratch = [plgpu.SMEM((64, 64), BF16)] * 2
    make = kernel(body, (64, 64), scratch_types=scratch)
    check(make, [x, y], 2 * float64(x) @ float64(y))


def test_a_sum_of_two_products_and_a_jitted_one(rng):
    x, y = numbers(rng, 64, 64), numbers(rng, 64, 64)

    @jax.jit
    def dot(a, b):
        return jnp.dot(a, b, preferred_element_type=F32)

    def body(x_ref, y_ref, o_ref):
        a, b = x_ref[...], y_ref[...]
        first = jnp.dot(a, b, preferred_element_type=F32)
        o_ref[...] = first + jnp.dot(b, a, preferred_element_type=F32) + dot(a, a)

    a, b = float64(x), float64(y)
    check(kernel(body, (64, 64)), [x, y], a @ b + b @ a + a @ a)


def test_blocks_that_threads_copy_are_made_visible_to_the_tensor_core(rng):
    """Rows of 100 elements: TMA cannot copy them."""
    x, y = numbers(rng, 64, 100), numbers(rng, 100, 77)

    def body(x_ref, y_ref, o_ref, acc_ref):
        @plgpu.when(plgpu.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)
        o_ref[...] = acc_ref[...]

    def make(interpret):
        def product(x, y):
            return plgpu.pallas_call(
                body,
                out_shape=jax.ShapeDtypeStruct((64, 77), F32),
                grid=(2,),
                in_specs=[
                    plgpu.BlockSpec((64, 64), lambda k: (0, k)),
                    plgpu.BlockSpec((64, 80), lambda k: (k, 0)),
                ],
                out_specs=plgpu.BlockSpec((64, 80), lambda k: (0, 0)),
                scratch_shapes=[plgpu.ACC((64, 80), F32)],
                interpret=interpret,
                compiler_params=plgpu.CompilerParams(
                    dimension_semantics=("arbitrary",)
                ),
            )(x, y)

        return product

    check(make, [x, y], float64(x) @ float64(y))
