# SPDX-License-Identifier: Apache-2.0
"""Loops and branches: carries with and without a layout, register state, references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import hijax

import pallas_gpu as plgpu
from tests.support import everywhere, host
from tests.support.refusal import refused, refused_by
from tests.support.semantics import Lane, Warpgroup, under

pytestmark = pytest.mark.smoke

SHAPE = (64, 64)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def kernel(body):
    return everywhere.kernel(body, X)


@everywhere.gives([X], lambda x: 5 * x, rtol=1e-6)
def test_a_splat_carry_takes_the_layout_the_body_gives_it(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = lax.fori_loop(0, 5, lambda i, acc: acc + x, jnp.zeros(SHAPE))


@everywhere.gives([np.int32(5), X], lambda _, x: x * 10)
def test_a_loop_with_dynamic_bounds_and_a_scalar_carry(n_ref, x_ref, o_ref):
    total = lax.fori_loop(0, n_ref[()], lambda i, c: c + i, jnp.int32(0))
    o_ref[...] = x_ref[...] * total.astype(jnp.float32)


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


@everywhere.gives([], lambda: np.full(SHAPE, 3 + 7 + 11, np.int32))
def test_loop_passes_its_index_in_steps(o_ref):
    @plgpu.loop(3, 12, step=4, init_carry=jnp.int32(0))
    def total(i, carry):
        return carry + i

    o_ref[...] = jnp.broadcast_to(total, SHAPE)


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


@refused
def test_a_loop_whose_carry_changes_layout_names_both_under_lane():
    def body(x_ref, o_ref):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WG_STRIDED(SHAPE, 1))
        start = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        o_ref[...] = lax.fori_loop(0, 2, lambda i, acc: x, start)  # HERE

    everywhere.run(body, [X], X, semantics=[Warpgroup])
    plgpu.offline.lower(under(Lane, kernel(body)(None)), X)


@everywhere.gives([X], lambda x: np.flip(x))
def test_a_loop_whose_body_gives_a_default_layout_keeps_that_of_its_carry(x_ref, o_ref):
    x = x_ref[...]
    start = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
    o_ref[...] = lax.fori_loop(0, 2, lambda i, acc: jnp.flip(x), start)


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


class Affine(hijax.HiPrim):
    """2x + 1, in operations that JAX's tracing does not see."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return jnp.linalg.norm(x * 0) + jax.jit(lambda y: 2 * y + 1)(x)


@everywhere.gives([X], lambda x: 4 * x + 3, rtol=1e-6)
def test_a_primitive_of_hijax_is_the_operations_that_it_stands_for(x_ref, o_ref):
    def step(_, x):
        return Affine(jax.typeof(x))(x)

    o_ref[...] = lax.fori_loop(0, 2, step, x_ref[...])
