# SPDX-License-Identifier: Apache-2.0
"""Loops and branches: carries with and without a layout, register state, references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere, host
from tests.support.refusal import refused_by
from tests.support.semantics import Lane, Warpgroup, under

pytestmark = pytest.mark.smoke

SHAPE = (64, 64)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def kernel(body, out_dtype=jnp.float32, out_shape=SHAPE, **options):
    return everywhere.kernel(
        body, jax.ShapeDtypeStruct(out_shape, out_dtype), **options
    )


@everywhere.gives([X], lambda x: 5 * x, rtol=1e-6)
def test_a_splat_carry_takes_the_layout_the_body_gives_it(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = lax.fori_loop(0, 5, lambda i, acc: acc + x, jnp.zeros(SHAPE))


@everywhere.gives([X], lambda x: x / 16)
def test_an_array_carry_keeps_its_layout(x_ref, o_ref):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
    o_ref[...] = lax.fori_loop(0, 4, lambda i, acc: acc * 0.5, x)


@everywhere.gives([np.int32(5), X], lambda _, x: x * 10)
def test_a_loop_with_dynamic_bounds_and_a_scalar_carry(n_ref, x_ref, o_ref):
    total = lax.fori_loop(0, n_ref[()], lambda i, c: c + i, jnp.int32(0))
    o_ref[...] = x_ref[...] * total.astype(jnp.float32)


@everywhere.gives([X], lambda x: np.asarray(x).reshape(4, 16, 64).sum(0), atol=1e-6)
def test_a_loop_that_reads_references_by_its_counter(x_ref, o_ref):
    def step(i, acc):
        return acc + x_ref[plgpu.ds(i * 16, 16)]

    o_ref[...] = lax.fori_loop(0, 4, step, jnp.zeros((16, 64)))


@pytest.mark.parametrize("unroll", [1, 2, 4])
def test_unrolling_changes_nothing(unroll):
    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = lax.fori_loop(
            0, 4, lambda i, acc: acc + x * i.astype(jnp.float32), x, unroll=unroll
        )

    everywhere.run(body, [X], 7 * X, rtol=1e-5, atol=1e-6)


@everywhere.gives([X], lambda x: x + 4, atol=1e-5)
def test_a_while_loop_ends_when_its_condition_fails(x_ref, o_ref):
    def cond(state):
        return state[0] < 37

    def step(state):
        return state[0] * 2, state[1] + 1.0

    _, out = lax.while_loop(cond, step, (jnp.int32(3), x_ref[...]))
    o_ref[...] = out


def test_a_while_loop_that_changes_the_layout_of_its_carry_ends():
    strided = plgpu.Layout.WG_STRIDED(SHAPE, vec_size=4)

    def body(x_ref, o_ref):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        flat = plgpu.load(x_ref, layout=strided, optimized=False)

        def cond(state):
            return (state[0] < 9) & (jnp.max(state[1]) < 100)

        def step(state):
            i, a, b = state
            return i + 1, plgpu.layout_cast(b + 1.0, strided), a

        o_ref[...] = lax.while_loop(cond, step, (0, x, flat))[1]

    everywhere.run(body, [X], X + 5, atol=1e-5, semantics=[Warpgroup])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_])
def test_a_jitted_function_in_a_body_may_close_over_a_scalar(dtype):
    scalar = jnp.asarray(1, dtype)

    @jax.jit
    def scaled(value):
        return value + scalar

    def body(x, o):
        o[...] = lax.fori_loop(0, 2, lambda _, value: scaled(value), x[...])

    everywhere.run(body, [X], X + 1 + 1)


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 9])
def test_a_switch_clamps_its_index(index):
    def body(i_ref, x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = lax.switch(
            i_ref[()], [lambda: x, lambda: x * 2, lambda: jnp.ones(SHAPE)]
        )

    expected = [X, X * 2, jnp.ones(SHAPE)][min(max(index, 0), 2)]
    everywhere.run(body, [jnp.int32(index), X], expected)


@everywhere.gives(
    [X],
    lambda x: x * np.repeat(np.array([1, -1, 1, -1], x.dtype), 16)[:, None],
    grid={"i": 4},
)
def test_when_runs_its_body_for_the_right_instance(x_ref, o_ref):
    i = lax.axis_index("i")
    rows = plgpu.ds(i * 16, 16)

    @plgpu.when(i % 2 == 0)
    def _():
        o_ref[rows] = x_ref[rows]

    @plgpu.when(i % 2 == 1)
    def _():
        o_ref[rows] = -x_ref[rows]


@everywhere.gives([X], lambda x: 6 * x + 2, atol=1e-4)
def test_a_nested_loop_keeps_both_carries(x_ref, o_ref):
    x = x_ref[...]

    def outer(i, acc):
        return lax.fori_loop(0, 3, lambda j, a: a + x, acc) + 1.0

    o_ref[...] = lax.fori_loop(0, 2, outer, jnp.zeros(SHAPE))


@everywhere.gives([], lambda: np.full(SHAPE, 3 + 7 + 11, np.int32))
def test_loop_passes_its_index_in_steps(o_ref):
    @plgpu.loop(3, 12, step=4, init_carry=jnp.int32(0))
    def total(i, carry):
        return carry + i

    o_ref[...] = jnp.broadcast_to(total, SHAPE)


def test_barrier_parities_survive_loops_and_branches():
    """A two-stage pipeline of copies: each barrier completes phase after phase."""
    x = host.array(np.random.default_rng(1).standard_normal((512, 64)), jnp.float32)

    def body(x_ref, o_ref, tiles, barriers):
        def start(i):
            slot = lax.rem(i, 2)
            plgpu.copy_gmem_to_smem(
                x_ref.at[plgpu.ds(i * 64, 64)], tiles.at[slot], barriers.at[slot]
            )

        start(jnp.int32(0))

        def step(i, acc):
            @plgpu.when(i + 1 < 8)
            def _():
                start(i + 1)

            slot = lax.rem(i, 2)
            plgpu.barrier_wait(barriers.at[slot])
            return acc + tiles[slot]

        o_ref[...] = lax.fori_loop(0, 8, step, jnp.zeros((64, 64)))

    make = kernel(
        body,
        scratch_types=[
            plgpu.SMEM((2, 64, 64), jnp.float32),
            plgpu.Barrier(num_barriers=2),
        ],
    )
    everywhere.check(make, [x], np.asarray(x).reshape(8, 64, 64).sum(0), atol=1e-5)


def test_a_scope_in_a_loop_finds_its_barrier_in_the_right_phase():
    x = host.array(np.random.default_rng(2).standard_normal((256, 64)), jnp.float32)

    def body(x_ref, o_ref):
        def step(i, acc):
            def scope(tile, barrier):
                plgpu.copy_gmem_to_smem(x_ref.at[plgpu.ds(i * 64, 64)], tile, barrier)
                plgpu.barrier_wait(barrier)
                return tile[...]

            loaded = plgpu.run_scoped(
                scope, plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()
            )
            return acc + loaded

        o_ref[...] = lax.fori_loop(0, 4, step, jnp.zeros((64, 64)))

    expected = np.asarray(x).reshape(4, 64, 64).sum(0)
    everywhere.run(body, [x], expected, atol=1e-5)


def test_a_loop_whose_carry_changes_layout_names_both_under_lane():
    def body(x_ref, o_ref):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WG_STRIDED(SHAPE, 1))
        start = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        o_ref[...] = lax.fori_loop(0, 2, lambda i, acc: x, start)

    with pytest.raises(plgpu.errors.LayoutError) as info:
        plgpu.offline.lower(under(Lane, kernel(body)(None)), X)
    assert "Layout.WGMMA" in str(info.value) and "STRIDED" in str(info.value)
    assert "test_control.py" in str(info.value)
    everywhere.run(body, [X], X, semantics=[Warpgroup])


@everywhere.gives([X], lambda x: np.flip(x))
def test_a_loop_whose_body_gives_a_default_layout_keeps_that_of_its_carry(x_ref, o_ref):
    x = x_ref[...]
    start = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
    o_ref[...] = lax.fori_loop(0, 2, lambda i, acc: jnp.flip(x), start)


def test_one_warpgroup_hands_work_to_another():
    """A producer warpgroup copies, a consumer multiplies; barriers both ways."""
    x = host.array(np.random.default_rng(3).standard_normal((512, 64)), jnp.float32)

    def body(x_ref, o_ref, tile, out_tile, full, empty):
        role = lax.axis_index("wg")

        @plgpu.when(role == 0)
        def _():
            def produce(i, _):
                plgpu.barrier_wait(empty)
                rows = plgpu.ds(i * 64, 64)
                plgpu.copy_gmem_to_smem(x_ref.at[rows], tile, full)

            lax.fori_loop(0, 8, produce, None)

        @plgpu.when(role == 1)
        def _():
            plgpu.barrier_arrive(empty)

            def consume(i, _):
                plgpu.barrier_wait(full)
                value = tile[...] * 2.0

                @plgpu.when(i < 7)
                def _():
                    plgpu.barrier_arrive(empty)

                plgpu.wait_smem_to_gmem(0)
                out_tile[...] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_tile, o_ref.at[plgpu.ds(i * 64, 64)])

            lax.fori_loop(0, 8, consume, None)
            plgpu.wait_smem_to_gmem(0)

    make = kernel(
        body,
        out_shape=(512, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
    )
    everywhere.check(make, [x], 2 * x)


@everywhere.gives([X], lambda x: x * 2 + 1)
def test_code_that_differs_by_platform_is_that_for_cuda(x_ref, o_ref):
    x = x_ref[...]
    chosen = lax.platform_dependent(
        x, cpu=lambda x: -x, cuda=lambda x: x * 2, default=lambda x: x
    )
    o_ref[...] = lax.platform_dependent(
        chosen, tpu=lambda x: -x, default=lambda x: x + 1
    )


@refused_by(lambda body: kernel(body)(None)(X))
def test_code_for_other_platforms_alone_is_refused(x_ref, o_ref):
    o_ref[...] = lax.platform_dependent(  # HERE
        x_ref[...], cpu=lambda x: x, tpu=lambda x: x
    )
