# SPDX-License-Identifier: Apache-2.0
"""Every order of a kernel's synchronization, up to equivalence.

The numbers of classes are compared with those of all interleavings.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emulator.engine.orders import explore, reduction
from tests.support import every_order, rings

INTERPRET = plgpu.InterpretParams(partial_results=True)


def kernel(body, *scratch, threads=None, ctas=1, cluster=1, **options):
    """A kernel whose result is four numbers, some of which it may leave out."""
    dtype, size = options.pop("dtype", jnp.int32), options.pop("shape", (4,))
    shape = {"grid": (ctas,), "grid_names": ("cta",)} if ctas > 1 else {}
    if threads:
        shape |= {"num_threads": threads, "thread_name": "wg"}
    if cluster > 1:
        shape |= {"cluster": (cluster,), "cluster_names": ("cta",)}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(size, dtype),
        scratch_types=scratch,
        interpret=plgpu.InterpretParams(partial_results=True, **options),
        **shape,
    )


def on(axis, index, action):
    plgpu.when(lax.axis_index(axis) == index)(action)


def after(axis, index, action):
    plgpu.when(lax.axis_index(axis) > index)(action)


def semaphore():
    return plgpu.get_global(plgpu.SemaphoreType.REGULAR)


# --- kernels: (body, scratch, options, number of classes) -----------------------------


def both_arrive_and_wait(o, barrier):
    for _ in range(2):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)


def arrive_once(o, barrier):
    plgpu.barrier_arrive(barrier)


def arrive_twice(o, barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_arrive(barrier)


def poll_then_wait(o, barrier):
    def poll():
        done = plgpu.barrier_test(barrier)
        o[0] = done.astype(jnp.int32)
        plgpu.when(~done)(lambda: plgpu.barrier_wait(barrier))

    on("wg", 0, poll)
    after("wg", 0, lambda: plgpu.barrier_arrive(barrier))


def spin_until_complete(o, barrier):
    def spin():
        test = lambda _: ~plgpu.barrier_test(barrier)  # noqa: E731
        lax.while_loop(test, lambda x: x, jnp.int32(0))

    on("wg", 0, spin)
    after("wg", 0, lambda: plgpu.barrier_arrive(barrier))


def warps_arrive(o, barrier):
    @plgpu.warp_map
    def _(warp):
        plgpu.when(warp < 2)(lambda: plgpu.barrier_arrive(barrier))

    plgpu.barrier_wait(barrier)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_arrive(barrier)


def wait_for_two_signals(o):
    s = semaphore()

    def wait():
        plgpu.semaphore_wait(s)
        plgpu.semaphore_wait(s)

    on("cta", 0, wait)
    after("cta", 0, lambda: plgpu.semaphore_signal(s))


def read_signals(o):
    s = semaphore()

    def read():
        o[0] = plgpu.semaphore_read(s)
        plgpu.semaphore_wait(s, 2)

    on("cta", 0, read)
    after("cta", 0, lambda: plgpu.semaphore_signal(s))


def hand_over(o):
    there, back = semaphore(), semaphore()
    for _ in range(3):

        @plgpu.when(lax.axis_index("cta") == 0)
        def _():
            plgpu.semaphore_signal(there)
            plgpu.semaphore_wait(back)

        @plgpu.when(lax.axis_index("cta") == 1)
        def _():
            plgpu.semaphore_wait(there)
            plgpu.semaphore_signal(back)


def run_ahead(o):
    s = semaphore()
    for _ in range(3):
        on("cta", 0, lambda: plgpu.semaphore_signal(s))
        on("cta", 1, lambda: plgpu.semaphore_wait(s))


def signal_in_any_order(o):
    first, second = semaphore(), semaphore()

    def signal():
        plgpu.semaphore_signal_parallel(
            plgpu.SemaphoreSignal(first), plgpu.SemaphoreSignal(second)
        )

    on("cta", 0, signal)

    @plgpu.when(lax.axis_index("cta") == 1)
    def _():
        plgpu.semaphore_wait(first)
        o[0] = plgpu.semaphore_read(second)
        plgpu.semaphore_wait(second)


def claim(o):
    @plgpu.dynamic_scheduling_loop(("cta",))
    def _(info):
        o[info.index[0]] = 1


B, C = plgpu.Barrier, plgpu.ClusterBarrier
CASES = {
    "two_threads": (both_arrive_and_wait, [B(num_arrivals=2)], {"threads": 2}, 1),
    # Which two of four arrivals complete the first phase.
    "arrivals": (arrive_once, [B(num_arrivals=2)], {"threads": 4}, 6),
    "unordered_phases": (arrive_twice, [B(num_arrivals=2)], {"threads": 2}, 3),
    "warps": (warps_arrive, [B(num_arrivals=2)], {}, 1),
    # After how many of the two arrivals, and which.
    "test": (poll_then_wait, [B(num_arrivals=2)], {"threads": 3}, 4),
    # It fails never, once, or twice and then waits for a change.
    "spin": (spin_until_complete, [B()], {"threads": 2}, 3),
    "cluster": (
        both_arrive_and_wait,
        [C(collective_axes=("cta",))],
        {"cluster": 2},
        1,
    ),
    # The first wait comes after one of the signals, or after both.
    "signals": (wait_for_two_signals, [], {"ctas": 3}, 3),
    "reads": (read_signals, [], {"ctas": 3}, 4),
    "hand_over": (hand_over, [], {"ctas": 2}, 1),
    # Catalan's number: before each wait come more signals than waits.
    "run_ahead": (run_ahead, [], {"ctas": 2}, 5),
    # The second signal is seen or not.
    "any_order": (signal_in_any_order, [], {"ctas": 2}, 2),
    # One CTA is launched; or two, either of which is first, or takes both.
    "claims": (claim, [], {"ctas": 2}, 3),
}


def ticket(x, o):
    o[plgpu.atomic_add(x.at[0], 1)] = lax.axis_index("cta")


def bring_rows(x, o, rows, barrier):
    axes = ("cta",) if x.shape[0] > 2 else ()
    for i in range(2):
        plgpu.copy_gmem_to_smem(x.at[i], rows.at[i], barrier, collective_axes=axes)
    plgpu.barrier_wait(barrier)
    o[...] = rows[0] + rows[1]


def _launch(name):
    if name in ("copies", "multicasts"):
        rows = rings.rows_of(2 if name == "copies" else 3)
        scratch = [plgpu.SMEM((2, 128), jnp.float32), B(num_arrivals=2)]
        cluster = 1 if name == "copies" else 2
        options = {"shape": (128,), "dtype": jnp.float32, "cluster": cluster}
        f = kernel(bring_rows, *scratch, **options)
        return every_order.Launch.of(f, rows), 1
    if name == "ring":
        ring = rings.shared_ring(INTERPRET, slots=2, steps=3, consumers=1, copies=False)
        return every_order.Launch.of(ring, rings.rows_of(3)), 1
    if name == "tickets":
        f = kernel(ticket, ctas=3, like_upstream=True)
        return every_order.Launch.of(f, np.zeros(1, np.int32)), 6
    body, scratch, options, count = CASES[name]
    return every_order.Launch.of(kernel(body, *scratch, **options)), count


@pytest.mark.parametrize("name", [*CASES, "ring", "tickets", "copies", "multicasts"])
def test_one_order_of_each_class_is_explored(name):
    launch, count = _launch(name)
    found = list(every_order.outcomes(launch.run, reduction.Tree))
    # All interleavings of the arrivals are these 6 classes too; they take 6 minutes.
    sleeps = name in ("arrivals", "claims", "multicasts")
    trees = functools.partial(every_order.Interleavings, sleeps=sleeps)
    expected = set(every_order.outcomes(launch.run, trees))
    assert len({of for of, _ in found}) == len(found), "two orders are equivalent"
    assert set(found) == expected
    assert all(result.startswith("[") for _, result in found), "an error"
    assert len(found) == count


def explored(kernel, **limits):
    return every_order.Launch.of(kernel, rings.rows_of()).explore(**limits)


def test_a_ring_of_four_slots_has_one_order_alone():
    found = explored(rings.shared_ring(INTERPRET, slots=4, steps=8, consumers=2))
    assert (found.orders, found.redundant, found.complete) == (1, 0, True)
    assert found.error is None
    np.testing.assert_array_equal(found.result[0][1], rings.rows_of() * 2)


def test_an_overtaking_that_seeds_miss_is_found_and_repeated():
    ring = rings.shared_ring(INTERPRET, slots=6, counts=True, early=7)
    launch = every_order.Launch.of(ring, rings.rows_of())
    # Of 20,000 seeds none finds it; with five slots one of 10,000 does.
    assert launch.failures(20) == 0
    found = launch.explore()
    assert isinstance(found.error, errors.RaceError)
    assert not found.complete
    with pytest.raises(errors.RaceError, match="rows"):
        launch.run(explore.repeated(found))


def test_a_result_can_be_a_failure():
    launch, _ = _launch("reads")
    found = explore.explore(launch.run, fails=lambda results: results[0][0] == 1)
    assert (found.failures, found.error, found.result[0][0]) == (1, None, 1)
    assert launch.run(explore.repeated(found))[0][0] == 1


def test_a_number_of_orders_is_not_all_of_them():
    found = explored(rings.shared_ring(INTERPRET, counts=True), orders=3)
    assert (found.orders, found.complete, found.error) == (3, False, None)


def test_seconds_end_the_exploration():
    found = explored(rings.shared_ring(INTERPRET, counts=True), seconds=0.0)
    assert (found.orders, found.complete) == (0, False)


def test_integers_that_depend_on_the_order_are_a_mistake():
    launch, count = _launch("tickets")
    found = launch.explore(keep_going=True)
    assert isinstance(found.error, errors.RaceError)
    assert "depends on the schedule" in str(found.error)
    assert (found.orders, found.failures) == (count, count - 1)


@pytest.mark.parametrize(("is_read", "count"), [(False, 1), (True, 6)])
def test_floats_that_depend_on_the_order_are_none(is_read, count):
    def body(x, o):
        cta = lax.axis_index("cta")
        before = plgpu.atomic_add(x.at[0], 1 / (1 + cta.astype(jnp.float32)))
        o[cta] = before if is_read else 0.0

    f = kernel(body, ctas=3, dtype=jnp.float32, like_upstream=True)
    found = every_order.Launch.of(f, np.zeros(1, np.float32)).explore()
    assert (found.orders, found.complete, found.error) == (count, True, None)


@pytest.mark.parametrize(("is_read", "count"), [(False, 1), (True, 6)])
def test_lanes_that_name_one_element_take_each_order_if_that_shows(is_read, count):
    def body(x, places, o):
        before = plgpu.atomic_add(x.at[places[...]], jnp.ones(3, jnp.int32))
        o[...] = before if is_read else jnp.zeros(3, jnp.int32)

    f = kernel(body, shape=(3,), like_upstream=True)
    same = np.zeros(3, np.int32)
    found = explore.explore(every_order.Launch.of(f, same, same).run)
    assert (found.orders, found.complete, found.error) == (count, True, None)


def test_stores_of_the_same_values_commute():
    def body(o):
        o[0] = 1

    found = every_order.Launch.of(kernel(body, threads=2)).explore()
    assert (found.orders, found.complete, found.error) == (1, True, None)


def test_a_store_that_hides_behind_a_later_one_of_the_same_value_is_found():
    def body(o):
        def twice():
            o[0] = 2
            o[0] = 1

        on("wg", 0, twice)
        after("wg", 0, lambda: o.at[0].set(1))

    launch = every_order.Launch.of(kernel(body, threads=2))
    found = launch.explore()
    assert isinstance(found.error, errors.RaceError)
    with pytest.raises(errors.RaceError):
        launch.run(explore.repeated(found))


def test_a_deadlock_in_one_order_is_found():
    def body(o):
        first, second = semaphore(), semaphore()
        plgpu.semaphore_signal(first)
        on("cta", 0, lambda: plgpu.semaphore_signal(second))
        plgpu.semaphore_wait(first)
        plgpu.semaphore_wait(second)
        plgpu.semaphore_signal(second)
        on("cta", 0, lambda: plgpu.semaphore_wait(second))

    found = every_order.Launch.of(kernel(body, ctas=2)).explore()
    assert isinstance(found.error, errors.DeadlockError)
