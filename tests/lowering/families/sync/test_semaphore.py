# SPDX-License-Identifier: Apache-2.0
"""Semaphores: the same results in the emulator, as emitted code and on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import offline
from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.engine import DeadlockError
from tests.support import effects as see
from tests.support import everywhere
from tests.support.features.row import Row
from tests.support.grid_barrier import GridBarrier
from tests.support.lockstep import faults
from tests.support.semantics import BOTH, under

F32 = jnp.float32
CTAS = 5
ROWS = np.arange(CTAS * 128, dtype=np.float32).reshape(CTAS, 128)
REGULAR = plgpu.SemaphoreType.REGULAR


def over_rows(body, *scratch, out=(CTAS, 128), dtype=F32, **options):
    """Returns `make` for a kernel whose CTAs have a row each."""
    return everywhere.kernel(
        body, jax.ShapeDtypeStruct(out, dtype), *scratch, grid={"i": CTAS}, **options
    )


def exchange(x, o):
    """Each CTA stores a row, and reads the next one's."""
    i = lax.axis_index("i")
    stored = plgpu.get_global(plgpu.GMEM((CTAS, 128), F32))
    barrier = GridBarrier.of(CTAS)
    stored[i] = 2 * x[i]
    barrier.meet(i)
    o[i] = stored[(i + 1) % CTAS]


@pytest.mark.smoke
def test_ctas_meet_at_a_barrier_of_the_grid():
    everywhere.check(over_rows(exchange), [ROWS], 2 * np.roll(ROWS, -1, 0))


@pytest.mark.parametrize("amount", [1, 3])
def test_sums_in_the_order_of_the_ctas(amount):
    def body(x, o):
        i = lax.axis_index("i")
        turn = plgpu.get_global(REGULAR)
        plgpu.when(i == 0)(lambda: o.set(jnp.zeros(128, F32)))
        plgpu.semaphore_wait(turn, i * amount)
        o[...] = o[...] * 2 + x[i]

        @plgpu.when(i < CTAS - 1)
        def _():
            plgpu.semaphore_signal(turn, (i + 1) * amount)

    expected = functools.reduce(lambda s, row: 2 * s + row, ROWS, 0 * ROWS[0])

    everywhere.check(over_rows(body, out=(128,)), [ROWS], expected)


@everywhere.gives([ROWS], ROWS, by=over_rows)
def test_a_wait_without_decrement_leaves_the_semaphore(x, o):
    i = lax.axis_index("i")
    arrived, left = (plgpu.get_global(REGULAR) for _ in range(2))
    plgpu.semaphore_signal(arrived)
    plgpu.semaphore_wait(arrived, CTAS, decrement=False)
    o[i] = x[i]
    plgpu.semaphore_signal(left)

    @plgpu.when(i == CTAS - 1)
    def _():
        plgpu.semaphore_wait(left, CTAS)
        plgpu.semaphore_wait(arrived, CTAS)


@everywhere.gives(
    [ROWS],
    lambda *_: np.broadcast_to(np.arange(CTAS, dtype=np.float32)[:, None], (CTAS, 128)),
    by=over_rows,
)
def test_as_many_continue_as_have_been_signalled(x, o):
    """Each CTA takes a ticket, and hands out a number of them that it finds."""

    i = lax.axis_index("i")
    free, order = plgpu.get_global(REGULAR), plgpu.get_global(REGULAR)
    plgpu.when(i == 0)(lambda: plgpu.semaphore_signal(free, 1))
    plgpu.semaphore_wait(free)
    turn = plgpu.semaphore_read(order)
    plgpu.semaphore_signal(order)
    last = turn == CTAS - 1
    plgpu.when(last)(lambda: plgpu.semaphore_wait(order, CTAS))
    plgpu.when(~last)(lambda: plgpu.semaphore_signal(free))
    o[turn] = jnp.full((128,), turn.astype(F32)) + 0 * x[i]


@everywhere.gives([ROWS], lambda rows: rows + CTAS, by=over_rows)
def test_what_all_warps_read_is_one_value(x, o):
    i = lax.axis_index("i")
    count = plgpu.get_global(REGULAR)
    plgpu.semaphore_signal(count)

    def more(turns):
        return turns + (plgpu.semaphore_read(count) < CTAS).astype(jnp.int32)

    def poll(carry):
        before, _ = carry
        return before + 1, more(jnp.int32(0))

    lax.while_loop(lambda carry: carry[1] > 0, poll, (0, jnp.int32(1)))
    o[i] = x[i] + plgpu.semaphore_read(count).astype(F32)
    done = plgpu.get_global(REGULAR)
    plgpu.semaphore_signal(done)

    @plgpu.when(i == 0)
    def _():
        plgpu.semaphore_wait(done, CTAS)
        plgpu.semaphore_wait(count, CTAS)


@everywhere.gives(
    [ROWS],
    lambda rows: rows + 1,
    plgpu.SMEM((128,), F32),
    REGULAR((2,)),
    by=over_rows,
    threads={"wg": 2},
)
def test_each_cta_has_semaphores_of_its_own_in_its_scratch(x, o, tile, full):
    i, wg = lax.axis_index("i"), lax.axis_index("wg")

    @plgpu.when(wg == 0)
    def _():
        tile[...] = x[i]
        plgpu.semaphore_signal(full.at[i % 2], i + 1)

    @plgpu.when(wg == 1)
    def _():
        plgpu.semaphore_wait(full.at[i % 2], i + 1)
        o[i] = tile[...] + 1


@everywhere.gives([ROWS], ROWS, by=over_rows)
def test_a_scope_declares_them_too(x, o):
    i = lax.axis_index("i")

    def scope(own):
        plgpu.semaphore_signal(own, 2)
        plgpu.semaphore_wait(own, 2)
        o[i] = x[i]

    plgpu.run_scoped(scope, plgpu.SemaphoreType.BARRIER)


@everywhere.gives(
    [ROWS], lambda rows: rows[0, :4] + rows[-1, :4], by=over_rows, out=(4,)
)
def test_warps_signal_and_wait(x, o):
    i = lax.axis_index("i")
    ready = plgpu.get_global(REGULAR((4,)))
    stored = plgpu.get_global(plgpu.GMEM((CTAS, 4), F32))

    @plgpu.warp_map
    def _(warp):
        stored[i, warp] = x[i, warp]
        plgpu.semaphore_signal(ready.at[warp], memory_scope="gpu")

        @plgpu.when(i == CTAS - 1)
        def _():
            plgpu.semaphore_wait(ready.at[warp], CTAS, memory_scope="gpu")
            o[warp] = stored[0, warp] + stored[CTAS - 1, warp]


def test_each_instance_of_vmap_has_its_own():
    x = np.arange(2 * ROWS.size, dtype=np.float32).reshape(2, *ROWS.shape)
    make = over_rows(exchange)
    expected = 2 * np.roll(x, -1, 1)
    everywhere.check(lambda interpret: jax.vmap(make(interpret)), [x], expected)


@pytest.mark.parametrize("by", ["TMA", "threads"])
def test_a_copy_reads_what_has_been_published(by):
    """What TMA stores, when it is complete; what threads store, after a fence."""

    def body(x, o, tile, barrier):
        i = lax.axis_index("i")
        between = plgpu.get_global(plgpu.GMEM((CTAS, 128), F32))
        ready = plgpu.get_global(REGULAR((CTAS,)))
        if by == "TMA":
            tile[...] = x[i] + 1
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, between.at[i])
            plgpu.wait_smem_to_gmem(0)
        else:
            between[i] = x[i] + 1
            plgpu.commit_gmem()
        plgpu.semaphore_signal(ready.at[i])
        other = (i + 1) % CTAS
        plgpu.semaphore_wait(ready.at[other])
        plgpu.copy_gmem_to_smem(between.at[other], tile, barrier)
        plgpu.barrier_wait(barrier)
        o[i] = tile[...]

    make = over_rows(body, plgpu.SMEM((128,), F32), plgpu.Barrier())
    everywhere.check(make, [ROWS], np.roll(ROWS, -1, 0) + 1)


@everywhere.gives([ROWS[:4]], lambda *_: ROWS[3::-1], grid={"i": 2}, cluster={"c": 2})
def test_clusters_meet_at_a_barrier_of_the_grid(x, o):
    i, c = lax.axis_index("i"), lax.axis_index("c")
    stored = plgpu.get_global(plgpu.GMEM((4, 128), F32))
    barrier = GridBarrier.of(4)
    stored[2 * i + c] = x[2 * i + c]
    barrier.meet(2 * i + c)
    o[2 * i + c] = stored[3 - (2 * i + c)]


@everywhere.gives([ROWS], ROWS, by=over_rows)
def test_a_delay_changes_nothing(x, o):
    i = lax.axis_index("i")
    plgpu.delay(100)
    plgpu.delay(10 * i)
    plgpu.warp_map(lambda warp: plgpu.delay(warp))
    o[i] = x[i]


# --- instructions ---------------------------------------------------------------------


def instructions(body, semantics):
    kernel = under(semantics, over_rows(body)())
    (report,) = offline.compile(kernel, ROWS, target="sm_90a")
    return report.ptx


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_signals_and_waits_are_instructions_of_their_scope(semantics, scope):
    def body(x, o):
        i = lax.axis_index("i")
        ready = plgpu.get_global(REGULAR)
        plgpu.semaphore_signal(ready, memory_scope=scope)
        plgpu.semaphore_wait(ready, memory_scope=scope)
        o[i] = x[i]

    ptx = instructions(body, semantics)
    for name in (
        f"red.release.{scope}.global.add.u32",
        f"ld.acquire.{scope}.global.s32",
        f"atom.acquire.{scope}.global.cas.b32",
    ):
        assert ptx.count(name) == 1


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_parallel_signals_share_one_fence(semantics):
    def body(x, o):
        i = lax.axis_index("i")
        ready = plgpu.get_global(REGULAR((3,)))
        o[i] = x[i]
        signals = [plgpu.SemaphoreSignal(ready.at[j], inc=2) for j in range(3)]
        plgpu.semaphore_signal_parallel(*signals)

    ptx = instructions(body, semantics)
    assert ptx.count("fence.acq_rel.sys") == 1
    assert ptx.count("red.relaxed.sys.global.add.u32") == 3
    assert ptx.index("fence.acq_rel.sys") < ptx.index("red.relaxed.sys")


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_a_read_is_an_acquire_and_a_delay_is_nanosleep(semantics):
    def body(x, o):
        plgpu.delay(50)
        count = plgpu.semaphore_read(plgpu.get_global(REGULAR))
        o[lax.axis_index("i")] = x[lax.axis_index("i")] + count.astype(F32)

    ptx = instructions(body, semantics)
    assert "ld.acquire.sys.global.s32" in ptx and "nanosleep.u32" in ptx


# --- faults of the emitted code -------------------------------------------------------


def handover(x, o):
    """Each CTA stores a row, and reads the next one's."""
    i = lax.axis_index("i")
    stored = plgpu.get_global(plgpu.GMEM((CTAS, 128), F32))
    ready = plgpu.get_global(REGULAR((CTAS,)))
    stored[i] = 2 * x[i]
    plgpu.semaphore_signal(ready.at[i], memory_scope="gpu")
    plgpu.semaphore_wait(ready.at[(i + 1) % CTAS], memory_scope="gpu")
    o[i] = stored[(i + 1) % CTAS]


def run_with(fault):
    return faults.run(over_rows(handover)(None), [ROWS], fault)


def test_the_code_without_a_fault_is_right():
    np.testing.assert_array_equal(run_with(None), 2 * np.roll(ROWS, -1, 0))


@pytest.mark.parametrize(
    "fault",
    [
        faults.edit_text("red.release", "red.relaxed"),
        faults.edit_text("(ld|atom).acquire", r"\1.relaxed"),
        faults.edit_text("setp.lt.s32 again, seen", "setp.ge.s32 again, seen"),
        faults.drop("nvvm.barrier"),
    ],
)
def test_an_order_that_is_missing_is_found(fault):
    with pytest.raises(PtxError, match="before the threads have met"):
        run_with(fault)


def test_a_wait_without_a_signal_is_found():
    with pytest.raises(DeadlockError):
        run_with(faults.drop_text("red.release"))


@pytest.mark.parametrize("parallel", [False, True])
def test_semaphores_outlive_the_kernels_that_share_them(parallel):
    def signals(x, ready, o):
        i = lax.axis_index("i")
        o[i] = 2 * x[i]
        if parallel:
            plgpu.semaphore_signal_parallel(plgpu.SemaphoreSignal(ready.at[i], inc=2))
        else:
            plgpu.semaphore_signal(ready.at[i], 2)

    def waits(x, ready, o):
        i = lax.axis_index("i")
        plgpu.semaphore_wait(ready.at[i])
        o[i] = x[i] + plgpu.semaphore_read(ready.at[i]).astype(F32)

    def make(interpret):
        kernel = functools.partial(
            plgpu.kernel,
            out_type=jax.ShapeDtypeStruct(ROWS.shape, F32),
            grid=(CTAS,),
            grid_names=("i",),
            interpret=interpret,
        )

        def run(x):
            ready = plgpu.alloc_semaphore((CTAS,))
            return kernel(waits)(kernel(signals)(x, ready), ready), ready[...]

        return run

    expected = 2 * ROWS + 1, np.ones(CTAS, np.int32)
    np.testing.assert_array_equal(make(None)(ROWS)[1], expected[1])
    everywhere.check(make, [ROWS], expected)


def test_a_signal_through_a_lasting_semaphore_orders_accesses():
    def body(x, arrived, o):
        i = lax.axis_index("i")

        @plgpu.when(i == 0)
        def _():
            o[0] = x[0]
            plgpu.semaphore_signal(arrived)

        @plgpu.when(i == CTAS - 1)
        def _():
            plgpu.semaphore_wait(arrived)
            o[1] = o[0] + 1

    def make(interpret):
        out = jax.ShapeDtypeStruct((2, 128), F32)
        k = plgpu.kernel(
            body, out_type=out, grid=(CTAS,), grid_names=("i",), interpret=interpret
        )
        return lambda x: k(x, plgpu.alloc_semaphore())

    everywhere.check(make, [ROWS], np.stack([ROWS[0], ROWS[0] + 1]))


def signals(*increments, **device):
    """Signals of one semaphore at once."""
    return lambda e: tuple(
        plgpu.SemaphoreSignal(e.q, inc=n, **device) for n in increments
    )


GOOD = {
    "get_global": lambda e: {"what": REGULAR},
    "semaphore_signal": lambda e: {"semaphore": e.q},
    "SemaphoreSignal": lambda e: {"ref": e.q},
    "semaphore_signal_parallel": lambda e: {"signals": signals(1)(e)},
    "semaphore_wait": lambda e: {"semaphore": e.q},
    "semaphore_read": lambda e: {"sem_or_view": e.q},
    "delay": lambda e: {"nanos": 100},
}
EFFECTS = {
    "SemaphoreSignal.device_id": lambda: see.argument(
        "semaphore_signal_parallel.signals", signals(1), signals(1, device_id=1)
    ),
    "semaphore_signal.device_id": [None, 1],
    "semaphore_signal.device_id_type": "tests/primitives/devices/test_peers.py::"
    "test_devices_are_logical_ids_in_the_program",
    "alloc_semaphore.shape": "test_semaphores_outlive",
    "semaphore_signal.inc": [1, 2],
    "semaphore_signal.memory_scope": ["sys", "gpu"],
    "semaphore_wait.value": [1, 2],
    "semaphore_wait.decrement": [True, False],
    "semaphore_wait.memory_scope": ["sys", "gpu"],
    "semaphore_signal_parallel.signals": [signals(1), signals(1, 1)],
    "SemaphoreSignal.inc": lambda: see.argument(
        "semaphore_signal_parallel.signals", signals(1), signals(2)
    ),
}
FEATURES = [
    Row(
        "semaphores of a launch and of a CTA; barriers of a grid",
        upstream=(
            "scratch: semaphores in GMEM",
            "primitives: semaphore_signal_parallel",
        ),
        operations=(
            "semaphore_read",
            "semaphore_signal",
            "semaphore_signal_parallel",
            "semaphore_wait",
            "delay",
        ),
        runs="ctas_meet_at_a_barrier_of_the_grid",
        offline="parallel_signals_share_one_fence",
        instruction="red.relaxed.sys.global.add.u32",
        omissions={
            "wait": "grid_handover: no wait",
            "commit": "grid_handover: no wait for the store",
            "fence": "grid_handover: no fence",
            "count": "grid_handover: CTAs arrive twice",
        },
    ),
]
