# SPDX-License-Identifier: Apache-2.0
"""Clusters, their barrier, SMEM of other CTAs: emulated, as emitted code, on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, offline
from tests.support import everywhere
from tests.support.features.row import Row
from tests.support.semantics import BOTH, under

N = 128
F32, I32 = jnp.float32, jnp.int32
TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def ramp(*shape, dtype=np.float32):
    return (np.arange(np.prod(shape)) % 100).astype(dtype).reshape(shape)


def meet(barrier):
    """Every CTA of the cluster waits for all others."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def of(cluster, names, body, arrays, out, **options):
    """`make` of a kernel of one cluster: body(*inputs, output, *arrays, meeting)."""
    meeting = plgpu.ClusterBarrier(collective_axes=(tuple(names),))
    options["cluster"] = dict(zip(names, cluster, strict=True))
    return everywhere.kernel(body, out, *arrays, meeting, **options)


def pair(body, arrays, out, **options):
    return of((2,), "c", body, arrays, out, **options)


def result(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def neighbour(ref):
    return plgpu.cluster_ref(ref, {"c": 1 - lax.axis_index("c")})


# --- reads ----------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "int4"])
def test_a_cta_reads_an_array_of_another_one(dtype):
    def body(x, o, tile, meeting):
        i = lax.axis_index("c")
        tile[...] = x[i]
        meet(meeting)
        o[i] = neighbour(tile)[...]

    x = ramp(2, 16, N).astype(jnp.dtype(dtype))
    make = pair(body, [plgpu.SMEM((16, N), dtype)], result(*x.shape, dtype=dtype))
    everywhere.check(make, [x], x[::-1])


# A part of a reference, and the same part of an array of NumPy; k is 8.
PARTS = {
    "slice": (lambda r, k: r[8:40, 32:96], lambda a: a[8:40, 32:96]),
    "dynamic": (lambda r, k: r.at[plgpu.ds(k, 16)][3:9], lambda a: a[11:17]),
    "transposed": (lambda r, k: r.T[...], lambda a: a.T),
    "strided": (lambda r, k: r[::2, 1::2], lambda a: a[::2, 1::2]),
    "row": (lambda r, k: r[k], lambda a: a[8]),
    "element": (lambda r, k: r[k, 3][None], lambda a: a[8, 3][None]),
    "indexed": (
        lambda r, k: r[lax.iota(I32, N) * 7 % 64, 5],
        lambda a: a[np.arange(N) * 7 % 64, 5],
    ),
    "masked": (
        lambda r, k: plgpu.load(
            r, (lax.iota(I32, N), 3), mask=lax.iota(I32, N) < 64, other=-1.0
        ),
        lambda a: np.concatenate([a[:, 3], np.full(64, -1, np.float32)]),
    ),
    "bitcast": (
        lambda r, k: r.bitcast(I32)[8].astype(F32),
        lambda a: a[8].view(np.int32).astype(np.float32),
    ),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("transforms", [(), TILED], ids=["row-major", "tiled"])
def test_a_cta_reads_a_part_of_an_array_of_another_one(part, transforms):
    of_ref, of_array = PARTS[part]
    x = ramp(2, 64, N)
    want = np.stack([of_array(x[1 - i]) for i in range(2)])

    def body(x, k, o, tile, meeting):
        i = lax.axis_index("c")
        tile[...] = x[i]
        meet(meeting)
        o[i] = of_ref(neighbour(tile), k[0])

    array = plgpu.SMEM((64, N), F32, transforms=transforms)
    make = pair(body, [array], result(*want.shape))
    everywhere.check(make, [x, np.array([8], np.int32)], want)


# --- positions ------------------------------------------------------------------------


# The position of the other CTA, and on all axes, from that of a CTA in 2 x 4.
POSITIONS = {
    "y": (lambda y, x: {"y": 1 - y}, lambda y, x: (1 - y, x)),
    "x": (lambda y, x: {"x": (x + 1) % 4}, lambda y, x: (y, (x + 1) % 4)),
    "both": (lambda y, x: {"x": x, "y": 1 - y}, lambda y, x: (1 - y, x)),
    "static": (lambda y, x: {"y": 0, "x": 3}, lambda y, x: (0, 3)),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_axes_that_are_not_named_keep_their_position(name):
    position, source = POSITIONS[name]
    x = ramp(2, 4, N)

    def body(x, o, tile, meeting):
        i, j = lax.axis_index("y"), lax.axis_index("x")
        tile[...] = x[i, j]
        meet(meeting)
        o[i, j] = plgpu.cluster_ref(tile, position(i, j))[...]

    want = np.stack([[x[source(i, j)] for j in range(4)] for i in range(2)])
    make = of((2, 4), "yx", body, [plgpu.SMEM((N,), F32)], result(*x.shape))
    everywhere.check(make, [x], want)


def test_references_to_references_move_along_one_axis_after_the_other():
    x = ramp(2, 2, N)

    def body(x, o, tile, meeting):
        i, j = lax.axis_index("y"), lax.axis_index("x")
        tile[...] = x[i, j]
        meet(meeting)
        line = plgpu.cluster_ref(tile.at[32:64], {"y": 1 - i})
        o[i, j] = plgpu.cluster_ref(line, {"x": 1 - j})[...]

    make = of((2, 2), "yx", body, [plgpu.SMEM((N,), F32)], result(2, 2, 32))
    everywhere.check(make, [x], x[::-1, ::-1, 32:64])


@everywhere.gives(
    [ramp(3, 2, N)],
    lambda x: x[:, ::-1],
    [plgpu.SMEM((N,), F32)],
    result(3, 2, N),
    by=pair,
    grid={"g": 3},
)
def test_every_cta_of_every_cluster_reads_its_own_cluster(x, o, tile, meeting):
    g, i = lax.axis_index("g"), lax.axis_index("c")
    tile[...] = x[g, i]
    meet(meeting)
    o[g, i] = neighbour(tile)[...]


# --- writes ---------------------------------------------------------------------------


WRITES = {
    "store": lambda other, x: other.set(x),
    "part": lambda other, x: [
        other.at[8 * k : 8 * k + 8].set(x[8 * k : 8 * k + 8]) for k in range(4)
    ],
    "transposed": lambda other, x: other.T.set(x.T),
    "masked": lambda other, x: plgpu.store(other, (), x, mask=x > -1),
    "swap": lambda other, x: other.set(other.swap(x) * 0 + x),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("transforms", [(), TILED], ids=["row-major", "tiled"])
def test_a_cta_writes_an_array_of_another_one(how, transforms):
    x = ramp(2, 32, N)

    def body(x, o, tile, meeting):
        i = lax.axis_index("c")
        tile[...] = jnp.zeros((32, N), F32)
        meet(meeting)
        WRITES[how](neighbour(tile), x[i])
        meet(meeting)
        o[i] = tile[...]

    array = plgpu.SMEM((32, N), F32, transforms=transforms)
    everywhere.check(pair(body, [array], result(*x.shape)), [x], x[::-1])


def test_packed_elements_are_written_one_by_one():
    x = ramp(2, N).astype(jnp.int4)

    def body(x, o, tile, meeting):
        i = lax.axis_index("c")
        tile[...] = jnp.zeros((N,), jnp.int4)
        meet(meeting)
        neighbour(tile)[3:67] = x[i, 3:67]
        meet(meeting)
        o[i] = tile[...]

    want = np.zeros((2, N), x.dtype)
    want[:, 3:67] = x[::-1, 3:67]
    make = pair(body, [plgpu.SMEM((N,), jnp.int4)], result(2, N, dtype=jnp.int4))
    everywhere.check(make, [x], want)


@everywhere.gives(
    [ramp(2, N)],
    lambda x: np.tile(x.sum(axis=0), (2, 1)) + (np.arange(N) < 32),
    [plgpu.SMEM((N,), F32)],
    result(2, N),
    by=pair,
)
def test_an_update_adds_to_the_other_ctas_elements(x, o, tile, meeting):
    i = lax.axis_index("c")
    tile[...] = x[i]
    meet(meeting)
    neighbour(tile).addupdate(x[i])
    neighbour(tile)[:32] += 1
    meet(meeting)
    o[i] = tile[...]


def test_all_warpgroups_of_all_ctas_add_to_one_array():
    def body(o, counts, meeting):
        i, w = lax.axis_index("c"), lax.axis_index("w")

        @plgpu.when(w == 0)
        def _():
            counts[...] = jnp.zeros((N,), I32)

        meet(meeting)
        first = plgpu.cluster_ref(counts, {"c": 0})
        plgpu.atomic_add(first, 10 * i + w + 1)
        plgpu.atomic_add(first.at[lax.iota(I32, 64) // 2], 1)
        meet(meeting)

        @plgpu.when((i == 1) & (w == 0))
        def _():
            o[...] = first[...]

    want = np.full(N, 26)
    want[:32] += 8
    everywhere.run(
        body,
        [],
        want.astype(np.int32),
        plgpu.SMEM((N,), I32),
        plgpu.ClusterBarrier(collective_axes="c", num_arrivals=2),
        cluster={"c": 2},
        threads={"w": 2},
    )


ATOMICS = {
    "add": (plgpu.atomic_add, lambda old, x: old + x),
    "max": (plgpu.atomic_max, np.maximum),
    "min": (plgpu.atomic_min, np.minimum),
    "and": (plgpu.atomic_and, np.bitwise_and),
    "or": (plgpu.atomic_or, np.bitwise_or),
    "xor": (plgpu.atomic_xor, np.bitwise_xor),
    "xchg": (plgpu.atomic_xchg, lambda old, x: x),
}


@pytest.mark.parametrize("name", ATOMICS)
def test_an_atomic_operation_returns_the_other_ctas_old_elements(name):
    operation, expected = ATOMICS[name]
    old, x = ramp(2, N, dtype=np.int32), ramp(2, N, dtype=np.int32) * 3 % 64

    def body(old, x, o, before, tile, meeting):
        i = lax.axis_index("c")
        tile[...] = old[i]
        meet(meeting)
        before[i] = operation(neighbour(tile), x[i])
        meet(meeting)
        o[i] = tile[...]

    out = (result(2, N, dtype=I32), result(2, N, dtype=I32))
    make = pair(body, [plgpu.SMEM((N,), I32)], out)
    want = expected(old, x[::-1]).astype(np.int32)
    everywhere.check(make, [old, x], (want, old[::-1]))


@everywhere.gives(
    [ramp(2, 4)], lambda x: x[::-1] + 1, [plgpu.SMEM((4,), F32)], result(2, 4), by=pair
)
def test_single_warps_access_elements_of_other_ctas(x, o, tile, meeting):
    i = lax.axis_index("c")
    for k in range(4):
        tile[k] = x[i, k]
    meet(meeting)

    @plgpu.warp_map
    def _(w):
        o[i, w] = neighbour(tile)[w] + 1


# --- emitted code ---------------------------------------------------------------------


def _ptx(make, *args):
    texts = []
    for semantics in BOTH:
        (report,) = offline.compile(
            under(semantics, make(None)), *args, target="sm_90a"
        )
        texts.append(report.ptx)
    return texts


@pytest.mark.offline
def test_accesses_are_instructions_on_the_clusters_shared_memory():
    def body(x, o, tile, meeting):
        i = lax.axis_index("c")
        tile[...] = x[i]
        meet(meeting)
        o[i] = neighbour(tile)[...]
        meet(meeting)
        neighbour(tile)[...] = x[i]
        plgpu.atomic_add(neighbour(tile), 1.0)
        plgpu.atomic_add(tile, 1.0)

    make = pair(body, [plgpu.SMEM((4 * N,), F32)], result(2, 4 * N))
    for ptx in _ptx(make, ramp(2, 4 * N)):
        assert "mapa.shared::cluster" in ptx
        assert "ld.shared::cluster.v4" in ptx
        assert "st.shared::cluster.v4" in ptx
        assert "red.relaxed.cluster.shared::cluster.add.f32" in ptx
        # The other CTA updates the same elements.
        assert "red.relaxed.cluster.shared::cta.add.f32" in ptx
        assert ptx.index("barrier.cluster.wait") < ptx.index("ld.shared::cluster")
        assert ptx.rindex("red.relaxed") < ptx.rindex("barrier.cluster.wait")


@pytest.mark.offline
def test_arrivals_release_stores_to_smem_at_cluster_scope():
    def body(o, tile, meeting):
        tile[...] = jnp.ones((N,), F32)
        meet(meeting)

        # No thread stores to GMEM.
        @plgpu.when(neighbour(tile)[0] > 2)
        def _():
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, o)
            plgpu.wait_smem_to_gmem(0)

    make = pair(body, [plgpu.SMEM((N,), F32)], result(N))
    for ptx in _ptx(make):
        assert "mbarrier.arrive.release.cluster.shared::cluster" in ptx
        assert "mbarrier.try_wait.parity.acquire.cluster" in ptx
        assert "release.cta.shared::cluster" not in ptx


# --- clusters of 16 CTAs --------------------------------------------------------------


def of_16_ctas():
    def body(x, o, tile, meeting):
        i = lax.axis_index("c")
        tile[...] = x[i]
        meet(meeting)
        o[i] = plgpu.cluster_ref(tile, {"c": 15 - i})[...]

    return of((16,), "c", body, [plgpu.SMEM((N,), F32)], result(16, N))


def test_a_cluster_may_have_16_ctas():
    x = ramp(16, N)
    everywhere.check(of_16_ctas(), [x], x[::-1])


@pytest.mark.offline
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_cluster_of_16_ctas_compiles(target):
    (report,) = offline.compile(of_16_ctas()(), ramp(16, N), target=target)
    assert ".reqnctapercluster 16" in report.ptx


# --- the barrier of a cluster ---------------------------------------------------------

STEPS = ramp(3, 2, N)


def in_turns(around="cluster", left_out=""):
    """A warpgroup copies to SMEM, another one reads that of the other CTA, by turns."""

    def sync(name):
        if name != left_out:
            plgpu.cluster_sync()

    def body(x, o, tile, full):
        i, w = lax.axis_index("c"), lax.axis_index("w")

        @plgpu.loop(0, 3)
        def _(step):
            @plgpu.when(w == 0)
            def _():
                plgpu.copy_gmem_to_smem(x.at[step, i], tile, full)
                plgpu.barrier_wait(full)

            sync("copied")

            @plgpu.when(w == 1)
            def _():
                o[step, i] = (neighbour(tile) if around == "cluster" else tile)[...]

            sync("read")

    options = {around: {"c": 2}, "threads": {"w": 2}}
    scratch = plgpu.SMEM((N,), F32), plgpu.Barrier()
    return everywhere.kernel(body, result(*STEPS.shape), *scratch, **options)


def test_all_warpgroups_of_a_cluster_wait_for_each_other():
    everywhere.check(in_turns(), [STEPS], STEPS[:, ::-1])


def test_without_a_cluster_the_warpgroups_of_a_cta_wait_for_each_other():
    everywhere.check(in_turns("grid"), [STEPS], STEPS)


@pytest.mark.parametrize("around", ["cluster", "grid"])
@pytest.mark.parametrize("left_out", ["copied", "read"])
def test_without_a_sync_accesses_race(around, left_out):
    with pytest.raises((errors.RaceError, errors.UninitializedReadError)):
        in_turns(around, left_out)(plgpu.InterpretParams())(STEPS)


@pytest.mark.parametrize("missing", ["c", "w"])
def test_a_sync_that_not_all_call_is_a_deadlock(missing):
    def body():
        plgpu.when(lax.axis_index(missing) == 0)(plgpu.cluster_sync)

    make = everywhere.kernel(body, (), cluster={"c": 2}, threads={"w": 2})
    with pytest.raises(
        errors.DeadlockError, match=r"2 of 4 arrivals(.|\n)*cluster_sync"
    ):
        make(plgpu.InterpretParams())()


def test_a_warp_cannot_sync_a_cluster():
    make = everywhere.kernel(lambda: plgpu.warp_map(lambda w: plgpu.cluster_sync()), ())
    with pytest.raises(errors.UnsupportedError, match="cluster_sync inside warp_map"):
        make(plgpu.InterpretParams())()


@pytest.mark.offline
def test_the_instructions_of_a_sync():
    for ptx in _ptx(in_turns(), STEPS):
        # One is that at the end of the kernel; that at its start is relaxed.
        syncs = ptx.count("barrier.cluster.arrive.aligned")
        assert syncs > 2
        assert ptx.count("barrier.cluster.wait.aligned") == syncs + 1
        # What the other CTA has read is overwritten by a copy.
        assert "fence.proxy.async" in ptx
    for ptx in _ptx(in_turns("grid"), STEPS):
        assert "barrier.cluster" not in ptx


GOOD = {
    "cluster_ref": lambda e: {"ref": e.s, "block_id": {"c": 0}},
    "cluster_sync": lambda e: {},
}
FEATURES = [
    Row(
        "a barrier of all warpgroups of a cluster",
        operations=("cluster_sync",),
        runs="all_warpgroups_of_a_cluster_wait_for_each_other",
        offline="the_instructions_of_a_sync",
        instruction="barrier.cluster.arrive.aligned",
        omissions={"wait": "without_a_sync_accesses_race"},
    ),
]
