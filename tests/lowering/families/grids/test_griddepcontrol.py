# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch, everywhere: two kernels in sequence, early access."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.errors import PtxError
from tests.support import everywhere
from tests.support.features.row import Row
from tests.support.lockstep import kernels as in_lockstep
from tests.support.refusal import refused
from tests.support.semantics import BOTH, under

ROWS = jax.ShapeDtypeStruct((2, 128), jnp.float32)
X = np.arange(256, dtype=np.float32).reshape(ROWS.shape)
TILE = {"row": plgpu.SMEM((128,), jnp.float32), "barrier": plgpu.Barrier()}


def early(body, interpret=None, **options):
    """A kernel of two CTAs over an input, a result and a row in SMEM."""

    def with_position(x, o, **scratch):
        body(lax.axis_index("g"), x, o, **scratch)

    options = {"scratch_types": TILE, "grid": {"g": 2}, **options}
    return everywhere.kernel(with_position, ROWS, **options)(interpret)


def chain(interpret):
    """Two kernels, the second of which starts while the first still runs."""

    def first(i, x, o, row, barrier):
        plgpu.griddepcontrol_launch_dependents()
        o[i] = x[i] * 2

    def second(i, x, o, row, barrier):
        plgpu.griddepcontrol_wait()
        plgpu.copy_gmem_to_smem(x.at[i], row, barrier)
        plgpu.barrier_wait(barrier)
        o[i] = row[...] + x[1 - i]

    one, other = early(first, interpret), early(second, interpret)
    return lambda x: other(one(x))


def test_a_kernel_sees_the_results_of_the_one_before():
    everywhere.check(chain, [X], 2 * (X + X[::-1]))


def of_warpgroups(ordered=True):
    """One warpgroup waits for the kernels before; another one, for it."""

    def make(interpret):
        def body(i, x, o, row, barrier):
            @plgpu.when(lax.axis_index("wg") == 0)
            def _():
                plgpu.griddepcontrol_wait()
                if ordered:
                    plgpu.barrier_arrive(barrier)

            @plgpu.when(lax.axis_index("wg") == 1)
            def _():
                if ordered:
                    plgpu.barrier_wait(barrier)
                o[i] = x[i] + 1

        return early(body, interpret, threads={"wg": 2})

    return make


def test_it_suffices_that_one_warpgroup_waits_for_the_grid_and_the_others_for_it():
    everywhere.check(of_warpgroups(), [X], X + 1)


def of_warps(interpret):
    def body(i, x, o, row, barrier):
        @plgpu.warp_map
        def _(w):
            @plgpu.when(w == 1)
            def _():
                plgpu.griddepcontrol_wait()
                plgpu.copy_gmem_to_smem(x.at[i], row, barrier)
                plgpu.griddepcontrol_launch_dependents()

        plgpu.barrier_wait(barrier)
        o[i] = row[...]

    return early(body, interpret)


def test_a_single_warp_waits():
    everywhere.check(of_warps, [X], X)


# --- what is too early ----------------------------------------------------------------


def reads(i, x, o, row, barrier):
    value = x[i]
    plgpu.griddepcontrol_wait()
    o[i] = value


def copies(i, x, o, row, barrier):
    plgpu.copy_gmem_to_smem(x.at[i], row, barrier)
    plgpu.griddepcontrol_wait()
    plgpu.barrier_wait(barrier)
    o[i] = row[...]


def writes(i, x, o, row, barrier):
    o[i] = jnp.ones(128)
    plgpu.griddepcontrol_wait()


def copies_back(i, x, o, row, barrier):
    row[...] = jnp.ones(128)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(row, o.at[i])
    plgpu.griddepcontrol_wait()
    plgpu.wait_smem_to_gmem(0)


EARLY = pytest.mark.parametrize("body", [reads, copies, writes, copies_back])


@EARLY
@refused
def test_an_access_before_the_wait_is_a_race_with_the_kernel_before(body):
    early(body, plgpu.InterpretParams())(X)


@pytest.mark.parametrize("semantics", BOTH)
@EARLY
def test_it_is_seen_in_what_was_emitted(body, semantics):
    with pytest.raises(PtxError, match="before the threads have met"):
        in_lockstep.lower(under(semantics, early(body)), [X]).run()


@pytest.mark.parametrize("seed", range(4))
def test_a_warpgroup_that_nothing_orders_after_the_wait_is_too_early(seed):
    kernel = of_warpgroups(ordered=False)(plgpu.InterpretParams(seed=seed))
    with pytest.raises(errors.RaceError, match="the kernel before this one"):
        kernel(X)


def test_a_kernel_that_does_not_wait_starts_when_the_others_have_ended():
    def body(i, x, o, row, barrier):
        o[i] = x[i]
        plgpu.griddepcontrol_launch_dependents()

    everywhere.check(lambda interpret: early(body, interpret), [X], X)


# --- the launch -----------------------------------------------------------------------


@pytest.mark.parametrize("semantics", BOTH)
def test_the_kernel_that_waits_is_the_one_that_is_launched_early(semantics):
    lowered = in_lockstep.lower(under(semantics, chain(None)), [X])
    has = [
        "mosaic_gpu.uses_pdl" in build.module.operation.attributes
        for build in lowered.kernels
    ]
    assert has == [False, True]


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_the_instructions(semantics):
    first, second = plgpu.offline.compile(under(semantics, chain(None)), ROWS)
    assert "griddepcontrol.launch_dependents;" in first.ptx
    assert "griddepcontrol.wait;" not in first.ptx
    lines = [line.strip() for line in second.ptx.splitlines()]
    wait = lines.index("griddepcontrol.wait;")
    loads = [i for i, line in enumerate(lines) if line.startswith("ld.global")]
    assert loads and wait < min(loads)


@pytest.mark.parametrize(
    "operation", [plgpu.griddepcontrol_wait, plgpu.griddepcontrol_launch_dependents]
)
@refused
def test_it_is_part_of_a_kernel(operation):
    operation()  # HERE


@refused
def test_a_position_around_the_launch_is_loaded_before_any_wait():
    def body(x, o):
        plgpu.griddepcontrol_wait()  # HERE
        o[lax.axis_index("g")] = x[0] + lax.axis_index("around")

    kernel = everywhere.kernel(body, ROWS, grid={"g": 2})()
    jax.vmap(lambda x: kernel(x), axis_name="around")(np.stack([X, X]))


GOOD = {
    "griddepcontrol_launch_dependents": lambda e: {},
    "griddepcontrol_wait": lambda e: {},
}
FEATURES = [
    Row(
        "dependent launches",
        upstream=("launch: uses_pdl",),
        operations=("griddepcontrol_wait", "griddepcontrol_launch_dependents"),
        runs="a_kernel_sees_the_results_of_the_one_before",
        offline="the_instructions",
        instruction="griddepcontrol.launch_dependents;",
        omissions={
            "wait": "an_access_before_the_wait_is_a_race_with_the_kernel_before"
        },
    ),
]
