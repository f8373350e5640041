# SPDX-License-Identifier: Apache-2.0
"""dynamic_scheduling_loop: each position of the grid is taken once, by who is free."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.lockstep import kernels as in_lockstep
from tests.support.refusal import refused, refused_by
from tests.support.semantics import BOTH, under

GRID = (3, 4)
NUMBERS = np.arange(12, dtype=np.int32).reshape(GRID)


# Clusters take over work by a counter, and by cluster launch control.
TARGETS = pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])


def mesh(threads=1, ctas=1, target="sm_90a"):
    """The options of a kernel and of the loop for its warpgroups and clusters."""
    launch = {"grid": GRID, "grid_names": ("i", "j")}
    launch["compiler_params"] = plgpu.CompilerParams(target=target)
    axes = {}
    if threads > 1:
        launch |= {"num_threads": threads, "thread_name": "wg"}
        axes["thread_axis"] = "wg"
    if ctas > 1:
        launch |= {"cluster": (ctas,), "cluster_names": ("c",)}
        axes["cluster_axes"] = ("c",)
    return launch, axes


def positions(threads=1, ctas=1, target="sm_90a"):
    """A kernel: each warpgroup of each CTA stores each position's number."""
    launch, axes = mesh(threads, ctas, target)

    def body(o_ref):
        c = lax.axis_index("c") if ctas > 1 else 0
        wg = lax.axis_index("wg") if threads > 1 else 0

        @plgpu.dynamic_scheduling_loop(("i", "j"), **axes)
        def _(info):
            i, j = info.index
            o_ref[i, j, c, wg] = i * 4 + j

    shape = jax.ShapeDtypeStruct((*GRID, ctas, threads), jnp.int32)
    return everywhere.kernel(body, shape, **launch)


ROLES = plgpu.Roles(2, registers=(40, 232))


@TARGETS
@pytest.mark.parametrize("ctas", [1, 2])
def test_each_role_has_a_loop_of_its_own(ctas, target):
    launch, axes = mesh(ROLES.num_threads, ctas, target)

    def body(o_ref):
        wg = lax.axis_index("wg")

        @plgpu.dynamic_scheduling_loop(("i", "j"), **axes, roles=ROLES)
        def _(info, is_producer):
            i, j = info.index
            c = lax.axis_index("c") if ctas > 1 else 0
            o_ref[i, j, c, wg] = (i * 4 + j) * (1 if is_producer else -1)

    expected = NUMBERS[..., None, None] * np.array([-1, -1, 1], np.int32)
    expected = np.broadcast_to(expected, (*GRID, ctas, 3))
    make = everywhere.kernel(
        body, jax.ShapeDtypeStruct(expected.shape, jnp.int32), **launch
    )
    everywhere.check(make, [], expected, on_gpu=target == "sm_90a")


@TARGETS
@pytest.mark.parametrize(("threads", "ctas"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_all_warpgroups_of_a_cluster_get_each_position(threads, ctas, target):
    expected = np.broadcast_to(NUMBERS[..., None, None], (*GRID, ctas, threads))
    make = positions(threads, ctas, target)
    everywhere.check(make, [], expected, on_gpu=target == "sm_90a")


@TARGETS
def test_no_schedule_has_a_race(target):
    expected = np.broadcast_to(NUMBERS[..., None, None], (*GRID, 2, 2))
    params = plgpu.InterpretParams(schedules=8)
    got = positions(2, 2, target)(params)()
    np.testing.assert_array_equal(got, expected)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize(("threads", "ctas"), [(1, 1), (2, 2)])
def test_blackwell_takes_over_the_work_of_other_clusters(threads, ctas, semantics):
    kernel = under(semantics, positions(threads, ctas, "sm_100a")(None))
    (report,) = plgpu.offline.compile(kernel, target="sm_100a")
    assert report.ptx.count("clusterlaunchcontrol.try_cancel.async") == 1
    assert ("multicast::cluster::all.b128" in report.ptx) == (ctas > 1)
    assert "clusterlaunchcontrol.query_cancel.is_canceled" in report.ptx
    assert "atom." not in report.ptx
    assert report.resources.spill_store_bytes == 0


def counted(interpret, target="sm_90a"):
    """For each position who took it, in which step, of a kernel with a carry."""

    def body(who_ref, step_ref, steps_ref):
        own = lax.axis_index("i") * 4 + lax.axis_index("j")

        @plgpu.dynamic_scheduling_loop(("i", "j"), init_carry=jnp.int32(0))
        def steps(info, carry):
            who_ref[info.index] = own
            step_ref[info.index] = info.local_index
            return carry + 1

        steps_ref[own] = steps

    out = [NUMBERS, NUMBERS, NUMBERS.reshape(12)]
    return everywhere.kernel(body, out, **mesh(target=target)[0])(interpret)()


def test_schedules_differ_in_who_takes_what_and_in_how_many_there_are():
    assignments, launched = set(), set()
    for seed in range(8):
        params = plgpu.InterpretParams(seed=seed, partial_results=True)
        who, step, steps = map(np.asarray, counted(params))
        clusters = sorted(set(who.flat))
        assert clusters == list(range(len(clusters)))  # the first ones are launched
        for cluster in clusters:
            own = np.flatnonzero(who == cluster)
            assert own[0] == cluster
            # The positions behind the first are taken in order.
            assert (
                step.flat[own].tolist()
                == list(range(len(own)))
                == [*range(steps[cluster])]
            )
        assignments.add(who.tobytes())
        launched.add(len(clusters))
    assert len(assignments) > 4
    assert len(launched) > 2


def test_clusters_that_have_not_started_lose_their_work():
    taken = set()
    for seed in range(4):
        params = plgpu.InterpretParams(seed=seed, partial_results=True)
        who, step, steps = map(np.asarray, counted(params, "sm_100a"))
        for cluster in set(who.flat):
            own = np.flatnonzero(who == cluster)
            assert who.flat[cluster] == cluster
            assert sorted(step.flat[own]) == [*range(steps[cluster])]
        taken.add(who.tobytes())
    assert len(taken) > 2


@refused_by(everywhere.emulate, [], NUMBERS, **mesh()[0])
def test_a_store_outside_the_loop_is_missing_for_ctas_that_are_not_launched(o_ref):
    o_ref[lax.axis_index("i"), lax.axis_index("j")] = 1
    plgpu.dynamic_scheduling_loop(("i", "j"))(lambda info: None)


@refused_by(
    everywhere.emulate, [], NUMBERS.reshape(12), schedules=4, partial_results=True,
    **mesh()[0],
)  # fmt: skip
def test_two_clusters_that_store_to_one_place_race(o_ref):
    @plgpu.dynamic_scheduling_loop(("i", "j"))
    def _(info):
        o_ref[info.local_index] = info.index[0] * 4 + info.index[1]


X = np.arange(12 * 128, dtype=np.float32).reshape(*GRID, 128)


@everywhere.gives(
    [X], 2 * X, plgpu.SMEM((128,), jnp.float32), plgpu.Barrier(), **mesh()[0]
)
def test_scratch_of_a_step_is_free_in_the_next(x_ref, o_ref, tile, barrier):
    @plgpu.dynamic_scheduling_loop(("i", "j"))
    def _(info):
        i, j = info.index
        plgpu.copy_gmem_to_smem(x_ref.at[i, j], tile, barrier)
        plgpu.barrier_wait(barrier)
        o_ref[i, j] = tile[...] * 2


def test_under_vmap_each_instance_has_all_positions():
    def body(x_ref, o_ref):
        @plgpu.dynamic_scheduling_loop(("i", "j"))
        def _(info):
            o_ref[info.index] = x_ref[info.index] + 1

    make = everywhere.kernel(body, NUMBERS, **mesh()[0])
    x = np.stack([NUMBERS, NUMBERS * 10])
    everywhere.check(lambda interpret: jax.vmap(make(interpret)), [x], x + 1)


@pytest.mark.parametrize(
    ("smem_bytes", "blocks"), [(200 * 1024, 132), (100 * 1024, 264), (64, 300)]
)
def test_the_launch_has_as_many_ctas_as_fit_at_once(smem_bytes, blocks):
    def body(o_ref, tile):
        @plgpu.dynamic_scheduling_loop("i")
        def _(info):
            o_ref[info.index] = info.local_index

    out, tile = np.zeros(300, np.int32), plgpu.SMEM((smem_bytes,), jnp.int8)
    kernel = everywhere.kernel(body, out, tile, grid={"i": 300})(None)
    (lowered,) = in_lockstep.lower(kernel, []).kernels
    assert f"%c{blocks} = arith.constant {blocks} : index" in str(lowered.module)


# --- refusals -------------------------------------------------------------------------


def run(body, **options):
    everywhere.emulate(body, [], NUMBERS, **{**mesh()[0], **options})


@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (("i",), {"thread_axis": "wg", "cluster_axes": ("c",)}),
        (("i", "j"), {"cluster_axes": ("c",)}),
        (("i", "j"), {"thread_axis": "wg", "cluster_axes": ("i",)}),
        (("i", "k"), {"thread_axis": "wg", "cluster_axes": ("c",)}),
    ],
)
@refused_by(run, **mesh(2, 2)[0])
def test_all_axes_of_the_kernel_are_named(o_ref, *, names, axes):
    plgpu.dynamic_scheduling_loop(names, **axes)  # HERE


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@refused
def test_a_second_loop_would_find_no_positions(target):
    def body(o_ref):
        for _ in range(2):
            plgpu.dynamic_scheduling_loop(("i", "j"))(lambda info: None)  # HERE

    run(body, compiler_params=plgpu.CompilerParams(target=target))


@refused_by(run)
def test_a_loop_within_a_loop_would_find_no_positions(o_ref):
    @plgpu.loop(0, 2)
    def _(_):
        plgpu.dynamic_scheduling_loop(("i", "j"))(lambda info: None)  # HERE


@refused_by(run)
def test_the_body_is_a_function(o_ref):
    plgpu.dynamic_scheduling_loop(("i", "j"))(o_ref)


@refused_by(run)
def test_a_carry_keeps_its_type(o_ref):
    loop = plgpu.dynamic_scheduling_loop(("i", "j"), init_carry=jnp.int32(0))
    loop(lambda info, carry: carry * 1.5)  # HERE


@refused_by(run, **mesh(3)[0])
def test_loops_of_roles_have_no_carry(o_ref):
    plgpu.dynamic_scheduling_loop(  # HERE
        ("i", "j"), "wg", init_carry=1, roles=ROLES
    )


@refused_by(run, **mesh(4)[0])
def test_each_warpgroup_has_a_role(o_ref):
    plgpu.dynamic_scheduling_loop(("i", "j"), "wg", roles=ROLES)  # HERE
