# SPDX-License-Identifier: Apache-2.0
"""Scratch in GMEM: one array for a launch, which the launch allocates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import offline
from tests.support import everywhere
from tests.support.entry_kernels import numbers, run
from tests.support.refusal import refused, refused_by

F32 = jnp.float32
ROWS = np.arange(384, dtype=np.float32).reshape(3, 128)


KEPT = plgpu.GMEM((3, 128), F32)


def over_rows(body, *scratch, **options):
    """Returns `make` for a kernel whose CTAs have a row each."""
    return everywhere.kernel(body, ROWS, *scratch, grid={"i": 3}, **options)


def double(x, o, doubled):
    i = lax.axis_index("i")
    doubled[i] = x[i] * 2
    o[i] = doubled[i] + 1


@pytest.mark.smoke
def test_scratch_in_gmem_holds_what_is_stored():
    everywhere.check(over_rows(double, KEPT), [ROWS], 2 * ROWS + 1)


def test_scratch_with_initial_contents_has_them_in_every_launch():
    def body(x, o, *, total):
        i = lax.axis_index("i")
        total[i] = total[i] + x[i]
        o[i] = total[i]

    scratch = {"total": plgpu.GMEM((3, 128), F32, init=3)}
    make = over_rows(body, scratch_types=scratch)
    everywhere.check(make, [ROWS], ROWS + 3)
    k = make(None)
    np.testing.assert_array_equal(k(k(ROWS)), ROWS + 6)


@everywhere.gives(
    [ROWS],
    ROWS - 2.5,
    KEPT,
    plgpu.GMEM((3, 128), F32, init=0.5),
    plgpu.GMEM((3, 128), jnp.int8, init=-3),
    by=over_rows,
)
def test_initial_contents_stand_before_other_scratch(x, o, a, b, c):
    i = lax.axis_index("i")
    a[i] = x[i]
    o[i] = a[i] + b[i] + c[i].astype(F32)


def test_ctas_of_a_launch_share_scratch():
    def count(x, o, tickets):
        turn = plgpu.atomic_add(tickets.at[0], jnp.int32(1))
        o[lax.axis_index("i")] = jnp.full((128,), turn.astype(F32))

    k = over_rows(count, plgpu.GMEM((1,), jnp.int32, init=0))(None)
    assert sorted(np.asarray(k(ROWS))[:, 0]) == [0, 1, 2]


@everywhere.gives(
    [ROWS], 3 * ROWS, KEPT, plgpu.SMEM((128,), F32), plgpu.Barrier(), by=over_rows
)
def test_tma_copies_to_and_from_scratch(x, o, between, tile, barrier):
    i = lax.axis_index("i")
    tile[...] = x[i] * 3
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, between.at[i])
    plgpu.wait_smem_to_gmem(0)
    plgpu.copy_gmem_to_smem(between.at[i], tile, barrier)
    plgpu.barrier_wait(barrier)
    o[i] = tile[...]


def test_each_instance_of_vmap_has_its_own():
    x = np.arange(2 * ROWS.size, dtype=np.float32).reshape(2, 3, 128)
    make = over_rows(double, KEPT)
    everywhere.check(lambda interpret: jax.vmap(make(interpret)), [x], 2 * x + 1)


@everywhere.gives([ROWS], 4 * ROWS + 1, by=over_rows)
def test_a_scope_declares_it_too_and_finds_its_contents_again(x, o):
    i = lax.axis_index("i")

    @plgpu.loop(0, 4)
    def _(step):
        def scope(kept):
            kept[i] = kept[i] + x[i]
            o[i] = kept[i]

        plgpu.run_scoped(scope, plgpu.GMEM((3, 128), F32, init=1))


MIXED = np.random.default_rng(0).permuted(ROWS, axis=1)


@everywhere.gives([MIXED], 1 + np.sort(MIXED)[:, ::-1], KEPT, by=over_rows)
def test_composites_within_its_scope_leave_it_the_same(x, o, sorted_rows):
    i = lax.axis_index("i")
    sorted_rows[i] = jnp.sort(x[i])
    o[i] = jnp.cosh(sorted_rows[i] * 0) + jnp.flip(sorted_rows[i])


@everywhere.gives([ROWS], 2 * ROWS, KEPT, by=over_rows)
def test_a_function_called_twice_has_one(x, o, kept):
    i = lax.axis_index("i")

    @jax.jit
    def add(amount):
        def scope(total):
            total[i] = total[i] + amount
            return total[i]

        return plgpu.run_scoped(scope, plgpu.GMEM((3, 128), F32, init=0))

    kept[i] = jnp.sort(add(x[i]))
    o[i] = add(kept[i])


def test_jit_knows_nothing_of_it():
    k = over_rows(double, KEPT)(None)
    np.testing.assert_array_equal(jax.jit(k)(ROWS), 2 * ROWS + 1)


@pytest.mark.offline
def test_it_compiles_offline():
    def body(x, o, kept, counts):
        double(x, o, kept)
        plgpu.atomic_add(counts.at[0], 1)

    counts = plgpu.GMEM((1,), jnp.int32, init=0)
    make = over_rows(body, KEPT, counts)
    (report,) = offline.compile(make(False), ROWS, target="sm_90a")
    assert "st.global" in report.ptx


# --- mistakes -------------------------------------------------------------------------


@refused_by(run, scratch_types=[plgpu.GMEM((64, 128), F32)])
def test_it_is_undefined_before_the_first_store(x, o, scratch):
    o[...] = scratch[...]


@refused_by(lambda body: over_rows(body, plgpu.GMEM((3, 128), F32, init=0))(True)(ROWS))
def test_what_another_cta_stores_is_a_race_without_synchronisation(x, o, shared):
    i = lax.axis_index("i")
    shared[i] = x[i]
    o[i] = shared[(i + 1) % 3]


def test_elements_that_nobody_stores_are_no_mistake():
    result = run(lambda x, o, spare: o.set(x[...]), scratch_types=[KEPT])
    np.testing.assert_array_equal(result, numbers())


DECLARATIONS = {
    "more than int8 holds": lambda: plgpu.GMEM((8,), jnp.int8, init=200),  # HERE
    "kept": lambda: plgpu.GMEM((8,), jnp.int8, kept=True),  # HERE
    "less than uint32 holds": lambda: plgpu.GMEM((8,), jnp.uint32, init=-1),  # HERE
    "no integer": lambda: plgpu.GMEM((8,), jnp.int32, init=0.5),  # HERE
    "an array": lambda: plgpu.GMEM((8,), F32, init=np.zeros(8)),  # HERE
    "contents of SMEM": lambda: plgpu.SMEM((8,), F32, init=0),  # HERE
    "complex elements": lambda: plgpu.GMEM((8,), jnp.complex64),  # HERE
}


@pytest.mark.parametrize("declare", DECLARATIONS.values(), ids=DECLARATIONS)
@refused
def test_initial_contents_are_a_number_of_the_element_type(declare):
    declare()


def test_initial_contents_of_64_bits_stay_so():
    def body(x, o, kept, wide):
        double(x, o, kept)

    wide = plgpu.GMEM((2,), jnp.int64, init=7)
    k = over_rows(body, KEPT, wide)(False)
    text = jax.jit(k).trace(ROWS).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.constant dense<7> : tensor<i64>" in text
