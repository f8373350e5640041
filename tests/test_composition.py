# SPDX-License-Identifier: Apache-2.0
"""Kernels inside of JAX, and JAX inside of kernels, against plain JAX.

Every kernel here is also lowered for a GPU: what the emulator runs has to lower.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support.entry_kernels import SHAPE, TILE, f32, make, numbers
from tests.support.everywhere import gives

pytestmark = pytest.mark.smoke

ROWS = plgpu.BlockSpec((32, 128), lambda i: (i, 0))


def check(function, *args, expected):
    """Compares a function of kernels with what it should give, and lowers it."""
    result = function(*args)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert plgpu.offline.lower(function, *args)


def add_one(x, o):
    o[...] = x[...] + 1


def add_twice(x, y, o):
    o[...] = x[...] + 2 * y[...]


def by_kernel():
    return make(add_one)


def by_pallas_call():
    return plgpu.pallas_call(add_one, f32(), grid=2, in_specs=[ROWS], out_specs=ROWS)


X = numbers()
XS = np.stack([X, X * 2, X * 3])


# --- transformations ------------------------------------------------------------------


@pytest.mark.parametrize("entry", [by_kernel, by_pallas_call])
@pytest.mark.parametrize(
    "order",
    [jax.vmap, lambda k: jax.jit(jax.vmap(k)), lambda k: jax.vmap(jax.jit(k))],
    ids=["vmap", "jit of vmap", "vmap of jit"],
)
def test_vmap(entry, order):
    check(order(entry()), XS, expected=XS + 1)


@pytest.mark.parametrize("entry", ["kernel", "pallas_call"])
def test_vmap_with_an_operand_that_all_share(entry):
    k = make(add_twice)
    if entry == "pallas_call":
        k = plgpu.pallas_call(
            add_twice, f32(), grid=2, in_specs=[ROWS, ROWS], out_specs=ROWS
        )
    check(jax.vmap(k, in_axes=(0, None)), XS, X, expected=XS + 2 * X)
    check(jax.vmap(k, in_axes=(None, 0)), X, XS, expected=X + 2 * XS)


def test_vmap_of_a_grid_with_positions():
    def body(x, o):
        i = lax.axis_index("i")
        rows = plgpu.ds(i * 16, 16)
        o[rows] = x[rows] + i

    k = make(body, grid=(4,), grid_names=("i",))
    shift = np.repeat(np.arange(4, dtype=np.float32), 16)[:, None]
    check(jax.vmap(k), XS, expected=XS + shift)


def test_several_kernels_in_one_program():
    plus = make(add_one)
    times = make(lambda x, o: o.set(x[...] * 2))
    program = jax.jit(lambda x: (times(plus(x)), plus(times(x))))
    check(program, X, expected=((X + 1) * 2, X * 2 + 1))
    assert len(plgpu.offline.lower(program, X)) == 2


def test_one_kernel_for_several_shapes():
    k = plgpu.kernel(add_one, out_type=f32(8, 128))
    np.testing.assert_array_equal(k(numbers(8, 128)), numbers(8, 128) + 1)
    with pytest.raises(ValueError, match="another shape"):
        k(numbers(4, 128))
    np.testing.assert_array_equal(k(numbers(8, 128) * 2), numbers(8, 128) * 2 + 1)


# --- arguments and results ------------------------------------------------------------


def test_pytrees_of_arguments_and_results():
    def body(arrays, out):
        out["sum"][...] = arrays["a"][...] + arrays["b"][0][...]
        out["difference"][...] = arrays["a"][...] - arrays["b"][0][...]

    k = make(body, out={"sum": f32(), "difference": f32()})
    check(k, {"a": X, "b": (X * 2,)}, expected={"sum": X * 3, "difference": -X})


@gives([X], ((X, X + 1), X + 2))
def test_a_tuple_of_results_is_spread(x, pair, last):
    pair[0][...] = x[...]
    pair[1][...] = x[...] + 1
    last[...] = x[...] + 2


def test_no_arguments():
    check(make(lambda o: o.set(1.0)), expected=np.ones(SHAPE, np.float32))


def test_scalar_arguments():
    def body(x, s, o):
        o[...] = x[...] * s[...]

    check(make(body), X, 2.0, expected=X * 2)
    check(make(body), X, np.float32(2), expected=X * 2)


def test_the_decorator_form():
    @plgpu.kernel(out_type=f32(), scratch_types=[TILE])
    def k(x, o, tile):
        tile[...] = x[...]
        o[...] = tile[...] + 1

    check(k, X, expected=X + 1)
    assert k.__name__ == "k"


def test_the_older_spellings():
    def body(x, o, tile):
        tile[...] = x[...]
        o[...] = tile[...] + 1

    check(plgpu.kernel(body, f32(), scratch_shapes=[TILE]), X, expected=X + 1)
    check(plgpu.kernel(body, out_shape=f32(), scratch_shapes=[TILE]), X, expected=X + 1)


def test_scratch_by_name_and_as_a_pytree():
    def body(x, o, *, tiles, barrier):
        plgpu.copy_gmem_to_smem(x, tiles["a"], barrier)
        plgpu.barrier_wait(barrier)
        o[...] = tiles["a"][...]

    scratch = {"tiles": {"a": TILE}, "barrier": plgpu.Barrier()}
    check(make(body, scratch_types=scratch), X, expected=X)


# --- what a body closes over ----------------------------------------------------------


@pytest.mark.parametrize("scalar", [3, 3.0, np.float32(3), np.int32(3), np.array(3.0)])
def test_a_closed_over_number(scalar):
    check(
        make(lambda x, o: o.set((x[...] * scalar).astype(jnp.float32))),
        X,
        expected=X * 3,
    )


def test_a_closed_over_scalar_of_jax():
    scalar, flag = jnp.float32(3), jnp.bool_(True)
    check(
        make(lambda x, o: o.set(jnp.where(flag, x[...] * scalar, 0))), X, expected=X * 3
    )


def test_a_closed_over_traced_scalar_decides_a_branch_and_an_index():
    def f(x, n):
        def body(x, o):
            o[...] = x[...]

            @plgpu.when(n > 0)
            def _():
                o[n] = x[n] + 1

        return make(body)(x)

    expected = X.copy()
    expected[5] += 1
    check(jax.jit(f), X, 5, expected=expected)
    check(jax.jit(f), X, -5, expected=X)


# --- references as JAX refuses them ---------------------------------------------------


@gives([X], X * 2)
def test_a_reference_passed_twice(x, o):
    o[...] = jax.jit(lambda a, b: a[...] + b[...])(x, x)


@gives([X], X * 4, TILE)
def test_a_reference_closed_over_and_passed(x, o, tile):
    tile[...] = x[...]

    def add(a):
        a[...] = a[...] + tile[...]

    jax.jit(add)(tile)
    lax.cond(x[0, 1] > 0, add, lambda a: None, tile)
    o[...] = tile[...]


@pytest.mark.parametrize("flow", ["fori", "while"])
def test_a_reference_as_a_loop_carry(flow):
    def body(x, o, a, b):
        a[...] = x[...]

        def step(c):
            i, source, target = c
            target[...] = source[...] + 1
            source[...] = target[...]
            return i + 1, source, target

        if flow == "fori":
            lax.fori_loop(0, 3, lambda _, c: step(c), (0, a, b))
        else:
            lax.while_loop(lambda c: c[0] < 3, step, (0, a, b))
        o[...] = a[...]

    check(make(body, scratch_types=[TILE, TILE]), X, expected=X + 3)


@gives([X], X + 3, TILE)
def test_the_same_reference_twice_in_a_carry(x, o, a):
    a[...] = x[...]

    def step(_, c):
        c[0][...] = c[1][...] + 1
        return c

    lax.fori_loop(0, 3, step, (a, a))
    o[...] = a[...]


# --- control flow in a body -----------------------------------------------------------


@gives([X], X.reshape(8, 8, 128).sum(0))
def test_a_register_carry(x, o):
    def step(i, total):
        return total + x[plgpu.ds(i * 8, 8)]

    o[...] = lax.fori_loop(0, 8, step, jnp.zeros((8, 128), jnp.float32))


@gives([X], X + 10, TILE)
def test_a_while_loop_whose_condition_reads_memory(x, o, tile):
    tile[...] = x[...]

    def step(i):
        tile[...] = tile[...] + 1
        return i + 1

    count = lax.while_loop(lambda i: tile[0, 0] < 5, step, 0)
    o[...] = tile[...] + count


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_switch_with_values_and_writes(which):
    def body(x, n, o):
        def branch(k):
            def run():
                o[0] = x[k]
                return x[plgpu.ds(8, 8)] * k

            return run

        value = lax.switch(n[0], [branch(k) for k in (1, 2, 3)])
        o[plgpu.ds(8, 8)] = value
        o[plgpu.ds(16, 48)] = x[plgpu.ds(16, 48)]
        o[plgpu.ds(1, 7)] = x[plgpu.ds(1, 7)]

    expected = X.copy()
    expected[0] = X[which + 1]
    expected[8:16] *= which + 1
    check(make(body), X, np.array([which], np.int32), expected=expected)


TOTAL = sum(X[i, : i + 1].sum() for i in range(4))


@gives([X, np.array([4], np.int32)], np.full((1, 128), TOTAL, np.float32))
def test_loops_nest_with_carries_and_dynamic_bounds(x, n, o):
    @plgpu.loop(0, n[0], init_carry=jnp.float32(0))
    def total(i, outer):
        @plgpu.loop(0, i + 1, init_carry=outer)
        def inner(j, carry):
            return carry + x[i, j]

        return inner

    o[...] = jnp.full((1, 128), total)


# --- several warpgroups ---------------------------------------------------------------


SHIFT = np.tile(np.repeat(np.arange(2, dtype=np.float32), 16), 2)[:, None]


@gives([X], X + SHIFT, grid={"i": 2}, threads={"wg": 2})
def test_warpgroups_work_on_parts(x, o):
    i, w = lax.axis_index("i"), lax.axis_index("wg")
    rows = plgpu.ds(i * 32 + w * 16, 16)
    o[rows] = x[rows] + w


def test_one_warpgroup_loads_and_all_wait():
    def body(x, o, tile, full):
        w = lax.axis_index("wg")

        @plgpu.when(w == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, tile, full)

        plgpu.barrier_wait(full)
        rows = plgpu.ds(w * 32, 32)
        o[rows] = tile[rows] + 1

    k = make(
        body, scratch_types=[TILE, plgpu.Barrier()], num_threads=2, thread_name="wg"
    )
    check(k, X, expected=X + 1)
    check(jax.jit(jax.vmap(k)), XS, expected=XS + 1)


@gives([X], X + 1, plgpu.SMEM((2, 8, 128), jnp.float32), plgpu.Barrier(num_barriers=2))
def test_a_ring_of_buffers_with_barrier_arrays(x, o, ring, barriers):
    def start(i, slot):
        rows = plgpu.ds(i * 8, 8)
        plgpu.copy_gmem_to_smem(x.at[rows], ring.at[slot], barriers.at[slot])

    start(0, 0)
    start(1, 1)

    @plgpu.loop(0, 8)
    def _(i):
        slot = lax.rem(i, 2)
        plgpu.barrier_wait(barriers.at[slot])
        o[plgpu.ds(i * 8, 8)] = ring[slot] + 1

        @plgpu.when(i + 2 < 8)
        def _():
            start(i + 2, slot)
