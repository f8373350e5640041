# SPDX-License-Identifier: Apache-2.0
"""Scratch in GMEM: one array for a launch, which the launch allocates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, offline
from tests.support import everywhere
from tests.support.entry_kernels import numbers, run
from tests.support.refusal import refused, refused_by

F32 = jnp.float32
ROWS = np.arange(384, dtype=np.float32).reshape(3, 128)


def over_rows(body, *scratch, **named):
    """Returns `make` for a kernel whose CTAs have a row each."""
    options = {"scratch_types": named} if named else {}
    return everywhere.kernel(body, ROWS, *scratch, grid={"i": 3}, **options)


def double(x, o, doubled):
    i = lax.axis_index("i")
    doubled[i] = x[i] * 2
    o[i] = doubled[i] + 1


@pytest.mark.smoke
def test_scratch_in_gmem_holds_what_is_stored():
    make = over_rows(double, plgpu.GMEM((3, 128), F32))
    everywhere.check(make, [ROWS], 2 * ROWS + 1)


def test_scratch_with_initial_contents_has_them_in_every_launch():
    def body(x, o, *, total):
        i = lax.axis_index("i")
        total[i] = total[i] + x[i]
        o[i] = total[i]

    make = over_rows(body, total=plgpu.GMEM((3, 128), F32, init=3))
    everywhere.check(make, [ROWS], ROWS + 3)
    k = make(None)
    np.testing.assert_array_equal(k(k(ROWS)), ROWS + 6)


def test_initial_contents_stand_before_other_scratch():
    def body(x, o, a, b, c):
        i = lax.axis_index("i")
        a[i] = x[i]
        o[i] = a[i] + b[i] + c[i].astype(F32)

    make = over_rows(
        body,
        plgpu.GMEM((3, 128), F32),
        plgpu.GMEM((3, 128), F32, init=0.5),
        plgpu.GMEM((3, 128), jnp.int8, init=-3),
    )
    everywhere.check(make, [ROWS], ROWS - 2.5)


def test_ctas_of_a_launch_share_scratch():
    def count(x, o, tickets):
        turn = plgpu.atomic_add(tickets.at[0], jnp.int32(1))
        o[lax.axis_index("i")] = jnp.full((128,), turn.astype(F32))

    k = over_rows(count, plgpu.GMEM((1,), jnp.int32, init=0))(None)
    assert sorted(np.asarray(k(ROWS))[:, 0]) == [0, 1, 2]


def test_tma_copies_to_and_from_scratch():
    def body(x, o, between, tile, barrier):
        i = lax.axis_index("i")
        tile[...] = x[i] * 3
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, between.at[i])
        plgpu.wait_smem_to_gmem(0)
        plgpu.copy_gmem_to_smem(between.at[i], tile, barrier)
        plgpu.barrier_wait(barrier)
        o[i] = tile[...]

    make = over_rows(
        body, plgpu.GMEM((3, 128), F32), plgpu.SMEM((128,), F32), plgpu.Barrier()
    )
    everywhere.check(make, [ROWS], 3 * ROWS)


def test_each_instance_of_vmap_has_its_own():
    x = np.arange(2 * ROWS.size, dtype=np.float32).reshape(2, 3, 128)
    make = over_rows(double, plgpu.GMEM((3, 128), F32))
    everywhere.check(lambda interpret: jax.vmap(make(interpret)), [x], 2 * x + 1)


def test_a_scope_declares_it_too_and_finds_its_contents_again():
    def body(x, o):
        i = lax.axis_index("i")

        def turn(step, carry):
            def scope(kept):
                kept[i] = kept[i] + x[i]
                o[i] = kept[i]

            plgpu.run_scoped(scope, plgpu.GMEM((3, 128), F32, init=1))
            return carry

        lax.fori_loop(0, 4, turn, None)

    everywhere.check(over_rows(body), [ROWS], 4 * ROWS + 1)


def test_composites_within_its_scope_leave_it_the_same():
    def body(x, o, sorted_rows):
        i = lax.axis_index("i")
        sorted_rows[i] = jnp.sort(x[i])
        o[i] = jnp.cosh(sorted_rows[i] * 0) + jnp.flip(sorted_rows[i])

    rows = np.random.default_rng(0).permuted(ROWS, axis=1)
    make = over_rows(body, plgpu.GMEM((3, 128), F32))
    everywhere.check(make, [rows], 1 + np.sort(rows)[:, ::-1])


def test_a_function_called_twice_has_one():
    def body(x, o, kept):
        i = lax.axis_index("i")

        @jax.jit
        def add(amount):
            def scope(total):
                total[i] = total[i] + amount
                return total[i]

            return plgpu.run_scoped(scope, plgpu.GMEM((3, 128), F32, init=0))

        kept[i] = jnp.sort(add(x[i]))
        o[i] = add(kept[i])

    make = over_rows(body, plgpu.GMEM((3, 128), F32))
    everywhere.check(make, [ROWS], 2 * ROWS)


def test_jit_knows_nothing_of_it():
    k = over_rows(double, plgpu.GMEM((3, 128), F32))(None)
    np.testing.assert_array_equal(jax.jit(k)(ROWS), 2 * ROWS + 1)


@pytest.mark.offline
def test_it_compiles_offline():
    def body(x, o, kept, counts):
        double(x, o, kept)
        plgpu.atomic_add(counts.at[0], 1)

    counts = plgpu.GMEM((1,), jnp.int32, init=0)
    make = over_rows(body, plgpu.GMEM((3, 128), F32), counts)
    (report,) = offline.compile(make(False), ROWS, target="sm_90a")
    assert "st.global" in report.ptx


# --- mistakes -------------------------------------------------------------------------


@refused_by(run, scratch_types=[plgpu.GMEM((64, 128), F32)])
def test_it_is_undefined_before_the_first_store(x, o, scratch):
    o[...] = scratch[...]


def test_what_another_cta_stores_is_a_race_without_synchronisation():
    def body(x, o, shared):
        i = lax.axis_index("i")
        shared[i] = x[i]
        o[i] = shared[(i + 1) % 3]

    k = over_rows(body, plgpu.GMEM((3, 128), F32, init=0))
    with pytest.raises(errors.RaceError, match="scratch GMEM"):
        k(plgpu.InterpretParams())(ROWS)


def test_elements_that_nobody_stores_are_no_mistake():
    def body(x, o, spare):
        o[...] = x[...]

    result = run(body, scratch_types=[plgpu.GMEM((7,), jnp.int8)])
    np.testing.assert_array_equal(result, numbers())


@pytest.mark.parametrize(
    ("dtype", "init"), [(jnp.int8, 200), (jnp.uint32, -1), (jnp.int32, 0.5)]
)
@refused
def test_initial_contents_are_numbers_of_the_element_type(dtype, init):
    plgpu.GMEM((8,), dtype, init=init)  # HERE


@refused
def test_initial_contents_are_one_number():
    plgpu.GMEM((8,), F32, init=np.zeros(8))  # HERE


@refused
def test_other_memory_has_no_initial_contents():
    plgpu.SMEM((8,), F32, init=0)  # HERE


@refused
def test_the_element_type_is_one_of_kernels():
    plgpu.GMEM((8,), jnp.complex64)  # HERE


def test_initial_contents_of_64_bits_stay_so():
    def body(x, o, kept, wide):
        double(x, o, kept)

    wide = plgpu.GMEM((2,), jnp.int64, init=7)
    k = over_rows(body, plgpu.GMEM((3, 128), F32), wide)(False)
    text = jax.jit(k).trace(ROWS).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.constant dense<7> : tensor<i64>" in text
