# SPDX-License-Identifier: Apache-2.0
"""Asynchronous stores to the SMEM of other CTAs: everywhere, and mistakes with them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, offline
from tests.support import effects as see
from tests.support import everywhere
from tests.support.features.row import Row
from tests.support.refusal import in_each, refused, refused_by
from tests.support.semantics import BOTH, under

N = 128
F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
INBOX = plgpu.SMEM((N,), F32)
MEETING = plgpu.ClusterBarrier(collective_axes="c")


def ramp(*shape, dtype=np.float32):
    return (np.arange(np.prod(shape)) % 100).astype(dtype).reshape(shape)


def meet(barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def clustered(body, scratch, out, ctas=2, **options):
    return everywhere.kernel(body, out, *scratch, cluster={"c": ctas}, **options)


def result(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def send(x, ref, barrier, to=None, **options):
    position = 1 - lax.axis_index("c") if to is None else to
    plgpu.async_store_smem(
        x, ref, barrier, cluster_idx=position, cluster_dim="c", **options
    )


def exchange(shape, dtype, transforms=(), layout=None, **options):
    """Each CTA of a pair sends its array to the other one."""

    def body(x, o, inbox, full):
        i = lax.axis_index("c")
        value = x[i] if layout is None else plgpu.load(x, i, layout=layout)
        send(value, inbox, full, **options)
        plgpu.barrier_wait(full)
        o[i] = inbox[...]

    scratch = [plgpu.SMEM(shape, dtype, transforms=transforms), plgpu.Barrier()]
    return clustered(body, scratch, result(2, *shape, dtype=dtype))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float16", "uint16"])
@pytest.mark.parametrize("shape", [(64, 64), (24, 64), (8,)], ids=str)
def test_an_array_arrives_in_the_other_cta(shape, dtype):
    x = ramp(2, *shape).astype(jnp.dtype(dtype))
    everywhere.check(exchange(shape, dtype), [x], x[::-1])


@pytest.mark.parametrize("layout", [None, plgpu.Layout.WGMMA], ids=["default", "wgmma"])
def test_an_array_arrives_in_tiles(layout):
    x = ramp(2, 64, 128).astype(jnp.bfloat16)
    everywhere.check(exchange((64, 128), BF16, TILED, layout), [x], x[::-1])


@everywhere.gives(
    [],
    lambda: np.array([8, 7], np.int32),
    plgpu.SMEM((8,), I32),
    plgpu.Barrier(),
    cluster={"c": 2},
)
def test_a_single_element_arrives(o, inbox, full):
    i = lax.axis_index("c")
    send(i + 7, inbox.at[3], full)
    plgpu.barrier_wait(full)
    o[i] = inbox[3]


@everywhere.gives(
    [ramp(2, 4, N)],
    lambda x: np.roll(x[::-1], 1, axis=1),
    plgpu.SMEM((N,), F32),
    plgpu.Barrier(),
    cluster={"y": 2, "x": 4},
)
def test_positions_on_several_axes(x, o, inbox, full):
    i, j = lax.axis_index("y"), lax.axis_index("x")
    plgpu.async_store_smem(
        x[i, j],
        inbox,
        full,
        cluster_idx=((j + 1) % 4, 1 - i),
        cluster_dim=("x", "y"),
    )
    plgpu.barrier_wait(full)
    o[i, j] = inbox[...]


@everywhere.gives(
    [ramp(2, 5, N)],
    lambda x: x[::-1] + np.arange(5, dtype=np.float32)[:, None],
    plgpu.SMEM((2, N), F32),
    plgpu.Barrier(num_barriers=2),
    plgpu.ClusterBarrier(collective_axes="c", num_barriers=2),
    cluster={"c": 2},
)
def test_a_ring_of_slots(x, o, inbox, full, empty):
    """The receiver frees a slot by an arrival on a cluster barrier."""
    i = lax.axis_index("c")

    @plgpu.loop(0, 5)
    def _(k):
        slot = k % 2
        plgpu.when(k >= 2)(lambda: plgpu.barrier_wait(empty.at[slot]))
        send(x[i, k], inbox.at[slot], full.at[slot])
        plgpu.barrier_wait(full.at[slot])
        o[i, k] = inbox[slot] + k
        plgpu.barrier_arrive(empty.at[slot])


REDUCTIONS = {
    "add": (0, np.add.reduce),
    "max": (-1000, np.maximum.reduce),
    "min": (1000, np.minimum.reduce),
    "and": (-1, np.bitwise_and.reduce),
    "or": (0, np.bitwise_or.reduce),
    "xor": (0, np.bitwise_xor.reduce),
}


@pytest.mark.parametrize("atomic", REDUCTIONS)
def test_the_arrays_of_all_ctas_are_combined(atomic):
    start, reduce = REDUCTIONS[atomic]
    x = (ramp(4, N, dtype=np.int32) * 7) % 64 - (0 if atomic in ("and", "or") else 20)

    def body(x, o, total, full, meeting):
        i = lax.axis_index("c")
        total[...] = jnp.full((N,), start, I32)
        meet(meeting)
        send(x[i], total, full, to=0, atomic=atomic)

        @plgpu.when(i == 0)
        def _():
            plgpu.barrier_wait(full)
            o[...] = total[...]

    scratch = [plgpu.SMEM((N,), I32), plgpu.Barrier(num_arrivals=4), MEETING]
    make = clustered(body, scratch, result(N, dtype=I32), ctas=4)
    everywhere.check(make, [x.astype(np.int32)], reduce(x).astype(np.int32))


def compiled(make, x, target="sm_90a"):
    """The PTX under each semantics."""
    for semantics in BOTH:
        (report,) = offline.compile(under(semantics, make(None)), x, target=target)
        yield report.ptx


@pytest.mark.offline
def test_stores_are_wide_and_counted_on_the_other_ctas_barrier():
    for ptx in compiled(exchange((8 * N,), F32), ramp(2, 8 * N)):
        assert "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4" in ptx
        assert "expect_tx.release.cluster.shared::cluster" in ptx
        assert "mbarrier.try_wait.parity.acquire.cluster" in ptx


@pytest.mark.offline
def test_only_waits_for_the_stores_acquire_from_the_cluster():
    def body(x, o, tile, inbox, copied, full):
        i = lax.axis_index("c")
        plgpu.copy_gmem_to_smem(x.at[i], tile, copied)

        # The references have other variables in a loop.
        @plgpu.loop(0, 1)
        def _(_):
            plgpu.barrier_wait(copied)
            send(tile[...], inbox, full)
            plgpu.barrier_wait(full)

        o[i] = inbox[...]

    scratch = [INBOX, INBOX, plgpu.Barrier(), plgpu.Barrier()]
    make = clustered(body, scratch, result(2, N))
    x = ramp(2, N)
    everywhere.check(make, [x], x[::-1])
    for ptx in compiled(make, x):
        waits = re.findall(r"mbarrier\.try_wait\.parity\S*", ptx)
        assert sorted("acquire.cluster" in wait for wait in waits) == [False, True]


def exit_barriers(make, x, target="sm_90a"):
    """Returns the semantics of the arrivals before CTAs exit, under Lane, Warpgroup."""
    found = []
    for ptx in compiled(make, x, target):
        *_, arrival = re.findall(r"barrier\.cluster\.arrive\S*", ptx)
        found.append("relaxed" if "relaxed" in arrival else "release")
    return found


@pytest.mark.offline
def test_no_fence_precedes_the_exit_where_ctas_have_waited_for_each_other():
    x = ramp(2, N)
    assert exit_barriers(exchange((N,), F32), x) == ["relaxed"] * 2

    def body(x, o, inbox, full, meeting):
        i = lax.axis_index("c")
        send(x[i], inbox, full)
        plgpu.barrier_wait(full)
        o[i] = inbox[...]
        plgpu.barrier_arrive(meeting)  # on that of the other CTA, too

    make = clustered(body, [INBOX, plgpu.Barrier(), MEETING], result(2, N))
    assert exit_barriers(make, x) == ["release"] * 2


@pytest.mark.offline
def test_a_fence_precedes_the_exit_where_the_tensor_core_arrives_in_other_ctas():
    def body(x, o, inbox, full, done):
        i = lax.axis_index("c")
        send(x[i], inbox, full)
        plgpu.tcgen05_commit_arrive(done, collective_axis="c")
        plgpu.barrier_wait(full)
        o[i] = inbox[...]

    done = plgpu.Barrier(orders_tensor_core=True)
    make = clustered(body, [INBOX, plgpu.Barrier(), done], result(2, N))
    assert exit_barriers(make, ramp(2, N), "sm_100a") == ["release"] * 2


@pytest.mark.offline
def test_a_relaxed_arrival_has_no_fence():
    x = ramp(2, 64, 64)
    make = exchange((64, 64), F32, sem="relaxed")
    everywhere.check(make, [x], x[::-1])
    for ptx in compiled(make, x):
        assert "expect_tx.relaxed.cluster.shared::cluster" in ptx
        assert "release.cluster.shared" not in ptx


# --- mistakes -------------------------------------------------------------------------


def run(body, scratch, *arrays, seed=0, **options):
    make = clustered(body, scratch, result(2, N), **options)
    return make(plgpu.InterpretParams(seed=seed))(*arrays)


def reported(body, error, match=None, arrivals=1):
    """Expects an error of a body, whatever the schedule."""
    scratch = [INBOX, plgpu.Barrier(num_arrivals=arrivals)]
    for seed in range(4):
        with pytest.raises(error, match=match):
            run(body, scratch, ramp(2, N), seed=seed)


@everywhere.tests(reported, (errors.RaceError, errors.UninitializedReadError))
def test_a_missing_wait_is_reported(x, o, inbox, full):
    i = lax.axis_index("c")
    inbox_is_read = plgpu.cluster_ref(inbox, {"c": i})
    send(x[i], inbox, full)
    o[i] = inbox_is_read[...]
    plgpu.barrier_wait(full)


@everywhere.tests(reported, errors.BarrierError)
def test_a_store_that_nobody_waits_for_is_reported(x, o, inbox, full):
    i = lax.axis_index("c")
    send(x[i], inbox, full)
    o[i] = x[i]


@everywhere.tests(reported, errors.RaceError)
def test_a_store_to_memory_that_is_not_known_to_be_free_is_reported(x, o, inbox, full):
    i = lax.axis_index("c")
    inbox[...] = x[i]
    o[i] = inbox[...]
    send(x[i], inbox, full)
    plgpu.barrier_wait(full)


@pytest.mark.parametrize("sem", ["release", "relaxed"])
def test_a_relaxed_store_makes_no_other_stores_known(sem):
    def body(x, o, inbox, mine, full, meeting):
        i = lax.axis_index("c")
        mine[...] = x[i]
        send(x[i], inbox, full, sem=sem)
        plgpu.barrier_wait(full)
        o[i] = inbox[...] + plgpu.cluster_ref(mine, {"c": 1 - i})[...]
        meet(meeting)

    scratch, x = [INBOX, INBOX, plgpu.Barrier(), MEETING], ramp(2, N)
    if sem == "release":
        np.testing.assert_array_equal(run(body, scratch, x), 2 * x[::-1])
        return
    with pytest.raises(errors.RaceError):
        run(body, scratch, x)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_copy_of_what_has_arrived_needs_a_fence(fenced):
    def body(x, o, inbox, full):
        i = lax.axis_index("c")
        send(x[i], inbox, full)
        plgpu.barrier_wait(full)
        if fenced:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(inbox, o.at[i])
        plgpu.wait_smem_to_gmem(0)

    x = ramp(2, N)
    if fenced:
        got = run(body, [INBOX, plgpu.Barrier()], x)
        np.testing.assert_array_equal(got, x[::-1])
        return
    with pytest.raises(errors.RaceError, match="not fenced"):
        run(body, [INBOX, plgpu.Barrier()], x)


@everywhere.tests(reported, errors.RaceError, "asynchronous store", arrivals=2)
def test_plain_stores_of_several_ctas_to_one_place_are_a_race(x, o, inbox, full):
    i = lax.axis_index("c")
    send(x[i], inbox, full, to=0)
    plgpu.when(i == 0)(lambda: plgpu.barrier_wait(full))
    o[i] = x[i]


# --- refused --------------------------------------------------------------------------


TO = {"cluster_idx": 0, "cluster_dim": "c"}


def trace(body, *declared, **options):
    scratch = [*declared, plgpu.Barrier()]
    jax.eval_shape(clustered(body, scratch, result(2, N), **options)(None))


@refused_by(trace, INBOX)
def test_there_are_no_sums_of_floats(o, inbox, full):
    plgpu.async_store_smem(o[0], inbox, full, **TO, atomic="add")  # HERE


@pytest.mark.parametrize("dtype", ["int4", "bool"])
@refused
def test_elements_of_less_than_a_byte_are_refused(dtype):
    def body(o, inbox, full):
        plgpu.async_store_smem(jnp.zeros((N,), dtype), inbox, full, **TO)  # HERE

    trace(body, plgpu.SMEM((N,), dtype))


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(lambda ref: ref.at[0, :63], id="odd-length"),
        pytest.param(lambda ref: ref.at[0, 1:65], id="odd-start"),
        pytest.param(lambda ref: ref.at[:, 0], id="column"),
        pytest.param(lambda ref: ref.at[0, ::2], id="stride"),
    ],
)
@refused_by(trace, plgpu.SMEM((8, N), BF16))
def test_narrow_elements_that_do_not_fill_words_are_refused(o, inbox, full, *, part):
    there = part(inbox)
    x = jnp.zeros(there.shape, BF16)
    plgpu.async_store_smem(x, there, full, **TO)  # HERE


@refused_by(trace, INBOX)
def test_each_axis_has_a_position(o, inbox, full):
    to = {**TO, "cluster_idx": (0, 1)}
    plgpu.async_store_smem(o[0], inbox, full, **to)  # HERE


@refused_by(trace, INBOX)
def test_a_position_beyond_the_cluster_is_refused(o, inbox, full):
    to = {**TO, "cluster_idx": 2}
    plgpu.async_store_smem(o[0], inbox, full, **to)  # HERE


@refused_by(trace, INBOX)
def test_an_array_of_another_shape_is_refused(o, inbox, full):
    plgpu.async_store_smem(o[0, :64], inbox, full, **TO)  # HERE


def lower(body, semantics):
    scratch = [plgpu.SMEM((8, N), BF16), plgpu.Barrier()]
    kernel = clustered(body, scratch, result(2, N, dtype=BF16))()
    offline.lower(under(semantics, kernel), np.array([2], np.int32), target="sm_90a")


@refused_by(in_each(lower, semantics=BOTH))
def test_a_start_that_is_not_known_to_fill_words_is_refused(k, o, inbox, full):
    part = inbox.at[0, plgpu.ds(k[0], 64)]
    plgpu.async_store_smem(jnp.zeros((64,), BF16), part, full, **TO)  # HERE
    plgpu.barrier_wait(full)
    o[lax.axis_index("c")] = inbox[0]


GOOD = {
    "async_store_smem": lambda e: {
        "src": e.array,
        "ref": e.s,
        "barrier": e.b,
        "cluster_idx": 0,
        "cluster_dim": "c",
    }
}
EFFECTS = {
    "async_store_smem.atomic": "",
    "async_store_smem.sem": "",
    "async_store_smem.optimized": see.HINT,
}
FEATURES = [
    Row(
        "asynchronous stores to other CTAs, and reductions there",
        upstream=("copy: reductions into SMEM of the cluster",),
        operations=("async_store_smem",),
        runs="an_array_arrives_in_the_other_cta",
        offline="stores_are_wide_and_counted_on_the_other_ctas_barrier",
        instruction="st.async.weak.shared::cluster.mbarrier::complete_tx::bytes",
        omissions={
            "wait": "async_stores: no wait for full",
            "commit": "async_stores: no commit",
            "fence": "(SMEM alone)",
            "count": "async_stores: two arrivals expected",
        },
    ),
]
