# SPDX-License-Identifier: Apache-2.0
"""`pallas_call` without block specs: the body gets whole arrays, as in Triton."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused, refused_by

BLOCK = 128


def check(body, args, expected, *, by=plgpu.pallas_call, rtol=0.0, **options):
    """Compares the result of a call, which has the type of the expected one."""
    got = by(body, f32(*expected.shape), **options)(*args)
    np.testing.assert_allclose(got, expected, rtol=rtol)


def masked_add(x_ref, y_ref, o_ref):
    """As one writes it in Triton: offsets from the program's number, and a mask."""
    offsets = plgpu.program_id(0) * BLOCK + jnp.arange(BLOCK)
    mask = offsets < x_ref.size
    x, y = (plgpu.load(ref, offsets, mask=mask) for ref in (x_ref, y_ref))
    plgpu.store(o_ref, offsets, x + y, mask=mask)


def test_programs_take_their_parts_of_whole_arrays():
    x, y = numbers(300), numbers(300)[::-1].copy()

    def make(interpret):
        grid = plgpu.cdiv(300, BLOCK)
        return plgpu.pallas_call(masked_add, f32(300), grid=grid, interpret=interpret)

    everywhere.check(make, (x, y), x + y)


@pytest.mark.parametrize("grid", [1, 3])
def test_a_whole_array_in_place(grid):
    """Whether there are several programs does not change what the body gets."""

    def body(x_ref, o_ref):
        i = plgpu.program_id(0)
        o_ref[i] = x_ref[i] + 1

    x = numbers(3, 128)
    expected = x + (np.arange(3) < grid)[:, None]
    check(body, [x], expected, grid=grid, input_output_aliases={0: 0})


@pytest.mark.parametrize("steps", [None, 2])
def test_a_whole_array_in_place_of_one_program(steps):
    """Argument and result are one array without a parallel axis, too."""

    def body(rows_ref, x_ref, o_ref):
        o_ref[rows_ref[0]] += 1
        o_ref[2] = x_ref[rows_ref[0]] * 2

    x, rows = numbers(3, 128), np.int32([1])
    expected = x.copy()
    expected[1] += steps or 1
    expected[2] = expected[1] * 2
    semantics = None if steps is None else ("arbitrary",)
    check(
        body, [rows, x], expected, input_output_aliases={1: 0}, grid=steps or (),
        compiler_params=plgpu.CompilerParams(dimension_semantics=semantics),
    )  # fmt: skip


def test_whole_arrays_of_programs_may_exceed_smem():
    def body(x_ref, row_ref, o_ref):
        i = plgpu.program_id(0)
        o_ref[i] = x_ref[i] + row_ref[...]

    x, row = numbers(512, 128), numbers(128)
    check(body, [x, row], x + row, grid=512, in_specs=plgpu.no_block_spec)


def test_jaxs_own_call_without_specs():
    def body(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[i] = 2 * x_ref[i]

    x, params = numbers(4, 128), plgpu.CompilerParams()
    check(body, [x], 2 * x, by=pl.pallas_call, grid=4, compiler_params=params)


def test_a_whole_matrix_of_wgmma_is_in_smem_by_its_spec():
    def body(x_ref, w_ref, o_ref, acc):
        plgpu.wgmma(acc, x_ref, w_ref)
        plgpu.wgmma_wait(0)
        o_ref[...] = acc[...]

    def call(whole):
        rows = plgpu.BlockSpec((64, 64), lambda i: (i, 0))
        return plgpu.pallas_call(
            body, f32(128, 64), grid=2, in_specs=[rows, whole], out_specs=rows,
            scratch_shapes=[plgpu.ACC((64, 64))],
        )  # fmt: skip

    x, w = (jnp.asarray(numbers(n, 64) % 7, jnp.bfloat16) for n in (128, 64))
    with pytest.raises(errors.MemorySpaceError, match="b is in the wrong") as e:
        call(None)(x, w)
    hint = "plgpu.BlockSpec(memory_space=plgpu.SMEM)"
    assert hint in e.value.hint
    exact = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    np.testing.assert_array_equal(call(eval(hint))(x, w), exact)


# --- each program stores its own part -------------------------------------------------


def sums(x_ref, o_ref):
    """As one writes it for a TPU, where the steps of a grid follow each other."""
    i = plgpu.program_id(0)

    @plgpu.when(i == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[i]  # HERE


def first_half(x_ref, o_ref):
    def step(k, _):
        o_ref[plgpu.ds(0, 64)] = x_ref[plgpu.program_id(0), plgpu.ds(0, 64)]  # HERE

    lax.fori_loop(0, 2, step, None)


@pytest.mark.parametrize("body", [sums, first_half])
@refused
def test_the_same_part_of_a_whole_result_in_each_program_is_refused(body):
    call = plgpu.pallas_call(body, f32(128), grid=4)
    call(numbers(4, 128))


@refused_by(
    lambda body: pl.pallas_call(
        body, f32(128), grid=4, compiler_params=plgpu.CompilerParams()
    )(numbers(4, 128))
)
def test_the_same_part_in_each_program_of_jaxs_own_call_is_refused(x_ref, o_ref):
    o_ref[...] = x_ref[0]  # HERE


def test_the_sequential_axis_of_the_hint_works():
    params = plgpu.CompilerParams(dimension_semantics=("arbitrary",))
    x = numbers(4, 128)
    check(sums, [x], x.sum(0), rtol=1e-5, grid=4, compiler_params=params)


def test_programs_that_take_turns_may_store_the_same_part():
    def body(x_ref, o_ref):
        i, n = plgpu.program_id(0), plgpu.num_programs(0)
        turn = plgpu.get_global(plgpu.SemaphoreType.REGULAR)
        plgpu.semaphore_wait(turn, i, decrement=False)
        o_ref[...] = x_ref[i] + jnp.where(i == 0, 0, o_ref[...])
        plgpu.semaphore_signal(turn)

        @plgpu.when(i == n - 1)
        def _():
            plgpu.semaphore_wait(turn, n)

    x = numbers(4, 128)
    check(body, [x], x.sum(0), rtol=1e-5, grid=4)


@refused_by(lambda body: plgpu.pallas_call(body, f32(2, 128), grid=4)(numbers(4, 128)))
def test_a_traced_index_that_programs_share_is_a_race(x_ref, o_ref):
    i = plgpu.program_id(0)
    o_ref[i // 2] = x_ref[i]
